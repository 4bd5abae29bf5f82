"""Count skipped steps, record the first few for replay, and end a run that skips too many.

`trainer.optim.skipping` decides which steps are skipped. All ranks must make the same calls in the same
order, so a run that fails raises `UserError` on every rank at the same step.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import Batch
from trainer.adversary import AdversaryConfig
from trainer.checkpoint.run_state import SkipCounts
from trainer.distributed.collectives import all_gather_object, any_rank, broadcast_object, rank
from trainer.distributed.engines.engine import Engine
from trainer.fault_tolerance.step_record import NonFiniteRecord, RankValues, has_room, recorded_steps, write_record
from trainer.objectives import Objective
from trainer.run_dir import RunDir
from trainer.step import StepOutput

logger = logging.getLogger(__name__)


class SkipCounter:
    """The number of skipped steps of a run, over all its starts.

    Attributes:
        counts: the counts so far; they start from `before`, the counts in the checkpoint of `saved_step`.
        saved_step: the step of the checkpoint from which the run would go on; 0 if there is none.
    """

    def __init__(
        self, run_dir: RunDir, *, max_in_a_row: int, before: SkipCounts | None = None, saved_step: int = 0
    ) -> None:
        self._run_dir, self._max_in_a_row = run_dir, max_in_a_row
        self.counts = SkipCounts() if before is None else before
        self.saved_step = saved_step
        self._has_learned = False  # since that checkpoint

    def add(self, step: int, *, skipped: bool, by_design: bool = False) -> None:
        """Count a step. Call it for every step, in order.

        A step that was skipped `by_design`, in the search for the loss scale of float16, counts in the total, and
        neither adds to the steps in a row nor ends them.

        Raises `UserError` if `max_in_a_row` steps in a row were skipped.
        """
        total, in_a_row = self.counts.total + skipped, self.counts.in_a_row
        if not by_design:
            in_a_row = in_a_row + 1 if skipped else 0
        self.counts = SkipCounts(total=total, in_a_row=in_a_row)
        self._has_learned |= not skipped
        if not by_design and in_a_row >= self._max_in_a_row:
            raise UserError(
                f"the loss or a gradient was not finite in {in_a_row} steps in a row, up to step {step}; "
                f"{self._advice()}"
            )

    def may_save(self, step: int) -> bool:
        """Return whether a checkpoint after `step` steps would hold anything new; if so, count it as saved.

        If every step since the last checkpoint was skipped, a new checkpoint would let a restart go on past the fault.
        """
        if not self._has_learned:
            logger.warning(
                "no checkpoint at step %d: every step since the checkpoint of step %d was skipped",
                step,
                self.saved_step,
            )
            return False
        self.saved_step, self._has_learned = step, False
        return True

    def check_end(self, num_steps: int, *, overflows_by_design: bool) -> None:
        """Raise `UserError` if more steps of the run were skipped than taken. Call it before the last checkpoint.

        Does not raise with `overflows_by_design`: the search for the loss scale of float16 skips steps too, and in a
        short run more than half of them.
        """
        total, in_a_row = self.counts.total, self.counts.in_a_row
        if 2 * total > num_steps and not overflows_by_design:
            raise UserError(
                f"{total} of {num_steps} steps were skipped, because the loss or a gradient was not finite; "
                f"{self._advice()}"
            )
        if in_a_row:
            logger.warning("the last %d steps of the run were skipped: check what it has learned", in_a_row)

    def _advice(self) -> str:
        recorded = recorded_steps(self._run_dir)
        look = f"{_replay_command(self._run_dir, recorded[-1])} shows where; " if recorded else ""
        return f"{look}lower the learning rate, or set precision=float32 if it has 16 bits, with another --run-dir"


@dataclass(frozen=True)
class _PendingStep:
    """A step that may have been skipped: `skipped` may be read after the event `known`."""

    step: int
    epoch: int
    index_B: Tensor
    skipped: Tensor
    known: torch.cuda.Event | None
    metrics: Mapping[str, Tensor]
    learning_rates: Mapping[str, float]


class SkippedSteps:
    """A counter and recorder of skipped steps that does not wait for the GPU.

    On a CPU it is known at once whether a step was skipped. On a GPU it is read when the next step has begun, so the
    recorded state may be one step later. `counter` holds the counts.
    """

    def __init__(
        self,
        run_dir: RunDir,
        counter: SkipCounter,
        *,
        engines: Mapping[str, Engine],
        objective: Objective,
        adversary: AdversaryConfig | None,
        precision: str,
        seed: int,
        device: torch.device,
        command: str,
        train_manifest_sha256: str,
    ) -> None:
        self.counter = counter
        self._run_dir, self._engines, self._objective = run_dir, engines, objective
        self._adversary, self._precision, self._seed = adversary, precision, seed
        self._command, self._train_manifest_sha256 = command, train_manifest_sha256
        self._lag = 1 if device.type == "cuda" else 0
        self._pending: deque[_PendingStep] = deque()

    def add(self, batch: Batch, output: StepOutput, learning_rates: Mapping[str, float]) -> None:
        """Add a step. Raises `UserError` if too many steps in a row were skipped."""
        skipped, known = _copy_to_host(output.skipped)
        self._pending.append(
            _PendingStep(batch.step, batch.epoch, batch.index_B, skipped, known, output.metrics, learning_rates)
        )
        if len(self._pending) > self._lag:
            self._judge(self._pending.popleft(), num_done=batch.step + 1)

    def may_save(self, num_done: int, *, num_steps: int) -> bool:
        """Return whether to save the state after `num_done` of `num_steps` steps; if so, count it as saved.

        Waits for the last step. The last state of a run is always saved. Raises `UserError` if the run has failed,
        because too many steps were skipped.
        """
        self.flush()
        if num_done < num_steps:
            return self.counter.may_save(num_done)
        self.counter.check_end(num_steps, overflows_by_design=self._precision == "float16")
        return True

    def flush(self) -> None:
        """Count every step that was added; waits for the GPU."""
        while self._pending:
            pending = self._pending.popleft()
            self._judge(pending, num_done=pending.step + 1)

    def _judge(self, pending: _PendingStep, *, num_done: int) -> None:
        """Count a step, and record it if it was skipped. Training has done `num_done` steps."""
        if pending.known is not None:
            pending.known.synchronize()
        skipped = bool(pending.skipped)
        by_design = skipped and self._precision == "float16" and _may_be_scaled_less(pending.metrics)
        if skipped and not by_design:
            is_recorded = self._record(pending, num_done=num_done)
            if rank() == 0:
                look = f"; {_replay_command(self._run_dir, pending.step)} shows where" if is_recorded else ""
                logger.warning(
                    "step %d was skipped: a loss, a gradient or its length was not finite%s", pending.step, look
                )
        self.counter.add(pending.step, skipped=skipped, by_design=by_design)

    def _record(self, pending: _PendingStep, *, num_done: int) -> bool:
        """Write the record of a skipped step, with the present state. Return whether rank 0 has written it.

        A step has none if the run has enough records, or if the disk refuses it, with a warning.
        """
        if not broadcast_object(rank() == 0 and has_room(self._run_dir, pending.step)):
            return False
        is_as_before = num_done == pending.step + 1 and self._is_undone(pending)
        record = NonFiniteRecord(
            step=pending.step,
            state_step=pending.step if is_as_before else num_done,
            epoch=pending.epoch,
            seed=self._seed,
            precision=self._precision,
            command=self._command,
            learning_rates=dict(pending.learning_rates),
            train_manifest_sha256=self._train_manifest_sha256,
            ranks=tuple(all_gather_object(RankValues.of(pending.index_B, pending.metrics))),
        )
        states = {name: engine.module_state() for name, engine in self._engines.items()}
        states["objective"] = self._objective.saved_state()
        if rank() == 0:
            try:
                write_record(self._run_dir, record, states)
            except OSError as error:  # without the record, the run is as good as before
                logger.warning(
                    "step %d cannot be replayed, because its record was not written: %s", pending.step, error
                )
                return False
        return True

    def _is_undone(self, pending: _PendingStep) -> bool:
        """Return whether all of a skipped step was skipped. In the alternating game the encoder may have stepped."""
        if self._adversary is None or self._adversary.update == "simultaneous":
            return True
        learners = [name for name in self._engines if name != "viewmaker"]
        return not all(pending.metrics[f"train/{name}_gradient_norm"].isfinite() for name in learners)


def _may_be_scaled_less(metrics: Mapping[str, Tensor]) -> bool:
    """Return whether a gradient of float16 was too large only because of the loss scale, which is being searched for.

    At a scale of 1 the search has failed. Every rank must call this at the same time.
    """
    has_failed = not math.isfinite(float(metrics["train/loss"])) or float(metrics["train/loss_scale"]) <= 1
    return not any_rank(has_failed)


def _replay_command(run_dir: RunDir, step: int) -> str:
    return f"`python -m trainer.replay {run_dir.path} --step {step}`"


def _copy_to_host(flag: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start to copy a flag to the host. Return the copy and the event after which it may be read.

    A copy that starts later would wait for all kernels that are queued until then.
    """
    if flag.device.type == "cpu":
        return flag, None
    on_host = torch.empty_like(flag, device="cpu", pin_memory=True).copy_(flag, non_blocking=True)
    return on_host, torch.cuda.current_stream(flag.device).record_event()
