"""Count the skipped steps, bad samples and seconds of a run. The counts are in its state, so checkpoints hold them."""

from __future__ import annotations

import time

import torch

from data_pipeline.core.sample import Batch
from trainer.build import Training
from trainer.checkpoint.restore import Restored
from trainer.checkpoint.run_state import RunState
from trainer.data import Manifests
from trainer.fault_tolerance.bad_samples import BadSamples
from trainer.run_dir import RunDir
from trainer.skipped_steps import SkippedSteps
from trainer.step import StepOutput


class RunCounters:
    """The counts of skipped steps, bad samples and seconds over all starts of a run. The seconds pass from now on.

    Every rank must make the same calls at the same steps. The counts go on from the checkpoint `restored`. Bad samples
    of an earlier train set, in whose place the user has accepted another, do not count.
    """

    def __init__(
        self, run_dir: RunDir, training: Training, manifests: Manifests, restored: Restored, *, device: torch.device
    ) -> None:
        before, data, self._data = restored.run, training.modules.config.data, manifests.identity
        self._skipped = SkippedSteps(
            training.modules.config,
            device=device,
            before=None if before is None else before.skipped,
            saved_step=restored.step,
        )
        self._bad = BadSamples(
            run_dir,
            num_samples=manifests.train.num_samples,
            max_share=data.max_bad_share,
            where=data.train_name,
            before=() if before is None or restored.has_other_train_set(self._data) else before.bad_samples,
        )
        self._seconds_before, self._started = restored.wall_seconds, time.perf_counter()

    def add(self, batch: Batch, output: StepOutput) -> None:
        """Count the step on a batch. Raises `UserError` if too many in a row were skipped."""
        self._skipped.add(batch, output)
        self._bad.add(batch.bad)

    def metrics(self) -> dict[str, float]:
        """Return the counts for the log. Raises `UserError` if the share of bad samples is above its limit."""
        return {"train/skipped_steps": self._skipped.counts.total, "data/bad_samples": self._bad.flush()}

    def state_to_save(self, num_done: int, *, num_steps: int) -> RunState | None:
        """Return the state for the checkpoint after `num_done` of `num_steps` steps; None for no checkpoint.

        There is no checkpoint if every step since the last one was skipped, except after the last step of the run.
        Raises `UserError` if the run has failed: too many steps were skipped, or too many samples are bad.
        """
        if not self._skipped.may_save(num_done, num_steps=num_steps):
            return None
        self._bad.flush()
        return RunState(
            data=self._data,
            skipped=self._skipped.counts,
            bad_samples=self._bad.found,
            wall_seconds=self.wall_seconds,
        )

    @property
    def wall_seconds(self) -> float:
        """Return the seconds of training up to now, as in `RunState.wall_seconds`."""
        return round(self._seconds_before + time.perf_counter() - self._started, 1)

    @property
    def saved_step(self) -> int:
        """Return the step of the checkpoint from which the run would go on; 0 if there is none."""
        return self._skipped.saved_step
