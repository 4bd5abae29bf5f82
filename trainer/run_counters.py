"""Count the skipped steps, bad samples and seconds of a run, and end a run that skips too many steps.

`trainer.optim.skipping` decides which steps are skipped. The counts are in the state of the run, so checkpoints hold
them. All ranks must make the same calls in the same order, so a run that fails raises `UserError` on every rank at the
same step.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.core.batch import Batch
from data_pipeline.core.errors import UserError
from trainer.build import Training
from trainer.checkpoint.restore import Restored
from trainer.checkpoint.run_state import RunState, SkipCounts
from trainer.data import Manifests
from trainer.distributed.collectives import all_gather_json, rank
from trainer.fault_tolerance.bad_samples import BadSamples
from trainer.run_dir import RunDir
from trainer.step import StepOutput

logger = logging.getLogger(__name__)

_ADVICE = "lower the learning rate, or set precision=float32 if it is bfloat16, with another --run-dir"


@dataclass(frozen=True)
class _PendingStep:
    """A step that may have been skipped: `skipped` may be read after the event `known`. Holds no views, for memory."""

    step: int
    metrics: Mapping[str, Tensor]
    skipped: Tensor
    known: torch.cuda.Event | None


class RunCounters:
    """The counts of skipped steps, bad samples and seconds over all starts of a run. The seconds pass from now on.

    The counts go on from the checkpoint `restored`. Bad samples of an earlier train set, in whose place the user has
    accepted another, do not count. Nothing waits for the GPU: there it is read whether a step was skipped when the next
    step has begun; on a CPU it is known at once.

    Attributes:
        saved_step: the step of the checkpoint from which the run would go on; 0 if there is none.
    """

    def __init__(
        self, run_dir: RunDir, training: Training, manifests: Manifests, restored: Restored, *, device: torch.device
    ) -> None:
        self._data, config = manifests.identity, training.modules.config
        before = restored.run or RunState(data=self._data, wall_seconds=0.0)
        self._max_in_a_row = config.max_skipped_in_a_row
        self._skipped = before.skipped
        self._lag = 1 if device.type == "cuda" else 0
        self._pending: deque[_PendingStep] = deque()
        self.saved_step, self._has_learned = restored.step, False  # since that checkpoint
        self._bad = BadSamples(
            run_dir,
            num_samples=manifests.train.num_samples,
            max_share=config.data.max_bad_share,
            where=config.data.train_name,
            before=() if restored.has_other_train_set(self._data) else before.bad_samples,
        )
        self._seconds_before, self._started = before.wall_seconds, time.perf_counter()

    def add(self, batch: Batch, output: StepOutput) -> None:
        """Count the step on a batch. Raises `UserError` if too many steps in a row were skipped."""
        self._bad.add(batch.bad)
        self._pending.append(_PendingStep(batch.step, output.metrics, *_copy_to_host(output.skipped)))
        if len(self._pending) > self._lag:
            self._judge(self._pending.popleft())

    def metrics(self) -> dict[str, float]:
        """Return the counts for the log. Raises `UserError` if the share of bad samples is above its limit."""
        return {"train/skipped_steps": self._skipped.total, "data/bad_samples": self._bad.flush()}

    def state_to_save(self, num_done: int, *, num_steps: int) -> RunState | None:
        """Return the state for the checkpoint after `num_done` of `num_steps` steps, and count it as saved.

        Waits for the last step. Returns None for no checkpoint: if every step since the last one was skipped, a new one
        would let a restart go on past the fault; only the last state of a run is always saved. Raises `UserError` if
        the run has failed: more of its steps were skipped than taken, or too many samples are bad.
        """
        while self._pending:
            self._judge(self._pending.popleft())
        if num_done == num_steps:
            self._check_end(num_steps)
        elif not self._has_learned:
            logger.warning(
                "no checkpoint at step %d: every step since the checkpoint of step %d was skipped",
                num_done,
                self.saved_step,
            )
            return None
        self.saved_step, self._has_learned = num_done, False
        self._bad.flush()
        return RunState(
            data=self._data,
            skipped=self._skipped,
            bad_samples=self._bad.found,
            wall_seconds=self.wall_seconds,
        )

    @property
    def wall_seconds(self) -> float:
        """Return the seconds of training up to now, as in `RunState.wall_seconds`."""
        return round(self._seconds_before + time.perf_counter() - self._started, 1)

    def _check_end(self, num_steps: int) -> None:
        """Raise `UserError` if more steps were skipped than taken."""
        total, in_a_row = self._skipped.total, self._skipped.in_a_row
        if 2 * total > num_steps:
            raise UserError(
                f"{total} of {num_steps} steps were skipped, because the loss or a gradient was not finite; {_ADVICE}"
            )
        if in_a_row:
            logger.warning("the last %d steps of the run were skipped: check what it has learned", in_a_row)

    def _judge(self, pending: _PendingStep) -> None:
        """Count a step, and log it if it was skipped."""
        if pending.known is not None:
            pending.known.synchronize()
        skipped, step = bool(pending.skipped), pending.step
        if skipped:
            finite = all_gather_json(math.isfinite(float(pending.metrics["train/loss"])), bool)
            if rank() == 0:
                ranks = ", ".join(str(number) for number, is_finite in enumerate(finite) if not is_finite)
                what = f"the loss of rank {ranks}" if ranks else "a gradient or its length"
                logger.warning("step %d was skipped: %s was not finite", step, what)
        in_a_row = self._skipped.in_a_row + 1 if skipped else 0
        self._skipped = SkipCounts(total=self._skipped.total + skipped, in_a_row=in_a_row)
        self._has_learned |= not skipped
        if in_a_row >= self._max_in_a_row:
            raise UserError(
                f"the loss or a gradient was not finite in {in_a_row} steps in a row, up to step {step}; {_ADVICE}"
            )


def _copy_to_host(flag: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start to copy a flag to the host. Return the copy and the event after which it may be read.

    A copy that starts later would wait for all kernels that are queued until then.
    """
    if flag.device.type == "cpu":
        return flag, None
    on_host = torch.empty_like(flag, device="cpu", pin_memory=True).copy_(flag, non_blocking=True)
    return on_host, torch.cuda.current_stream(flag.device).record_event()
