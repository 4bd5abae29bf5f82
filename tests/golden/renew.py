"""Frozen numbers, which show that a change lost nothing: losses, gradients, orders and contents of samples, short runs.

    .venv/bin/python -m tests.golden.renew [NAME ...]

writes `tests/golden/NAME.json` (all without a NAME; `runs` also writes `probes.csv`) from the code as it stands. Do
this only if a change of numbers is meant, and say in its commit which numbers changed and why. A change of form (a
renamed function, another format of files) needs an edit of the modules here, and no new numbers.

Frozen elsewhere, and not again here:
- A run that is killed and goes on: tests/e2e/test_kill_and_restart.py and tests/trainer/checkpoint.
- Ranks, chunks, checkpointing and micro batches are one process: tests/trainer/test_exactness.py, test_trajectory.py.
- Draws of the counter-based generator: tests/data_pipeline/core/test_counter_rng.py. Masks and crops of sounds:
  tests/trainer/views/test_expert_audio.py.
- The filed studies: benchmarks/results/suppression_small.tar.xz holds each run's config and the probe of each label;
  digits_50_epochs_h200.json, digits_200_epochs_h200.json and dropout_rate*.json beside it hold theirs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.golden import contents, objectives, runs, steps, traces, views
from tests.golden.digests import FOLDER

NUM_DIGITS = 14  # of a number in a file


def _traces() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        directory = traces.write_datasets(Path(name))
        return {case: traces.one_case(case, directory) for case in traces.CASES}


def _contents() -> dict[str, Any]:
    found = {}
    for case in contents.CASES:
        with tempfile.TemporaryDirectory() as name:
            found[case] = contents.one_case(case, Path(name))
    return found


def _runs() -> dict[str, Any]:
    """Return the losses; also write the rows of the probes."""
    found, rows = {}, []
    for recipe in runs.CASES:
        with tempfile.TemporaryDirectory() as name:
            run = runs.one_run(recipe, Path(name))
            found[recipe] = runs.losses(run)
            rows += runs.probed(recipe, run) if recipe in runs.PROBED else []
    runs.write_rows(rows)
    return found


FILES: dict[str, Callable[[], dict[str, Any]]] = {
    "objectives": objectives.numbers_of,
    "steps": lambda: {case: steps.one_case(case) for case in steps.CASES},
    "traces": _traces,
    "contents": _contents,
    "views": lambda: {case: views.one_case(case) for case in views.CASES},
    "runs": _runs,
}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.{NUM_DIGITS}g}") if isinstance(value, float) else value


def main(names: list[str]) -> None:
    torch.set_num_threads(1)  # as in the tests
    for name in names or FILES:
        lines = (f"{json.dumps(case)}: {json.dumps(_rounded(found))}" for case, found in FILES[name]().items())
        (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
