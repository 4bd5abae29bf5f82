"""Metrics: always to RUN_DIR/metrics.jsonl, and to Weights & Biases, which may fail without harm to the run.

One W&B run for all ranks (only the first rank has a tracker) and all restarts (its id is kept in RUN_DIR/wandb_run_id).
W&B's own process writes in blocks, and dies of the signals that end a job: what it then had not written is handed to it
by the next start, from metrics.jsonl. What may never happen: a step that W&B has twice, or never gets.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import wandb
from numpy.typing import NDArray
from pydantic import PositiveInt
from wandb.util import get_core_path

from data_pipeline.schema import Schema
from trainer.preemption import WARNINGS
from trainer.rundir import RunDir, write_atomically

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from trainer.config import RunConfig

logger = logging.getLogger(__name__)

INIT_SECONDS = 30.0  # that W&B's server may take to answer the first question
_READ_SECONDS = 60
_HEAD_CHARACTERS = 80  # of a line that W&B's reader prints, in which it says what it is


class TrackingConfig(Schema):
    """Who is told of a run, beside its metrics.jsonl.

    wandb: "auto" is online where the user is logged in (`wandb login`, WANDB_API_KEY) and offline elsewhere.
    tags: of the run there, such as the study that it belongs to; a run's group is its name, which its seeds share.
    tensorboard: also write RUN_DIR/tensorboard (with the extra "tensorboard").
    pictures_every_steps: how often grids of views and a histogram of what views change go to both; None: never.
    """

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    wandb_project: str = "feature-dropout"
    tags: tuple[str, ...] = ()
    tensorboard: bool = False
    pictures_every_steps: PositiveInt | None = 500


@dataclass(frozen=True)
class StepPictures:
    """What is shown of a step: images (H, W, 3) uint8, and values of which histograms are made, by name."""

    images: Mapping[str, NDArray[np.uint8]]
    histograms: Mapping[str, NDArray[np.float32]]


class Tracker:
    """Writes the metrics of one run; a context manager. `start_step` is the step a restart continues from."""

    def __init__(self, run_dir: RunDir, *, config: RunConfig, start_step: int) -> None:
        _forget_steps_after(run_dir, start_step)
        self._file = run_dir.metrics.open("a")
        self._tensorboard = _tensorboard_writer(run_dir, start_step) if config.tracking.tensorboard else None
        self._wandb: wandb.Run | None = None
        self._wandb_step = 0  # the last one that W&B has
        mode = _wandb_mode(config.tracking)
        if mode == "disabled":
            return
        if not run_dir.wandb_run_id.is_file():
            write_atomically(run_dir.wandb_run_id, secrets.token_hex(4) + "\n")
        if mode == "online" and not self._goes_online(run_dir, config):
            mode = "offline"
        if mode == "offline":
            self._guard(lambda: self._start_wandb(run_dir, config, "offline"))
        for entry in run_dir.read_metrics():
            self._send(entry["step"], {name: value for name, value in entry.items() if name != "step"})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics after `step` steps; names are paths such as train/loss."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        self._send(step, metrics)

    def log_pictures(self, step: int, pictures: StepPictures) -> None:
        """To W&B and TensorBoard, after the metrics of this step, if there are any."""
        if self._tensorboard is not None:
            for name, array_HWC in pictures.images.items():
                self._tensorboard.add_image(name, array_HWC, step, dataformats="HWC")
            for name, values in pictures.histograms.items():
                self._tensorboard.add_histogram(name, values, step)
        if self._wandb is not None and step >= self._wandb_step:
            run = self._wandb
            media: dict[str, object] = {name: wandb.Image(array_HWC) for name, array_HWC in pictures.images.items()}
            media |= {name: wandb.Histogram(values.tolist()) for name, values in pictures.histograms.items()}
            self._guard(lambda: run.log(media, step=step))

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            run = self._wandb
            self._guard(lambda: run.finish())

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        """To W&B, unless it has this step already: from before a node died, and the run went back to a checkpoint."""
        if self._wandb is not None and step > self._wandb_step:
            run, self._wandb_step = self._wandb, step
            self._guard(lambda: run.log(dict(metrics), step=step))

    def _start_wandb(self, run_dir: RunDir, config: RunConfig, mode: Literal["online", "offline"]) -> None:
        if mode == "offline":
            self._wandb_step = _last_offline_step(run_dir)
        # W&B's own process takes over what is blocked here: a warning to all processes of a job must not end it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
        _leave_inherited_process()
        try:
            self._wandb = wandb.init(
                dir=run_dir.path,
                project=config.tracking.wandb_project,
                id=run_dir.wandb_run_id.read_text().strip(),
                name=run_dir.path.name,
                group=config.name,
                job_type="train",
                tags=config.tracking.tags,
                config=config.model_dump(mode="json"),
                mode=mode,
                resume="allow",
                settings=wandb.Settings(silent=True, init_timeout=INIT_SECONDS),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if mode == "online":  # after a resume the server says where to go on
            self._wandb_step = self._wandb.starting_step - 1

    def _goes_online(self, run_dir: RunDir, config: RunConfig) -> bool:
        try:
            self._start_wandb(run_dir, config, "online")
        except Exception as error:
            logger.warning("Weights & Biases does not answer (%s); going on offline", " ".join(str(error).split()))
            wandb.teardown()  # its process holds the run's id, and would refuse it to another start
            return False
        return True

    def _guard(self, call: Callable[[], None]) -> None:
        """Tracking may be lost, training may not: the first failure is reported and ends W&B for this process."""
        try:
            call()
        except Exception as error:
            logger.warning("Weights & Biases failed (%s); going on with metrics.jsonl alone", error)
            self._wandb = None


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


def _wandb_mode(config: TrackingConfig) -> Literal["online", "offline", "disabled"]:
    if os.environ.get("WANDB_MODE") in {"offline", "disabled"}:
        return "offline" if os.environ["WANDB_MODE"] == "offline" else "disabled"
    if config.wandb != "auto":
        return config.wandb
    try:
        return "online" if wandb.login(prompt=False) else "offline"
    except Exception as error:  # whatever it raises when no server answers
        logger.warning("Weights & Biases does not take the login (%s); going on offline", error)
        return "offline"


def _last_offline_step(run_dir: RunDir) -> int:
    """By W&B's own reader; 0 where there is none. A start may have died before its first step was written."""
    run_id = run_dir.wandb_run_id.read_text().strip()
    files = run_dir.path.glob(f"wandb/*run-*/run-{run_id}.wandb")  # of online starts too
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        if steps := offline_steps(path):
            return steps[-1]
    return 0


