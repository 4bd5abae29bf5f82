"""Metrics: always to RUN_DIR/metrics.jsonl, and to Weights & Biases and TensorBoard where the config wants them.

Only the first rank has a tracker.
"""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from data_pipeline.core.environment import variable
from data_pipeline.core.errors import about
from data_pipeline.core.schema import Count, Line, Schema
from trainer.run_dir import RunDir, write_atomically

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from trainer.config import RunConfig
    from trainer.observability.wandb_run import WandbRun

logger = logging.getLogger(__name__)


def _check_project(name: str) -> str:
    if forbidden := sorted(set(name) & set("/\\#?%:")):
        raise ValueError(f'"{name}" is no name of a project: W&B allows no {forbidden[0]} in it')
    return name


# As W&B limits them.
Project = Annotated[Line, AfterValidator(_check_project), Field(max_length=128)]
Tag = Annotated[Line, Field(max_length=64)]


class TrackingConfig(Schema):
    """Who is told of a run, beside its metrics.jsonl.

    wandb: "auto" is online where the user is logged in (`wandb login`, WANDB_API_KEY) and offline elsewhere.
    tags: of the run there, such as the study that it belongs to; a run's group is its name, which its seeds share.
    tensorboard: also write RUN_DIR/tensorboard (with the extra "tensorboard").
    pictures_every_steps: how often grids of views and a histogram of what views change go to both; None: never.
    """

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    wandb_project: Project = "feature-dropout"
    tags: Annotated[tuple[Tag, ...], Field(max_length=100)] = ()
    tensorboard: bool = False
    pictures_every_steps: Count | None = 500


@dataclass(frozen=True)
class StepPictures:
    """What is shown of a step: images (H, W, 3) uint8, and values (N,) of which histograms are made, by name."""

    images: Mapping[str, NDArray[np.uint8]]
    histograms: Mapping[str, NDArray[np.float32]]

    def without_what_is_not_finite(self) -> StepPictures:
        """There are no bins for inf and nan; a histogram of nothing else is left out."""
        finite = {name: values[np.isfinite(values)] for name, values in self.histograms.items()}
        return StepPictures(self.images, {name: values for name, values in finite.items() if len(values)})


class Tracker:
    """Writes the metrics of one run; a context manager. `start_step` is the step a restart continues from."""

    def __init__(self, run_dir: RunDir, *, config: RunConfig, start_step: int) -> None:
        _forget_steps_after(run_dir, start_step)
        self._path = run_dir.metrics
        self._file = run_dir.metrics.open("a")
        self._tensorboard = _tensorboard_writer(run_dir, start_step) if config.tracking.tensorboard else None
        self._wandb = _wandb_run(run_dir, config) if uses_wandb(config.tracking) else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics after `step` steps; names are paths such as train/loss."""
        with about(self._path):
            self._file.write(json.dumps({"step": step, **metrics}) + "\n")
            self._file.flush()
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(step, metrics)

    def log_pictures(self, step: int, pictures: StepPictures) -> None:
        """To W&B and TensorBoard, after the metrics of this step, if there are any."""
        pictures = pictures.without_what_is_not_finite()
        if self._tensorboard is not None:
            for name, array_HWC in pictures.images.items():
                self._tensorboard.add_image(name, array_HWC, step, dataformats="HWC")
            for name, values in pictures.histograms.items():
                self._tensorboard.add_histogram(name, values, step)
        if self._wandb is not None:
            self._wandb.log_pictures(step, pictures)

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.close()


def uses_wandb(config: TrackingConfig) -> bool:
    """Whether a run has a W&B run, on a server or in a file: unless the config or WANDB_MODE says "disabled"."""
    mode = variable("WANDB_MODE")
    return mode != "disabled" and (config.wandb != "disabled" or mode == "offline")


def _wandb_run(run_dir: RunDir, config: RunConfig) -> WandbRun:
    # Here, because other ranks say nothing to W&B, and its library takes half a second.
    from trainer.observability.wandb_run import WandbRun

    return WandbRun(run_dir, config)


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Metrics: the most memory that this process has held so far, in gigabytes of 10^9 bytes; on a GPU its tensors'."""
    metrics = {"memory/resident_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}
    if device.type == "cuda":
        metrics["memory/gpu_gigabytes"] = torch.cuda.max_memory_allocated(device) / 1e9
    return metrics


def _tensorboard_writer(run_dir: RunDir, start_step: int) -> SummaryWriter | None:
    """None, with a sentence in the log, where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:
        logger.warning(
            "tracking.tensorboard needs TensorBoard, which is not installed; going on without it "
            "(`pip install -e '.[tensorboard]'`)"
        )
        return None
    # Steps that a restart repeats are purged, so that each is shown once.
    return SummaryWriter(str(run_dir.path / "tensorboard"), purge_step=start_step + 1, flush_secs=30)


def _forget_steps_after(run_dir: RunDir, step: int) -> None:
    """A restart repeats the steps after its checkpoint, so their lines go; each step then stands once."""
    if run_dir.metrics.is_file():
        lines = [json.dumps(entry) + "\n" for entry in run_dir.read_metrics() if entry["step"] <= step]
        write_atomically(run_dir.metrics, "".join(lines))
