"""Count and record skipped steps without making a GPU wait."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.core.sample import Batch
from trainer.checkpoint.run_state import SkipCounts
from trainer.config import RunConfig
from trainer.distributed.collectives import any_rank, rank
from trainer.distributed.engines.engine import Engine
from trainer.fault_tolerance.nonfinite import SkippedSteps, record_nonfinite
from trainer.objectives import Objective
from trainer.run_dir import RunDir
from trainer.step import StepOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Done:
    """What is kept of a step until it is known whether it was skipped: `skipped` holds once `known` has happened."""

    step: int
    epoch: int
    index_B: Tensor
    skipped: Tensor
    known: torch.cuda.Event | None
    metrics: Mapping[str, Tensor]
    learning_rates: Mapping[str, float]


class SkipLog:
    """A record of skipped steps. All ranks add the same steps, in order.

    On the CPU whether a step was skipped is known at once. A GPU is asked about a step when the next one is under way,
    so it never stands still for the answer; the recorded state is then one step older.
    """

    def __init__(
        self,
        run_dir: RunDir,
        config: RunConfig,
        *,
        device: torch.device,
        engines: Mapping[str, Engine],
        objective: Objective,
        command: str,
        train_manifest_sha256: str | None = None,
        before: SkipCounts | None = None,
        saved_step: int = 0,
    ) -> None:
        """Start from what a checkpoint holds: `before` and `saved_step` are as in `SkippedSteps`."""
        self._run_dir, self._config, self._command = run_dir, config, command
        self._train_manifest_sha256 = train_manifest_sha256
        self._engines, self._objective = engines, objective
        self._counts = SkippedSteps(
            run_dir, max_in_a_row=config.max_skipped_in_a_row, before=before, saved_step=saved_step
        )
        self._lag = 1 if device.type == "cuda" else 0
        self._unknown: deque[_Done] = deque()

    @property
    def counts(self) -> SkipCounts:
        """The skipped steps of the run, as far as they are known."""
        return self._counts.counts

    @property
    def saved_step(self) -> int:
        """The step of the checkpoint from which the run would go on; 0 if there is none."""
        return self._counts.saved_step

    def add(self, batch: Batch, output: StepOutput, learning_rates: Mapping[str, float]) -> None:
        """Raises `UserError` where too many steps in a row were skipped."""
        skipped, known = _on_its_way_to_the_host(output.skipped)
        done = _Done(batch.step, batch.epoch, batch.index_B, skipped, known, output.metrics, learning_rates)
        self._unknown.append(done)
        if len(self._unknown) > self._lag:
            self._look_at(self._unknown.popleft(), state_step=batch.step + 1)

    def may_save(self, num_done: int, *, num_steps: int) -> bool:
        """Return whether the state after `num_done` of `num_steps` steps is to be saved; it is taken as saved then.

        Waits until it is known whether the last step was skipped. The last state of a run is always saved, unless the
        run has failed: raises `UserError` if too many steps were skipped.
        """
        self.settle()
        if num_done < num_steps:
            return self._counts.may_save(num_done)
        self._counts.check_end(num_steps, overflows_by_design=self._config.precision == "float16")
        return True

    def settle(self) -> None:
        """Look at every step that was added."""
        while self._unknown:
            done = self._unknown.popleft()
            self._look_at(done, state_step=done.step + 1)

    def _look_at(self, done: _Done, *, state_step: int) -> None:
        if done.known is not None:
            done.known.synchronize()
        skipped = bool(done.skipped)
        # In float16 gradients overflow by design, until the scale of the loss is found.
        if skipped and (
            self._config.precision != "float16" or any_rank(not math.isfinite(float(done.metrics["train/loss"])))
        ):
            recorded = record_nonfinite(
                self._run_dir,
                step=done.step,
                # A skipped step leaves the state of before it.
                state_step=done.step if state_step == done.step + 1 and self._is_undone(done) else state_step,
                epoch=done.epoch,
                seed=self._config.seed,
                index_B=done.index_B,
                metrics=done.metrics,
                learning_rates=done.learning_rates,
                precision=self._config.precision,
                command=self._command,
                train_manifest_sha256=self._train_manifest_sha256,
                engines=self._engines,
                objective=self._objective,
            )
            if rank() == 0:
                look = f"; python -m trainer.replay {self._run_dir.path} --step {done.step} shows where"
                logger.warning(
                    "step %d was skipped: a loss, a gradient or its length was not finite%s",
                    done.step,
                    look if recorded else "",
                )
        self._counts.add(done.step, skipped=skipped)

    def _is_undone(self, done: _Done) -> bool:
        """Whether all of a skipped step was skipped: of players that alternate, the encoder may have taken its own."""
        if self._config.adversary is None or self._config.adversary.update == "simultaneous":
            return True
        learners = [name for name in self._engines if name != "viewmaker"]
        return not all(done.metrics[f"train/{name}_gradient_norm"].isfinite() for name in learners)


def _on_its_way_to_the_host(flag: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """The flag in host memory, and when it will be there; asked for later, it would come after all that was begun
    since."""
    if flag.device.type == "cpu":
        return flag, None
    on_host = torch.empty_like(flag, device="cpu", pin_memory=True).copy_(flag, non_blocking=True)
    return on_host, torch.cuda.current_stream(flag.device).record_event()
