"""Write and read records of skipped steps, for `python -m trainer.replay`.

RUN_DIR/nonfinite/step_00000123/ holds record.json, and the states of all modules and of the objective as safetensors
files. Invariant: a run keeps at most `MAX_RECORDS` records, so they cannot fill a disk.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import safetensors.torch
from pydantic import ConfigDict
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import sample_key
from data_pipeline.core.schema import Schema
from trainer.checkpoint.files import write_tensors
from trainer.run_dir import RunDir

MAX_RECORDS: Final = 5
_RECORD_NAME: Final = "record.json"


class RankValues(Schema):
    """The values of one rank in a step: the keys of its samples, its loss and other metrics."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="strings")

    keys: tuple[str, ...]
    metrics: dict[str, float]

    @classmethod
    def of(cls, index_B: Tensor, metrics: Mapping[str, Tensor]) -> RankValues:
        """Return the values of a rank with samples `index_B` (B,) int64 and scalar `metrics`."""
        return cls(
            keys=tuple(sample_key(index) for index in index_B.tolist()),
            metrics={name: float(tensor) for name, tensor in metrics.items()},
        )


class NonFiniteRecord(Schema):
    """The content of record.json: a skipped step.

    Attributes:
        step: the number of the step, from 0, like `Batch.step`.
        state_step: the number of steps done in the recorded state. It is above `step` if the loop had already taken the
            next step, or if the encoder may have taken the step before the viewmaker skipped it.
        train_manifest_sha256: the sha256 of the train set's manifest.
        ranks: the values of the ranks, in rank order; their keys together are the global batch.
    """

    step: int
    state_step: int
    epoch: int
    learning_rates: dict[str, float]
    train_manifest_sha256: str
    ranks: tuple[RankValues, ...]

    @property
    def keys(self) -> list[str]:
        """Return the keys of the global batch, in its order."""
        return [key for values in self.ranks for key in values.keys]

    @property
    def bad_ranks(self) -> list[int]:
        """Return the ranks whose own loss was not finite; an empty list if only a gradient was not finite."""
        return [number for number, values in enumerate(self.ranks) if not math.isfinite(values.metrics["train/loss"])]


def has_room(run_dir: RunDir, step: int) -> bool:
    """Return whether to write a record of `step`: it has none yet, and the run has fewer than `MAX_RECORDS` records."""
    recorded = recorded_steps(run_dir)
    return step not in recorded and len(recorded) < MAX_RECORDS


def write_record(run_dir: RunDir, record: NonFiniteRecord, states: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write a record, whole or not at all. `states` holds the state of each module by name, and of "objective"."""
    directory = _directory(run_dir, record.step)
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, state in states.items():
        on_host = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
        write_tensors(partial / f"{name}.safetensors", on_host)
    (partial / _RECORD_NAME).write_text(record.model_dump_json(indent=2), encoding="utf-8")
    partial.replace(directory)


def recorded_steps(run_dir: RunDir) -> list[int]:
    """Return the steps that can be replayed, ascending."""
    matches = [re.fullmatch(r"step_(\d+)", path.name) for path in (run_dir.path / "nonfinite").glob("step_*")]
    return sorted(int(match[1]) for match in matches if match)


def read_record(run_dir: RunDir, step: int) -> tuple[NonFiniteRecord, dict[str, dict[str, Tensor]]]:
    """Return the record of a step and the states of `write_record`. Raises `UserError` if there is no record."""
    directory, steps = _directory(run_dir, step), recorded_steps(run_dir)
    if step not in steps:
        have = f"it has records of steps {', '.join(map(str, steps))}" if steps else "none of its steps was skipped"
        raise UserError(f"{run_dir.path} has no record of step {step}; {have}")
    record = NonFiniteRecord.model_validate_json((directory / _RECORD_NAME).read_text(encoding="utf-8"))
    return record, {path.stem: safetensors.torch.load_file(path) for path in directory.glob("*.safetensors")}


def _directory(run_dir: RunDir, step: int) -> Path:
    return run_dir.path / "nonfinite" / f"step_{step:08d}"
