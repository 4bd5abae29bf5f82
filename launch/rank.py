"""Train as one rank in this process, or print the plan of a run."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import torch

from data_pipeline.core.errors import UserError, log_to_terminal, show_info_of
from launch.outcome import last_line, note_end
from trainer.config import RunConfig
from trainer.data import read_manifests
from trainer.distributed.environment import choose_device, process_group, read_env
from trainer.fault_tolerance.preemption import StoppedError
from trainer.memory import keep_freed_memory
from trainer.mixture import num_classes
from trainer.own_code import own_packages
from trainer.planning.plan import bytes_of_data, describe, plan
from trainer.preflight import check_batch, train_sizes
from trainer.run_dir import RunDir, is_held
from trainer.train import train

_INTERRUPTED: Final = (
    "interrupted by a second Ctrl-C, which saves no checkpoint; start it again with the same command and it goes on "
    "from its newest one"
)
# Why a data worker is killed by a signal, by the signal's name in torch's message.
_CAUSES: Final = {
    "Bus error": "a shard was cut short while it was read, or /dev/shm is full; check `python -m data_pipeline verify "
    "DIR` of the training data and `df /dev/shm`, then start again: the run goes on from its newest checkpoint",
    "Killed": "the machine had no memory left, or somebody ended it; free some or lower data.num_workers, then start "
    "again: the run goes on from its newest checkpoint",
}


@contextlib.contextmanager
def joined_ranks() -> Iterator[torch.device]:
    """Join the other ranks inside the block, by the variables of torchrun or Slurm, and give the device of this one.

    Without such variables this process is alone. Raises the errors of `trainer.distributed.environment`.
    """
    keep_freed_memory()
    world = read_env(os.environ)
    log_to_terminal()
    device = choose_device(world)
    with process_group(world, device):
        yield device


def run(config: RunConfig, run_dir: Path, *, command: str, accepted_data: Collection[str] = ()) -> None:
    """Train as the rank given by the variables of torchrun or Slurm, or alone. Raises the errors of `train`."""
    with joined_ranks() as device:
        train_on(device, config, run_dir, command=command, accepted_data=accepted_data)


def train_on(
    device: torch.device, config: RunConfig, run_dir: Path, *, command: str, accepted_data: Collection[str] = ()
) -> None:
    """Train as one of the joined ranks.

    Raises the errors of `train`, and `UserError` if the GPU's memory is full or a data worker was killed.
    """
    show_info_of(own_packages(config))
    if device.type == "cuda":  # else the log of a run would count the memory of the runs before it in this process
        torch.cuda.reset_peak_memory_stats(device)
    try:
        train(config, RunDir(run_dir), device=device, command=command, accepted_data=accepted_data)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"rank {read_env(os.environ).rank} has not enough memory on {device} "
            f"({str(error).partition('. GPU')[0]}); in another --run-dir, raise "
            "memory.micro_batches or set memory.encoder_checkpointing=whole; `--plan --gpu-gigabytes` tells what fits"
        ) from error
    except RuntimeError as error:
        # If torch waited for the worker, the error that names the signal is the cause of another one.
        problem = _killed_worker_problem(str(error)) or _killed_worker_problem(str(error.__cause__))
        if problem is None:
            raise
        raise UserError(problem) from error


def _killed_worker_problem(message: str) -> str | None:
    """Return one sentence for an error of torch's DataLoader whose worker was killed; None for any other error."""
    if not message.startswith("DataLoader worker") or "is killed by signal: " not in message:
        return None
    name = message.partition("is killed by signal: ")[2].partition(".")[0]
    cause = _CAUSES.get(name)
    return None if cause is None else f"a data worker was killed by a signal ({name}): {cause}"


def run_noting_its_end(config: RunConfig, run_dir: Path, *, command: str, accepted_data: Collection[str] = ()) -> None:
    """Call `run`, and note its end as `noting_its_end` does."""
    with noting_its_end(config, run_dir):
        run(config, run_dir, command=command, accepted_data=accepted_data)


@contextlib.contextmanager
def noting_its_end(config: RunConfig, run_dir: Path) -> Iterator[None]:
    """If the block ends early, write the reason into the run directory, for launch/status.py.

    The first rank always writes it. Another rank leaves out what mostly follows from the end of another one.
    """
    rank, directory = read_env(os.environ).rank, RunDir(run_dir)
    # The first rank of this start does not hold it yet, because it waits for this rank before.
    is_held_by_others = rank > 0 and is_held(directory)
    try:
        yield
    except KeyboardInterrupt:
        if rank == 0:
            note_end(directory, config, "stopped", _INTERRUPTED)
        raise
    except Exception as error:
        if rank == 0 and isinstance(error, StoppedError):
            note_end(directory, config, "stopped", str(error))
        elif rank == 0 or not (is_held_by_others or _mostly_follows(error)):
            note_end(directory, config, "failed", last_line(error), rank=rank)
        raise


def _mostly_follows(error: Exception) -> bool:
    """Tell whether an error mostly follows from the end of another rank, such as "connection closed by peer"."""
    return isinstance(error, StoppedError) or (
        isinstance(error, RuntimeError) and "DataLoader worker" not in str(error)
    )


def print_plan(config: RunConfig, *, world_size: int, device_gigabytes: float | None) -> None:
    """Print the plan of a run, and the settings that DeepSpeed would get. Sizes of the data count if they are there."""
    try:
        manifest = read_manifests(config.data, makes_index=False).train
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
    settings = config.engine.library_settings(global_batch_size=config.global_batch_size, num_ranks=world_size)
    if settings is not None:
        print(f"\n{config.engine.kind} gets\n{json.dumps(settings, indent=2)}")
