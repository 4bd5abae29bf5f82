"""Processes that fail under a watchdog, for its tests. Imports little, because each process has to load this."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from trainer.fault_tolerance.watchdog import Watchdog, WatchdogConfig
from trainer.run_dir import RunDir

NUM_RANKS, CULPRIT, BAD_STEP = 4, 2, 10
LIMIT_SECONDS = 2.0
SHARDS = [f"shard-{number:05d}.tar" for number in range(NUM_RANKS)]


def toy_rank(rank: int, directory: Path, trouble: Callable[[], None]) -> None:
    """Sum numbers with the other ranks, step by step, as a training loop would."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory / 'store'}",
        timeout=timedelta(seconds=60),
        rank=rank,
        world_size=NUM_RANKS,
    )
    with Watchdog(RunDir(directory), WatchdogConfig(limit_seconds=LIMIT_SECONDS), rank=rank) as watchdog:
        for step in itertools.count():
            watchdog.beat(step, doing="data", shards=[SHARDS[rank]])
            watchdog.beat(step, doing="step")
            if step == BAD_STEP and rank == CULPRIT:
                trouble()
            dist.all_reduce(torch.ones(3))
            time.sleep(0.02)


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_for_long() -> None:
    time.sleep(600)


def hold_the_gil_for_long() -> None:
    """Lock a mutex twice in C, with Python's lock held."""
    mutex = ctypes.create_string_buffer(64)
    c = ctypes.PyDLL(None)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _SlowSamples(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        rank = os.getppid()
        while index and os.getppid() == rank:  # until its rank has been ended
            time.sleep(0.1)
        return index


def wait_for_a_worker() -> None:
    for _ in DataLoader(_SlowSamples(), batch_size=None, num_workers=1, multiprocessing_context="fork"):
        pass
