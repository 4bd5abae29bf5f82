"""A frozen or dead rank is named, with the stacks of all ranks, and the run ends; a slow run is not ended."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from configs import resolve_recipe
from tests.gloo import run_ranks
from tests.nursery import PythonProcess
from tests.processes import kill_tree
from tests.real_data import REPOSITORY
from tests.small_encoder import CONVNET
from tests.tiny_data import write_tiny_pair
from tests.trainer import toy_ranks
from tests.trainer.toy_ranks import BAD_STEP, CULPRIT, LIMIT_SECONDS, NUM_RANKS, SHARDS
from trainer.checkpoint.save import CheckpointWriter
from trainer.config import RunConfig
from trainer.fault_tolerance.stalls import describe_stall
from trainer.fault_tolerance.watchdog import Watchdog, WatchdogConfig
from trainer.liveness import stage
from trainer.models.resnet import BasicBlock
from trainer.run_dir import RunDir
from trainer.train import train


def wait_until(condition: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def four_ranks(directory: Path, trouble: Callable[[], None]) -> Iterator[list[BaseProcess]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pydantic", "trainer.fault_tolerance.watchdog"])
    ranks: list[BaseProcess] = [
        context.Process(target=toy_ranks.toy_rank, args=(rank, directory, trouble)) for rank in range(NUM_RANKS)
    ]
    for process in ranks:
        process.start()
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def is_alive(pid: int) -> bool:
    """Return whether a process has not ended; a parent may still have to wait for one that has."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def left_by(directory: Path, rank: int) -> str:
    return (RunDir(directory).stalled / f"rank_{rank}.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "said", "frame"),
    [
        (toy_ranks.stop_this_process, "left no stacks, so it was stopped or killed", ""),
        (toy_ranks.kill_this_process, "left no stacks, so it was stopped or killed", ""),
        (toy_ranks.sleep_for_long, "did not wait for another rank", "in sleep_for_long"),
        (toy_ranks.hold_the_gil_for_long, "did not wait for another rank", "in hold_the_gil_for_long"),
        (toy_ranks.wait_for_a_worker, "did not wait for another rank", "in wait_for_a_worker"),
    ],
)
def test_one_lost_rank_of_four(tmp_path: Path, trouble: Callable[[], None], said: str, frame: str) -> None:
    with four_ranks(tmp_path, trouble) as ranks:
        others = [process for rank, process in enumerate(ranks) if rank != CULPRIT or frame]
        wait_until(lambda: not any(process.is_alive() for process in others), seconds=LIMIT_SECONDS + 60)
        assert all(process.exitcode != 0 for process in others)
        sentence = describe_stall(RunDir(tmp_path))
        assert sentence is not None
        expected = f"rank {CULPRIT} on {os.uname().nodename}, process {ranks[CULPRIT].pid}, in step {BAD_STEP} (step), "
        assert sentence.startswith(f"{expected}reading {SHARDS[CULPRIT]} ")
        assert said in sentence
        for rank in range(NUM_RANKS):
            text = left_by(tmp_path, rank)
            assert (frame if rank == CULPRIT else "all_reduce") in text
            assert f"in step {BAD_STEP} (step), reading {SHARDS[rank]}" in text.splitlines()[0]


