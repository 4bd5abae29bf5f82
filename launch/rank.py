"""Train as one rank in this process, or print the plan of a run."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import torch

from data_pipeline.core.errors import UserError, log_to_terminal
from data_pipeline.core.schema import difference
from launch.ended import End
from trainer.config import RunConfig, read_run_config
from trainer.data import read_manifests
from trainer.distributed.environment import choose_device, process_group, read_env
from trainer.fault_tolerance.preemption import StoppedError
from trainer.fault_tolerance.stalls import lost_another
from trainer.memory import keep_freed_memory
from trainer.own_code import own_packages
from trainer.planning.plan import describe, plan
from trainer.run_dir import RunDir, TakenError, is_held
from trainer.train import train
from trainer.utilization import Utilization, measure_utilization

_MAX_REASON: Final = 4_000  # characters, because an exception may quote a whole tensor
_INTERRUPTED: Final = (
    "interrupted by a second Ctrl-C, which saves no checkpoint; start it again with the same command and it goes on "
    "from its newest one"
)


def run(config: RunConfig, run_dir: Path, *, command: str, accepted_data: Collection[str] = ()) -> None:
    """Train as the rank given by the variables of torchrun or Slurm, or alone. Note why it ends, if it ends early.

    Raises the errors of `train` and of `trainer.distributed.environment`.
    """
    with noting_its_end(config, run_dir):
        keep_freed_memory()
        world = read_env(os.environ)
        log_to_terminal(own_packages(config))
        device, utilization = choose_device(world), None
        if device.type == "cuda" and world.rank == 0:
            utilization = measure_utilization(config, device, num_ranks=world.world_size)
        with process_group(world, device):
            train_on(device, config, run_dir, command=command, accepted_data=accepted_data, utilization=utilization)


@contextlib.contextmanager
def noting_its_end(config: RunConfig, path: Path) -> Iterator[None]:
    """If the block ends early, write the reason into the run directory.

    Writes nothing if another process trains there, or has taken the directory from this one, or if the directory
    belongs to another config: then the run itself has not ended.
    """
    run_dir, rank = RunDir(path), read_env(os.environ).rank
    was_held = is_held(run_dir)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if not was_held and not isinstance(error, TakenError) and _belongs_to(run_dir, config):
            _note_end(run_dir, error, rank)
        raise


def _belongs_to(run_dir: RunDir, config: RunConfig) -> bool:
    try:
        return run_dir.config.is_file() and not difference(read_run_config(run_dir), config)
    except UserError:
        return False


def _note_end(run_dir: RunDir, error: BaseException, rank: int) -> None:
    """Write ended.json, unless another rank has done so. Ignores a full disk: the error at hand matters more."""
    if isinstance(error, StoppedError | KeyboardInterrupt):
        ended, reason = "stopped", _INTERRUPTED if isinstance(error, KeyboardInterrupt) else str(error)
    else:
        ended, reason = "failed", last_line(error)[:_MAX_REASON]
    if (ended == "stopped" and rank > 0) or lost_another(error):
        return
    end = End.parse({"ended": ended, "at": time.time(), "rank": rank, "reason": reason}, where="ended.json")
    with contextlib.suppress(OSError), run_dir.ended.open("x", encoding="utf-8") as file:
        file.write(end.model_dump_json())


def last_line(error: BaseException) -> str:
    """Return the last line that Python prints for an exception, without the name of its module.

    Examples:
        >>> last_line(ValueError("the loss is nan"))
        'ValueError: the loss is nan'
    """
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.splitlines()[-1].strip().removeprefix(f"{type(error).__module__}.")


def train_on(
    device: torch.device,
    config: RunConfig,
    run_dir: Path,
    *,
    command: str,
    accepted_data: Collection[str] = (),
    utilization: Utilization | None = None,
) -> None:
    """Train as one of the joined ranks. Raises the errors of `train`, and `UserError` if the GPU's memory is full."""
    try:
        train(
            config,
            RunDir(run_dir),
            device=device,
            command=command,
            accepted_data=accepted_data,
            utilization=utilization,
        )
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"rank {read_env(os.environ).rank} has not enough memory on {device} "
            f"({str(error).partition('. GPU')[0]}); in another --run-dir, raise memory.micro_batches or set "
            "memory.encoder_checkpointing=whole; `--plan --gpu-gigabytes` tells which batch fits"
        ) from error


def print_plan(config: RunConfig, *, world_size: int, device_gigabytes: float | None) -> None:
    """Print the plan of a run. Sizes of the data count if they are there."""
    try:
        train_set = read_manifests(config.data).train
    except UserError as error:
        print(f"the sizes of the data are not known: {error}", file=sys.stderr)
        train_set = None
    planned = plan(config, world_size=world_size, train=train_set, device_gigabytes=device_gigabytes)
    print(describe(planned, config, device_gigabytes=device_gigabytes))