def _leave_inherited_process() -> None:
    """Let W&B start a process for this one. That of who started this one, a notebook or a test, outlives a run that is
    killed, and then refuses its id to the next start.
    """
    os.environ.pop("WANDB_SERVICE", None)


def summarize(run_dir: RunDir, config: RunConfig, numbers: Mapping[str, float]) -> None:
    """Put numbers that were measured after training, such as those of the probes, into the summary of the W&B run.

    Nothing where the run has no W&B run. A failure is told and forgotten.
    """
    mode = _wandb_mode(config.tracking)
    if mode == "disabled" or not run_dir.wandb_run_id.is_file():
        return
    _leave_inherited_process()
    try:
        with wandb.init(
            dir=run_dir.path,
            project=config.tracking.wandb_project,
            id=run_dir.wandb_run_id.read_text().strip(),
            mode=mode,
            resume="allow",
            settings=wandb.Settings(silent=True, init_timeout=INIT_SECONDS, x_disable_stats=True),
        ) as run:
            run.summary.update(dict(numbers))
    except Exception as error:
        logger.warning("Weights & Biases did not take the summary (%s)", error)


def offline_steps(path: Path) -> list[int]:
    """The steps in a file that W&B has left in RUN_DIR/wandb, as far as it was written."""
    command = [get_core_path(), "leet", "inspect", "-no-observability", "-json", "-run-file", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_READ_SECONDS)
    lines = (line for line in done.stdout.splitlines() if '"type":"history"' in line[:_HEAD_CHARACTERS])
    return [int(json.loads(line)["history"]["item"]["_step"]) for line in lines]


def _forget_steps_after(run_dir: RunDir, step: int) -> None:
    """A restart repeats the steps after its checkpoint, so their lines go; each step then stands once."""
    if run_dir.metrics.is_file():
        lines = [json.dumps(entry) + "\n" for entry in run_dir.read_metrics() if entry["step"] <= step]
        write_atomically(run_dir.metrics, "".join(lines))