class Timer:
    """A clock that tests set, and the timer of `faulthandler` by this clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ends_at = 0.0, 0.0
        monkeypatch.setattr(faulthandler, "dump_traceback_later", self._arm)
        monkeypatch.setattr(signal, "setitimer", lambda *_: None)

    def _arm(self, seconds: float, **_: object) -> None:
        self.ends_at = self.now + seconds

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < self.ends_at, "the watchdog has ended a healthy run"


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    return Timer(monkeypatch)


def watched(directory: Path, timer: Timer, **settings: float) -> Watchdog:
    return Watchdog(RunDir(directory), WatchdogConfig(), rank=0, clock=lambda: timer.now, **settings)


def take_step(watchdog: Watchdog, timer: Timer, step: int, seconds: float) -> None:
    """Take a step with a tenth of the time in each of eight blocks, and a fifth for reading."""
    watchdog.beat(step, doing="reading")
    with stage("read"):
        timer.sleep(seconds / 5)
    watchdog.beat(step, doing="training")
    for name in ("forward", "backward"):
        with stage(name):
            for _ in range(4):
                timer.sleep(seconds / 10)
                watchdog.sign()


def test_steps_of_200_s_after_steps_of_1_s_are_no_stall(tmp_path: Path, timer: Timer) -> None:
    with watched(tmp_path, timer) as watchdog:
        for step in range(5):
            take_step(watchdog, timer, step, seconds=1.0)
        assert timer.ends_at - timer.now <= 60
        for step in range(5, 9):
            take_step(watchdog, timer, step, seconds=200.0)
        with stage("forward"):
            assert timer.ends_at - timer.now == pytest.approx(20 * 20)
        take_step(watchdog, timer, 9, seconds=2000.0)


def test_the_start_and_probes_have_more_time_and_the_next_step_has_not(tmp_path: Path, timer: Timer) -> None:
    with watched(tmp_path, timer) as watchdog:
        timer.sleep(500)
        watchdog.beat(7, doing="reading")
        timer.sleep(500)
        for step in range(8, 12):
            take_step(watchdog, timer, step, seconds=1.0)
        for doing in ("probing", "compiling"):
            with watchdog.patience(doing), stage("forward"):
                timer.sleep(500)
            assert timer.ends_at - timer.now <= 60
        with watchdog.patience("probing"):
            timer.sleep(9_000)  # below twenty times the last one


def test_a_stage_that_never_ended_before_has_the_time_of_the_start(tmp_path: Path, timer: Timer) -> None:
    with watched(tmp_path, timer) as watchdog:
        for step in range(3):
            take_step(watchdog, timer, step, seconds=1.0)
        for seconds in (500, 50):
            with stage("communication"):
                timer.sleep(seconds)


def test_a_rank_is_as_patient_as_the_fetch_of_a_shard(tmp_path: Path, timer: Timer) -> None:
    with watched(tmp_path, timer, fetch_seconds=300) as watchdog:
        for step in range(3):
            take_step(watchdog, timer, step, seconds=1.0)
        with stage("read"):
            timer.sleep(299)
        with stage("backward"):  # another rank reads
            timer.sleep(299)
        with stage("forward"):
            assert timer.ends_at - timer.now == 60


def test_switched_off_it_sets_no_timer(tmp_path: Path, timer: Timer) -> None:
    with Watchdog(RunDir(tmp_path), WatchdogConfig(enabled=False), rank=0) as watchdog:
        watchdog.beat(0, doing="step")
        watchdog.beat(1, doing="step")
        with stage("forward"):
            assert timer.ends_at == 0
    assert timer.ends_at == 0
    assert not RunDir(tmp_path).stalled.exists()


def test_a_good_end_leaves_no_file_and_a_bad_one_leaves_its_error(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    with Watchdog(run_dir, WatchdogConfig(), rank=3):
        assert left_by(tmp_path, 3).startswith("rank 3 on ")
    assert list(run_dir.stalled.iterdir()) == []
    with contextlib.suppress(ValueError), Watchdog(run_dir, WatchdogConfig(), rank=3):
        raise ValueError("no")
    assert left_by(tmp_path, 3).splitlines()[-1] == "ValueError: no"
    with Watchdog(run_dir, WatchdogConfig(), rank=3):
        pass
    assert [path.name for path in run_dir.stalled.iterdir()] == ["rank_3.earlier"]


FROZEN = "Timeout (0:01:00)!\nThread 0x1 (most recent call first):\n"
WAITING = FROZEN + '  File "torch/distributed/x.py", line 1 in all_reduce\n'
ELSEWHERE = WAITING + '\nThread 0x1 (most recent call first):\n  File "a.py", line 1 in crop\n'
CLOSED = 'Traceback (most recent call last):\n  File "torch/distributed/x.py", line 1, in y\nRuntimeError: closed'
ERROR = 'Traceback (most recent call last):\n  File "mine.py", line 1, in y\nKeyError: "a"'


@pytest.mark.parametrize(
    ("bodies", "said"),
    [
        ((WAITING, ELSEWHERE, WAITING), "R1 gave no sign of life, and did not wait"),
        ((WAITING, "", CLOSED), "R1 left no stacks"),
        ((WAITING, WAITING, WAITING), "R0; R1; R2 waited"),
        ((WAITING, ERROR, CLOSED), None),  # its error says more
        ((CLOSED, CLOSED, CLOSED), None),
        (("", "", ""), None),  # the run may go on
    ],
)
def test_who_holds_up_the_others(bodies: tuple[str, ...], said: str | None, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.stalled.mkdir()
    for rank, body in enumerate(bodies):
        (run_dir.stalled / f"rank_{rank}.txt").write_text(f"R{rank}".ljust(99) + f"\n{body}")
    sentence = describe_stall(run_dir)
    assert sentence is None if said is None else sentence is not None and sentence.startswith(said)
    assert describe_stall(run_dir, since=time.time() + 60) is None


def train_with_slow_blocks(data: Path, directory: Path) -> None:
    """Take two steps that are longer than the limit, in blocks that are shorter than it, without computing."""
    forward = BasicBlock.forward

    def slow(block: BasicBlock, x_BCHW: torch.Tensor) -> torch.Tensor:
        time.sleep(0.4)
        return forward(block, x_BCHW)

    BasicBlock.forward = slow  # type: ignore[method-assign, assignment]
    train(few_steps(data, "watchdog.limit_seconds=2"), RunDir(directory), device=torch.device("cpu"), command="test")


def few_steps(data: Path, *more: str) -> RunConfig:
    given = [f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}", "tracking.wandb=disabled"]
    return resolve_recipe("debug:image", [*given, "global_batch_size=16", "num_epochs=1", *more])


@pytest.mark.ranks
def test_a_slow_step_is_no_stall(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=32, num_test=20)
    run_ranks(train_with_slow_blocks, 1, data, tmp_path / "run")
    assert RunDir(tmp_path / "run").latest_step() == 2
    assert describe_stall(RunDir(tmp_path / "run")) is None


def test_a_later_checkpoint_has_no_more_time_than_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may freeze while the others wait for the disk."""
    data = write_tiny_pair(tmp_path / "data", num_train=48, num_test=20)
    armed, limits, is_written = [0.0], [], CheckpointWriter._is_written
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, **_: armed.append(seconds))

    def noting(writer: CheckpointWriter, deadline: float) -> bool:
        limits.append(armed[-1])
        return is_written(writer, deadline)

    monkeypatch.setattr(CheckpointWriter, "_is_written", noting)
    config = few_steps(data, "checkpoint_every_steps=1", CONVNET)
    train(config, RunDir(tmp_path / "run"), device=torch.device("cpu"), command="test")
    assert config.watchdog.limit_seconds <= limits[2] < config.watchdog.startup_seconds


