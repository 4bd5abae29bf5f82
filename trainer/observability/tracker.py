"""Write metrics to RUN_DIR/metrics.jsonl, and to W&B and TensorBoard if the config asks for them."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from data_pipeline.core.errors import filename_in_errors
from trainer.observability.tracking import StepPictures, TrackingConfig, uses_wandb
from trainer.run_dir import RunDir, write_atomically

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from trainer.observability.wandb_run import WandbRun

logger = logging.getLogger(__name__)


class Tracker:
    """The writer of the metrics of a run. Only the first rank has one.

    Args:
        settings: the whole config as JSON, which W&B shows beside the metrics.
        start_step: the step from which a restart goes on.
    """

    def __init__(
        self, run_dir: RunDir, config: TrackingConfig, settings: Mapping[str, Any], *, start_step: int = 0
    ) -> None:
        if start_step - _drop_steps_after(run_dir, start_step) >= settings["log_every_steps"]:
            logger.warning("%s lacks lines up to step %d, from which the run goes on", run_dir.metrics, start_step)
        self._path = run_dir.metrics
        self._file = run_dir.metrics.open("a", encoding="utf-8")
        self._tensorboard = _tensorboard_writer(run_dir, start_step) if config.tensorboard else None
        self._wandb: WandbRun | None = None
        if uses_wandb(config):
            # Imported here, because it takes half a second and only the first rank needs it.
            from trainer.observability.wandb_run import WandbRun

            self._wandb = WandbRun(run_dir, config, settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics after `step` steps as one line of metrics.jsonl; names are paths such as train/loss."""
        with filename_in_errors(self._path):
            self._file.write(json.dumps({"step": step, **metrics}) + "\n")
            self._file.flush()
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(step, metrics)

    def log_pictures(self, step: int, pictures: StepPictures) -> None:
        """Send pictures to W&B and TensorBoard. Call it after `log` of the same step."""
        pictures = pictures.finite()
        if self._tensorboard is not None:
            for name, array_HWC in pictures.images.items():
                self._tensorboard.add_image(name, array_HWC, step, dataformats="HWC")
            for name, values in pictures.histograms.items():
                self._tensorboard.add_histogram(name, values, step)
        if self._wandb is not None:
            self._wandb.log_pictures(step, pictures)

    def close(self, *, failed: bool = False) -> None:
        """Close everything, also if a part cannot be closed. W&B shows the run as failed if `failed`."""
        with contextlib.ExitStack() as stack:
            if self._wandb is not None:
                stack.callback(self._wandb.close, failed=failed)
            if self._tensorboard is not None:
                stack.callback(self._tensorboard.close)
            stack.callback(self._file.close)


def _tensorboard_writer(run_dir: RunDir, start_step: int) -> SummaryWriter | None:
    """Return a writer; log and return None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:
        logger.warning(
            "tracking.tensorboard needs TensorBoard, which is not installed; going on without it "
            "(`pip install -e '.[tensorboard]'`)"
        )
        return None
    # Purge the steps that a restart repeats, so that each step is shown once.
    return SummaryWriter(str(run_dir.path / "tensorboard"), purge_step=start_step + 1, flush_secs=30)


def _drop_steps_after(run_dir: RunDir, step: int) -> int:
    """Remove the steps after `step` from metrics.jsonl, because a restart repeats them; from step 0 on, all steps.

    Returns the last step that is left; 0 if none is.
    """
    kept = [entry for entry in run_dir.read_metrics() if entry["step"] <= step] if step > 0 else []
    if run_dir.metrics.is_file():
        write_atomically(run_dir.metrics, "".join(json.dumps(entry) + "\n" for entry in kept))
    return kept[-1]["step"] if kept else 0
