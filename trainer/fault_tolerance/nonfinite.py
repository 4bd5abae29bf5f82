"""Steps that were skipped because a loss or gradient was not finite: counted, recorded for replay, and too many end it.

Comes in: that a step was skipped, and all that it was made from. Goes out: a count for the log, RUN_DIR/nonfinite/
step_00000123/ with a record and the state before the step, which `python -m trainer.replay` takes up, and a `UserError`
on every rank where too many steps in a row were skipped. What may never happen: records that fill a disk.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import safetensors.torch
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Schema
from trainer.checkpoint.run_state import SkipCounts
from trainer.distributed.collectives import all_gather_object, broadcast_object, rank
from trainer.distributed.engines.engine import Engine
from trainer.objectives import Objective
from trainer.run_dir import RunDir, write_json

logger = logging.getLogger(__name__)

MAX_RECORDS: Final = 5
_RECORD_NAME: Final = "record.json"
_OBJECTIVE: Final = "objective"

Value = float | Literal["inf", "-inf", "nan"]


class RankValues(Schema):
    """What one rank contributed: the keys of its samples, and its loss and other metrics of the step."""

    keys: tuple[str, ...]
    metrics: dict[str, Value]


class NonFiniteRecord(Schema):
    """record.json: a skipped step.

    Attributes:
        step: from 0, as in `Batch.step`.
        state_step: the number of steps done in the state that lies beside it: `step`, or more where the loop had gone
            on before it knew, or the encoder had taken its step before the viewmaker's was skipped.
        train_manifest_sha256: of the dataset that the samples are from; None in records of an earlier version.
        ranks: in rank order; their keys together are the global batch.
    """

    step: int
    state_step: int
    epoch: int
    seed: int
    precision: str
    command: str
    learning_rates: dict[str, float]
    train_manifest_sha256: str | None = None
    ranks: tuple[RankValues, ...]

    @property
    def keys(self) -> list[str]:
        """Of the global batch, in its order."""
        return [key for values in self.ranks for key in values.keys]

    @property
    def bad_ranks(self) -> list[int]:
        """Those whose own loss was not finite; none where only a gradient was not."""
        return [number for number, values in enumerate(self.ranks) if isinstance(values.metrics["train/loss"], str)]


class SkippedSteps:
    """A counter of the skipped steps of a run; all ranks add the same.

    `before` are those up to the checkpoint of `saved_step`, from which the run goes on. Raises `UserError` if
    `max_in_a_row` steps running were skipped, over any number of starts.
    """

    def __init__(
        self, run_dir: RunDir, *, max_in_a_row: int, before: SkipCounts | None = None, saved_step: int = 0
    ) -> None:
        self._run_dir, self._max_in_a_row = run_dir, max_in_a_row
        self._counts = SkipCounts() if before is None else before
        self._saved_step = saved_step
        self._has_learned = False  # since that checkpoint

    @property
    def counts(self) -> SkipCounts:
        return self._counts

    @property
    def saved_step(self) -> int:
        """The step of the checkpoint from which the run would go on; 0 if there is none."""
        return self._saved_step

    def add(self, step: int, *, skipped: bool) -> None:
        """Count step `step`. To be called for every step, in order."""
        total, in_a_row = self._counts.total + skipped, self._counts.in_a_row + 1 if skipped else 0
        self._counts = SkipCounts(total=total, in_a_row=in_a_row)
        self._has_learned |= not skipped
        if in_a_row >= self._max_in_a_row:
            raise UserError(
                f"the loss or a gradient was not finite in {in_a_row} steps in a row, up to step {step}; "
                f"{self._advice()}"
            )

    def may_save(self, step: int) -> bool:
        """Return whether a checkpoint after `step` steps would hold anything new, and take it as saved then.

        If every step since the last one was skipped, a new one would only let a restart go on behind the trouble.
        """
        if not self._has_learned:
            logger.warning(
                "no checkpoint of step %d: every step since that of step %d was skipped", step, self._saved_step
            )
            return False
        self._saved_step, self._has_learned = step, False
        return True

    def check_end(self, num_steps: int, *, overflows_by_design: bool) -> None:
        """Raise `UserError` if more of the run's steps were skipped than taken; to be called before its last save.

        `overflows_by_design`: the search for float16's loss scale skips steps too, more than a short run takes.
        """
        total, in_a_row = self._counts.total, self._counts.in_a_row
        if 2 * total > num_steps and not overflows_by_design:
            raise UserError(
                f"{total} of {num_steps} steps were skipped, because the loss or a gradient was not finite; "
                f"{self._advice()}"
            )
        if in_a_row:
            logger.warning("the run ends in a row of %d skipped steps: look at what it has learned", in_a_row)

    def _advice(self) -> str:
        recorded = recorded_steps(self._run_dir)
        look = (
            f"`python -m trainer.replay {self._run_dir.path} --step {recorded[-1]}` shows where; " if recorded else ""
        )
        return f"{look}lower the learning rate or use precision float32, with another --run-dir"


def record_nonfinite(
    run_dir: RunDir,
    *,
    step: int,
    state_step: int,
    epoch: int,
    seed: int,
    index_B: Tensor,
    metrics: Mapping[str, Tensor],
    learning_rates: Mapping[str, float],
    precision: str,
    command: str,
    train_manifest_sha256: str | None,
    engines: Mapping[str, Engine],
    objective: Objective,
) -> Path | None:
    """Write what is needed to replay a skipped step; returns where, or None after `MAX_RECORDS` of a run.

    Every rank calls this at the same time, with its own samples `index_B` (B,) int64 and scalar `metrics`, "train/loss"
    among them. The state is as it is now; the fields are those of `NonFiniteRecord`.
    """
    directory = _directory(run_dir, step)
    recorded = recorded_steps(run_dir) if rank() == 0 else []
    if broadcast_object(step in recorded or len(recorded) >= MAX_RECORDS):
        return None
    own = RankValues(
        keys=tuple(f"{index:08d}" for index in index_B.tolist()),
        metrics={name: _value(float(tensor)) for name, tensor in metrics.items()},
    )
    record = NonFiniteRecord(
        step=step,
        state_step=state_step,
        epoch=epoch,
        seed=seed,
        precision=precision,
        command=command,
        learning_rates=dict(learning_rates),
        train_manifest_sha256=train_manifest_sha256,
        ranks=tuple(all_gather_object(own)),
    )
    states = {name: engine.module_state() for name, engine in engines.items() if name != _OBJECTIVE}
    states[_OBJECTIVE] = objective.saved_state()
    if rank() == 0:
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, state in states.items():
            on_host = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
            safetensors.torch.save_file(on_host, partial / f"{name}.safetensors")
        write_json(partial / _RECORD_NAME, record.model_dump(mode="json"))
        partial.replace(directory)
    return directory


def recorded_steps(run_dir: RunDir) -> list[int]:
    """Return the steps that can be replayed, ascending."""
    matches = [re.fullmatch(r"step_(\d+)", path.name) for path in (run_dir.path / "nonfinite").glob("step_*")]
    return sorted(int(match[1]) for match in matches if match)


def read_record(run_dir: RunDir, step: int) -> tuple[NonFiniteRecord, dict[str, dict[str, Tensor]]]:
    """The record of a step, and the state of each player and of the objective. Raises `UserError` if there is none."""
    directory, steps = _directory(run_dir, step), recorded_steps(run_dir)
    if step not in steps:
        have = f"it has those of steps {', '.join(map(str, steps))}" if steps else "no step of it was skipped"
        raise UserError(f"{run_dir.path} has no record of step {step}; {have}")
    try:
        record = NonFiniteRecord.model_validate_json((directory / _RECORD_NAME).read_text())
        states = {path.stem: safetensors.torch.load_file(path) for path in directory.glob("*.safetensors")}
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(f"cannot read {directory} ({str(error).splitlines()[0]}); remove it") from None
    return record, states


def _directory(run_dir: RunDir, step: int) -> Path:
    return run_dir.path / "nonfinite" / f"step_{step:08d}"


def _value(number: float) -> Value:
    """JSON has no numbers for these."""
    if math.isnan(number):
        return "nan"
    if math.isinf(number):
        return "inf" if number > 0 else "-inf"
    return number