@pytest.mark.process
def test_a_real_run_with_a_frozen_rank(tmp_path: Path) -> None:
    write_tiny_pair(tmp_path / "data", num_train=83, num_test=20)
    num_ranks, culprit = 2, 1
    settings = {
        "encoder": CONVNET.removeprefix("encoder="),
        "data.train_dir": tmp_path / "data" / "train",
        "data.test_dir": tmp_path / "data" / "test",
        "data.placement": "stream",
        "global_batch_size": 16,
        "num_epochs": 1000,
        "tracking.wandb": "disabled",
        "watchdog.limit_seconds": 5,
    }
    sets = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
    run_dir = RunDir(tmp_path / "run")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    process = PythonProcess(
        [*launcher, "launch/train.py", "--config", "debug:image", "--run-dir", str(run_dir.path), *sets],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        wait_until(lambda: len(run_dir.read_metrics()) > 5, seconds=120)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [int(pid) for pid in children if "launch/train.py" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(ranks[culprit], signal.SIGSTOP)
        others = [rank for number, rank in enumerate(ranks) if number != culprit]
        wait_until(lambda: not any(map(is_alive, others)), seconds=90)
        os.kill(ranks[culprit], signal.SIGKILL)  # torchrun does it too, after 30 seconds
        process.communicate(timeout=90)
    finally:
        kill_tree(process)
    assert process.returncode != 0
    said = describe_stall(run_dir)
    assert said is not None
    assert said.startswith(f"rank {culprit} on {os.uname().nodename}")
    assert "shard-0" in said
    assert sum(" in train\n" in left_by(run_dir.path, rank) for rank in range(num_ranks)) >= num_ranks - 1
