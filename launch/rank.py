"""Train as one rank in this process, or print the plan of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path

import torch

from data_pipeline.core.errors import UserError, log_to_terminal, show_info_of
from trainer.config import RunConfig
from trainer.data import read_manifests
from trainer.distributed.environment import choose_device, process_group, read_env
from trainer.memory import keep_freed_memory
from trainer.mixture import num_classes
from trainer.own_code import own_packages
from trainer.planning.plan import bytes_of_data, describe, plan
from trainer.preflight import check_batch, train_sizes
from trainer.run_dir import RunDir
from trainer.train import train


def run(config: RunConfig, run_dir: Path, *, command: str, accepted_data: Collection[str] = ()) -> None:
    """Train as the rank given by the variables of torchrun or Slurm, or alone.

    Raises the errors of `train` and of `trainer.distributed.environment`.
    """
    keep_freed_memory()
    world = read_env(os.environ)
    log_to_terminal()
    device = choose_device(world)
    with process_group(world, device):
        train_on(device, config, run_dir, command=command, accepted_data=accepted_data)


def train_on(
    device: torch.device, config: RunConfig, run_dir: Path, *, command: str, accepted_data: Collection[str] = ()
) -> None:
    """Train as one of the joined ranks. Raises the errors of `train`, and `UserError` if the GPU's memory is full."""
    show_info_of(own_packages(config))
    try:
        train(config, RunDir(run_dir), device=device, command=command, accepted_data=accepted_data)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"rank {read_env(os.environ).rank} has not enough memory on {device} "
            f"({str(error).partition('. GPU')[0]}); in another --run-dir, raise memory.micro_batches or set "
            "memory.encoder_checkpointing=whole; `--plan --gpu-gigabytes` tells which batch fits"
        ) from error


def print_plan(config: RunConfig, *, world_size: int, device_gigabytes: float | None) -> None:
    """Print the plan of a run. Sizes of the data count if they are there."""
    try:
        manifest = read_manifests(config.data).train
    except UserError as error:
        print(f"the sizes of the data are not known: {error}", file=sys.stderr)
        manifest = None
    if manifest is not None:
        check_batch(config, num_samples=train_sizes(manifest), num_ranks=world_size)
    data_bytes = 0
    if manifest is not None and device_gigabytes is not None:
        data_bytes = bytes_of_data(config, manifest, device_bytes=int(device_gigabytes * 1e9))
    planned = plan(
        config,
        world_size=world_size,
        num_samples=None if manifest is None else manifest.num_samples,
        num_classes=None if manifest is None else num_classes(manifest),
        input_shape=None if manifest is None else manifest.batch_shape,
        device_gigabytes=device_gigabytes,
        data_bytes=data_bytes,
    )
    print(describe(planned, config, device_gigabytes=device_gigabytes))
