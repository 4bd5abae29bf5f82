"""Processes that fail under a watchdog, for its tests. Imports little, because each process has to load this."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from trainer.fault_tolerance.watchdog import Watchdog, WatchdogConfig
from trainer.profiling import stage
from trainer.run_dir import RunDir

NUM_RANKS, CULPRIT, BAD_STEP = 4, 2, 10
LIMIT_SECONDS = 2.0
SHARDS = [f"shard-{number:05d}.tar" for number in range(NUM_RANKS)]


def toy_rank(rank: int, directory: Path, trouble: Callable[[], None]) -> None:
    """Sum numbers with the other ranks, step by step, as a training loop would."""
    _write_stderr_to(directory / f"stderr_{rank}")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory / 'store'}",
        timeout=timedelta(seconds=60),
        rank=rank,
        world_size=NUM_RANKS,
    )
    config = WatchdogConfig(limit_seconds=LIMIT_SECONDS)
    with Watchdog(RunDir(directory), config, rank=rank, world_size=NUM_RANKS, start="first") as watchdog:
        (directory / f"sidecar_{rank}").write_text(str(watchdog.pid))
        for step in itertools.count():
            watchdog.beat(step, doing="data", shards=[SHARDS[rank]])
            watchdog.beat(step, doing="step")
            if step == BAD_STEP and rank == CULPRIT:
                trouble()
            dist.all_reduce(torch.ones(3))
            time.sleep(0.02)


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.1)  # woken to say where it stands: while another of its threads says so, it must not have gone on


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
        time.sleep(600 * index)
        return index


def wait_for_a_worker() -> None:
    for _ in DataLoader(_SlowSamples(), batch_size=None, num_workers=1, multiprocessing_context="fork"):
        pass


def alone(directory: Path, body: Callable[[Watchdog], None], busy_seconds: float) -> None:
    """Run a single rank that may be idle for 1 s, and work or wait for `busy_seconds`, after a start of 3 s."""
    _write_stderr_to(directory / "stderr_0")
    config = WatchdogConfig(
        limit_seconds=1, waiting_seconds=busy_seconds, working_seconds=busy_seconds, startup_seconds=3
    )
    with Watchdog(RunDir(directory), config, rank=0, world_size=1, start="first") as watchdog:
        (directory / "sidecar_0").write_text(str(watchdog.pid))
        body(watchdog)


def be_slow_but_alive(watchdog: Watchdog) -> None:
    """Go through a start-up, an announced pause and a slow first step that are longer than the limit."""
    time.sleep(1.6)
    for step in range(3):
        watchdog.beat(step, doing="step")
        time.sleep(0.02 if step else 1.6)
    with watchdog.patience(4, "checkpoint"):
        with watchdog.patience(0.1, "probe"):
            pass
        time.sleep(1.6)
    watchdog.beat(3, doing="step")
    time.sleep(0.7)
    watchdog.beat(4, doing="step")


def take_steps_for_three_seconds(watchdog: Watchdog) -> None:
    for step in range(300):
        watchdog.beat(step, doing="step")
        time.sleep(0.01)


def freeze(watchdog: Watchdog) -> None:
    _take_three_steps(watchdog)
    time.sleep(60)


def signal_the_sidecar_and_freeze(watchdog: Watchdog) -> None:
    """Send its new sidecar what a terminal and a batch system send to all processes of a job, then freeze."""
    assert watchdog.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(watchdog.pid, number)
    freeze(watchdog)


def work_for_long(watchdog: Watchdog) -> None:
    """Compute for 1.5 seconds of processor time, in one step without a sign of life."""
    _take_three_steps(watchdog)
    began = time.thread_time()
    while time.thread_time() < began + 1.5:
        pass


def wait_for_another_rank(watchdog: Watchdog) -> None:
    _take_three_steps(watchdog)
    with stage("communication"):
        time.sleep(1.5)


def read_by_a_worker_that_works(watchdog: Watchdog) -> None:
    _take_three_steps(watchdog)
    worker = multiprocessing.get_context("fork").Process(target=_work_of_a_worker)
    with stage("read"):
        worker.start()
        worker.join()


def _work_of_a_worker() -> None:
    began = time.thread_time()
    while time.thread_time() < began + 1.5:
        pass


def loop_for_ever(watchdog: Watchdog) -> None:
    _take_three_steps(watchdog)
    while True:
        pass


def wait_for_ever(watchdog: Watchdog) -> None:
    _take_three_steps(watchdog)
    with stage("communication"):
        time.sleep(60)


def stop_in_a_collective(watchdog: Watchdog) -> None:
    _take_three_steps(watchdog)
    with stage("communication"):
        stop_this_process()
        time.sleep(60)


def _take_three_steps(watchdog: Watchdog) -> None:
    for step in range(3):
        watchdog.beat(step, doing="step")


def wait(watchdog: Watchdog) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
    watchdog.beat(0, doing="step")
    time.sleep(60)


def raise_an_error(watchdog: Watchdog) -> None:
    watchdog.beat(0, doing="step")
    raise ValueError("no")


def raise_an_error_before_the_alarm(alarm: Path, watchdog: Watchdog) -> None:
    """Fail a moment before the alarm of another rank."""
    watchdog.beat(0, doing="step")
    threading.Timer(0.6, alarm.mkdir, kwargs={"parents": True}).start()
    raise ValueError("no")


def leave_without_a_word(watchdog: Watchdog) -> None:
    watchdog.beat(0, doing="step")
    os._exit(3)


def be_killed(watchdog: Watchdog) -> None:
    watchdog.beat(0, doing="step")
    kill_this_process()


def _write_stderr_to(path: Path) -> None:
    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
