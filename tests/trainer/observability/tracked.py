"""The tracker of a run, as the training loop opens it."""

from __future__ import annotations

from trainer.config import RunConfig
from trainer.observability.tracker import Tracker
from trainer.run_dir import RunDir


def open_tracker(run_dir: RunDir, config: RunConfig, *, start_step: int = 0) -> Tracker:
    return Tracker(
        run_dir,
        config.tracking,
        name=config.name,
        settings=config.model_dump(mode="json"),
        start_step=start_step,
        every_steps=config.log_every_steps,
    )
