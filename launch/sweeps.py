"""The runs of a sweep or a study: which there are, and whether they may be trained in their directories."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from configs.sweep import MAX_RUNS, resolve_sweep
from data_pipeline.core.errors import UserError
from launch.planned_run import PlannedRun, planned_within
from trainer.checkpoint.run_state import DataIdentity, identity_in_provenance
from trainer.data import DataConfig, read_manifests
from trainer.run_dir import RunDir, runs_of

_MAX_GROUP: Final = 128  # characters that W&B allows


def planned_sweep(arguments: argparse.Namespace) -> tuple[str, Path, list[PlannedRun]]:
    """Return the name of a command line's sweep, its directory, and its runs. Raises `UserError` if it is not valid."""
    if arguments.config is None:
        raise UserError("--sweep belongs to --config; a study is a list of runs already")
    if arguments.run_dir is not None:
        raise UserError("a sweep has a directory for each run; pass --study-dir in place of --run-dir")
    study_dir = arguments.study_dir
    name, runs = resolve_sweep(
        arguments.config,
        arguments.sweep,
        overrides=arguments.set,
        group=None if study_dir is None else study_dir.absolute().name[:_MAX_GROUP],
        max_runs=arguments.max_runs or MAX_RUNS,
    )
    home = (study_dir or Path("runs") / name).absolute()
    return name, home, planned_within(home, runs)


def refuse_replaced_data(home: Path, runs: Sequence[PlannedRun], *, accepted_data: Collection[str]) -> None:
    """Raise `UserError` if a run in `home` was trained on other data than `runs` find at the same place now.

    The results of such a study or sweep could not be compared. `accepted_data` are the names of new data that may be
    used. Data that cannot be read are passed over, because finished runs do not need them.
    """
    now: dict[tuple[str, ...], DataIdentity] = {}
    for data in {planned.config.data.locations: planned.config.data for planned in runs}.values():
        with contextlib.suppress(UserError):
            now[data.locations] = read_manifests(data).identity
    for run_dir in map(RunDir, runs_of([home])):
        trained_on = identity_in_provenance(run_dir)
        if trained_on is None or not run_dir.config.is_file():
            continue
        where = DataConfig.parse(run_dir.read_config().get("data", {}), where=str(run_dir.config)).locations
        found = now.get(where, trained_on)
        if found != trained_on and found.name not in accepted_data:
            raise UserError(
                f"{run_dir.path} was trained on other data than {' and '.join(where)} hold now, so its results could "
                "not be compared with those of new runs; put the old data back, pass another --study-dir, or add "
                f"--accept-data {found.name}"
            )
