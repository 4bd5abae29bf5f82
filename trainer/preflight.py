"""What is settled before step 0: the data fit the config, the run directory is this config's, and the log says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, TypeVar

import torch

from data_pipeline.errors import UserError
from data_pipeline.manifest import Manifest, load_manifest
from data_pipeline.stream import check_batch_size
from trainer.config import RunConfig, difference, read_config
from trainer.distributed.collectives import broadcast_object, rank, world_size
from trainer.players import Players
from trainer.rundir import LOCK_NAME, RunDir, hold, write_json

logger = logging.getLogger(__name__)

T = TypeVar("T")


def check_data(config: RunConfig) -> None:
    """Raises `UserError` unless both data sets are there, belong together, and the ranks divide the global batch."""
    manifest = load_manifest(Path(config.data.train_dir))
    test = load_manifest(Path(config.data.test_dir))
    if test.label_names != manifest.label_names or test.image_shape != manifest.image_shape:
        raise UserError(
            f"{config.data.train_dir} and {config.data.test_dir} differ in label names or image shape; "
            "build both from the same source and dataset"
        )
    check_batch_size(manifest.num_samples, global_batch_size=config.global_batch_size, world_size=world_size())


def claim(run_dir: RunDir, config: RunConfig) -> TextIO:
    """Make `run_dir` this config's, once its data are known to be there; hold it until the returned file is closed.

    Raises `UserError` for data that do not fit and for a directory with another config, other files or another trainer.
    """
    check_data(config)
    if run_dir.config.is_file():
        keys = difference(read_config(run_dir.config), config)
        if keys:
            raise UserError(
                f"{run_dir.path} holds a run with another config (it differs in {', '.join(keys)}); "
                "pass another --run-dir, or remove that one"
            )
    elif run_dir.path.exists() and any(path.name != LOCK_NAME for path in run_dir.path.iterdir()):
        raise UserError(f"{run_dir.path} is not empty and is not a run directory; pass another --run-dir")
    held = hold(run_dir)
    if not run_dir.config.is_file():
        write_json(run_dir.config, config.model_dump(mode="json"))
    return held


def on_first_rank(action: Callable[[], T]) -> T | None:
    """Run `action` on the first rank, and return its result there; elsewhere None.

    A `UserError` in it ends every rank, and only the first one speaks.
    """
    error: UserError | None = None
    result: T | None = None
    if rank() == 0:
        try:
            result = action()
        except UserError as raised:
            error = raised
    if broadcast_object(error is not None):
        raise error if error is not None else SystemExit(2)
    return result


def log_start(
    config: RunConfig, players: Players, manifest: Manifest, *, device: torch.device, start_step: int, num_steps: int
) -> None:
    if rank() > 0:
        return
    sizes = ", ".join(
        f"{name} {sum(p.numel() for p in module.parameters()):,} parameters"
        for name, module in players.trained_modules.items()
    )
    steps_per_epoch = num_steps // config.num_epochs
    logger.info("%s: %s; %s on %s", config.name, sizes, config.precision, device)
    logger.info(
        "global batch %d = %d ranks x %d, batch norm %s; %d epochs of %d steps from %d samples",
        config.global_batch_size,
        world_size(),
        config.global_batch_size // world_size(),
        config.encoder.batch_norm,
        config.num_epochs,
        steps_per_epoch,
        manifest.num_samples,
    )
    if start_step == num_steps:
        logger.info("already at its last step %d; nothing to do", num_steps)
    elif start_step:
        logger.info("going on from step %d of %d", start_step, num_steps)
