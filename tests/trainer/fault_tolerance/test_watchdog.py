"""A frozen or dead rank is named with the reason and all stacks, within the limit and seconds, and the run ends."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.models.resnet import BasicBlock

from configs import resolve_recipe
from data_pipeline.core import progress
from tests.gloo import run_ranks
from tests.nursery import PythonProcess
from tests.processes import kill_tree
from tests.real_data import REPOSITORY
from tests.tiny_data import write_tiny_pair
from tests.trainer import toy_ranks
from tests.trainer.toy_ranks import BAD_STEP, CULPRIT, LIMIT_SECONDS, NUM_RANKS, SHARDS
from trainer.fault_tolerance.pulse import Pulse, read_pulse
from trainer.fault_tolerance.sidecar import Activity, Rank, SilenceTimer, _stat
from trainer.fault_tolerance.stall_report import RankReport, describe_culprits
from trainer.fault_tolerance.watchdog import Watchdog, WatchdogConfig
from trainer.profiling import stage
from trainer.run_dir import RunDir
from trainer.train import train


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], *, seconds: float) -> float:
    """Return the seconds until the condition holds; fail after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds
        time.sleep(0.02)
    return time.monotonic() - started


def test_the_sidecar_reads_a_process_whose_name_is_cut_inside_a_character(tmp_path: Path) -> None:
    (tmp_path / "stat").write_bytes("7 (fourteen-bytesé".encode()[:-1] + b") S 1 7 7")
    assert _stat(str(tmp_path)) == ["S", "1", "7", "7"]


@contextmanager
def started(target: Callable[..., None], *arguments: tuple[Any, ...]) -> Iterator[list[BaseProcess]]:
    """Start a process for each tuple of arguments, and end them all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pydantic", "trainer.fault_tolerance.watchdog"])
    processes: list[BaseProcess] = [context.Process(target=target, args=given) for given in arguments]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def four_ranks(directory: Path, trouble: Callable[[], None]) -> Iterator[list[BaseProcess]]:
    """Start four ranks; yield them once all are watched."""
    with started(toy_ranks.toy_rank, *((rank, directory, trouble) for rank in range(NUM_RANKS))) as ranks:
        wait_until(lambda: all(sidecars(directory, NUM_RANKS)), seconds=60)
        yield ranks


def sidecars(directory: Path, num_ranks: int = 1) -> list[int]:
    """Return the process ids of the sidecars; 0 for one that has not started."""
    paths = [directory / f"sidecar_{rank}" for rank in range(num_ranks)]
    return [int((path.read_text() if path.exists() else "") or 0) for path in paths]


def wait_for_the_end(processes: list[BaseProcess], *, seconds: float) -> None:
    wait_until(lambda: not any(process.is_alive() for process in processes), seconds=seconds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "said", "frame"),
    [
        (toy_ranks.stop_this_process, "is stopped by a signal", "in stop_this_process"),
        (toy_ranks.sleep_for_long, "does not wait for the others", "in sleep_for_long"),
        (toy_ranks.hold_the_gil_for_long, "does not wait for the others", "in hold_the_gil_for_long"),
        (toy_ranks.wait_for_a_worker, "does not wait for the others", "in __getitem__"),
    ],
)
def test_one_frozen_rank_of_four(tmp_path: Path, trouble: Callable[[], None], said: str, frame: str) -> None:
    with four_ranks(tmp_path, trouble) as ranks:
        wait_for_the_end(ranks, seconds=LIMIT_SECONDS + 20)
        assert all(process.exitcode != 0 for process in ranks)
    report = (tmp_path / "stalled.txt").read_text()
    sentence = report.splitlines()[0]
    assert sentence.startswith(f"rank {CULPRIT} on {os.uname().nodename} {said}")
    assert f"in step {BAD_STEP} (step), reading {SHARDS[CULPRIT]}" in sentence
    for rank in range(NUM_RANKS):
        own = RankReport.parse((tmp_path / "stalled" / "first" / f"rank_{rank:04d}.txt").read_text())
        assert own.stacks.strip() in report
        assert (frame if rank == CULPRIT else "in all_reduce") in own.stacks
        assert (own.rank, own.step, own.shards, own.pid) == (rank, BAD_STEP, SHARDS[rank], ranks[rank].pid)
        assert own.silent < LIMIT_SECONDS + 1
    on_stderr = [(tmp_path / f"stderr_{rank}").read_text() for rank in range(NUM_RANKS)]
    assert [sentence in text for text in on_stderr] == [True, False, False, False]
    wait_until(lambda: not any(map(is_running, sidecars(tmp_path, NUM_RANKS))), seconds=10)


@pytest.mark.slow
def test_a_killed_rank_is_named_at_once(tmp_path: Path) -> None:
    with four_ranks(tmp_path, toy_ranks.kill_this_process) as ranks:
        wait_for_the_end(ranks, seconds=20)
        assert all(process.exitcode != 0 for process in ranks)
        wait_until((tmp_path / "stalled.txt").exists, seconds=10)
    sentence, *_ = report = (tmp_path / "stalled.txt").read_text().splitlines()
    assert sentence.startswith(f"rank {CULPRIT} on {os.uname().nodename} is dead (killed")
    assert f"in step {BAD_STEP}" in sentence
    assert SHARDS[CULPRIT] in sentence
    assert "no stacks: the process is gone" in report
    for rank in set(range(NUM_RANKS)) - {CULPRIT}:  # where they stood, or with which exception they were leaving
        own = RankReport.parse((tmp_path / "stalled" / "first" / f"rank_{rank:04d}.txt").read_text())
        # In the collective, which gloo ends with an exception; or on the way out, in torch's wrapper around it, or in
        # the watchdog, which formats the exception.
        assert re.search(r"in all_reduce|c10d_logger\.py|watchdog\.py.* in __exit__", own.stacks), own.stacks
        assert own.why in {"asked", "ended"}
    wait_until(lambda: not any(map(is_running, sidecars(tmp_path, NUM_RANKS))), seconds=10)


@contextmanager
def one_rank(directory: Path, body: Callable[[Watchdog], None], *, busy_seconds: float = 100) -> Iterator[BaseProcess]:
    with started(toy_ranks.alone, (directory, body, busy_seconds)) as processes:
        wait_until(lambda: all(sidecars(directory)), seconds=60)
        yield processes[0]


def test_a_rank_that_leaves_before_the_alarm_of_another_reports_all_the_same(tmp_path: Path) -> None:
    alarm = tmp_path / "stalled" / "first"
    with one_rank(tmp_path, partial(toy_ranks.raise_an_error_before_the_alarm, alarm)) as process:
        wait_for_the_end([process], seconds=20)
        assert process.exitcode == 1
        wait_until((tmp_path / "stalled.txt").exists, seconds=10)
    own = RankReport.parse((alarm / "rank_0000.txt").read_text())
    assert own.why == "ended"
    assert "ValueError: no" in own.stacks


@pytest.mark.slow
def test_slow_but_alive_is_no_stall(tmp_path: Path) -> None:
    with one_rank(tmp_path, toy_ranks.be_slow_but_alive) as process:
        wait_for_the_end([process], seconds=30)
        assert process.exitcode == 0
    assert (tmp_path / "stderr_0").read_text() == ""
    assert not (tmp_path / "stalled").exists()
    assert not is_running(*sidecars(tmp_path))


@pytest.mark.slow
def test_a_job_that_was_suspended_goes_on(tmp_path: Path) -> None:
    with one_rank(tmp_path, toy_ranks.take_steps_for_three_seconds) as process:
        time.sleep(0.5)
        assert process.pid is not None
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in (*sidecars(tmp_path), process.pid):
                os.kill(pid, number)
            time.sleep(2.5 if number == signal.SIGSTOP else 0)
        wait_for_the_end([process], seconds=30)
        assert process.exitcode == 0
    assert not (tmp_path / "stalled").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "number", "status"),
    [
        (toy_ranks.raise_an_error, 0, 1),
        (toy_ranks.wait, signal.SIGINT, 1),
        (toy_ranks.wait, signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_an_end_that_is_not_a_stall_is_quiet(
    tmp_path: Path, body: Callable[[Watchdog], None], number: int, status: int
) -> None:
    with one_rank(tmp_path, body) as process:
        if number:
            assert process.pid is not None
            os.kill(process.pid, number)
        wait_for_the_end([process], seconds=10)
        assert process.exitcode == status
    wait_until(lambda: not is_running(*sidecars(tmp_path)), seconds=5)
    assert not (tmp_path / "stalled").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "said", "status"),
    [
        (toy_ranks.freeze, "rank 0 on {host} shows no sign of life for 1 s: sleeping, in step 2 (step)", -9),
        (toy_ranks.signal_the_sidecar_and_freeze, "rank 0 on {host} shows no sign of life for 1 s", -9),
        (toy_ranks.be_killed, "rank 0 on {host} is dead (killed", -9),
        (toy_ranks.leave_without_a_word, "rank 0 on {host} is dead (killed, or it left without a message)", 3),
    ],
)
def test_a_rank_alone(tmp_path: Path, body: Callable[[Watchdog], None], said: str, status: int) -> None:
    sentence = said.replace("{host}", os.uname().nodename)
    with one_rank(tmp_path, body) as process:
        wait_for_the_end([process], seconds=20)
        assert process.exitcode == status
        wait_until(lambda: not is_running(*sidecars(tmp_path)), seconds=10)
    assert sentence in (tmp_path / "stderr_0").read_text()
    assert sentence in (tmp_path / "stalled.txt").read_text()


@pytest.mark.slow
def test_where_no_report_can_be_written_the_rank_ends_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "stalled").write_text("a file where a directory should be")
    with one_rank(tmp_path, toy_ranks.freeze) as process:
        wait_for_the_end([process], seconds=20)
        assert process.exitcode == -signal.SIGKILL
    stderr = (tmp_path / "stderr_0").read_text()
    assert "no sign of life" in stderr
    assert "in freeze" in stderr


@pytest.mark.process
def test_what_a_process_left_when_it_was_asked_to_end_stands_for_its_answer() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    stacks = os.memfd_create("stacks")
    watched = Rank(gone.pid, stacks=stacks)
    assert watched.dump() == "no stacks: the process is dead, and did not answer\n"
    os.write(stacks, b"Current thread\n")
    assert watched.dump() == "Current thread\n"
    os.close(stacks)


def test_switched_off_it_starts_nothing(tmp_path: Path) -> None:
    config = WatchdogConfig(enabled=False)
    with Watchdog(RunDir(tmp_path), config, rank=0, world_size=1, start="first") as watchdog:
        watchdog.beat(0, doing="step")
        with watchdog.patience(1, "checkpoint"):
            assert watchdog.pid is None


@pytest.mark.process
def test_an_announced_silence_ends_with_the_next_beat(tmp_path: Path) -> None:
    with Watchdog(RunDir(tmp_path), WatchdogConfig(), rank=0, world_size=1, start="first") as watchdog:
        assert watchdog._memory is not None
        for step in range(2):
            watchdog.beat(step, doing="reading", may_take_seconds=900)
            assert read_pulse(watchdog._memory).patience == 900
            watchdog.beat(step, doing="training")
        pulse = read_pulse(watchdog._memory)
        assert (pulse.patience, pulse.place) == (0, "training")
        with stage("forward"):
            assert read_pulse(watchdog._memory).place == "training, forward"
            assert watchdog.describe_step() == "step 2: forward, 0 s"


@pytest.mark.process
def test_a_beat_costs_microseconds(tmp_path: Path) -> None:
    with Watchdog(RunDir(tmp_path), WatchdogConfig(), rank=0, world_size=1, start="first") as watchdog:
        seconds = []
        for step in range(2_000):
            started = time.perf_counter()
            watchdog.beat(step, doing="data", shards=SHARDS)
            seconds.append(time.perf_counter() - started)
        assert statistics.median(seconds) < 20e-6


WELL = RankReport(
    rank=0,
    host="a",
    pid=1,
    why="silent",
    state="sleeping",
    beats=21,
    step=10,
    doing="step",
    silent=40.0,
    shards="s",
    stacks='Current thread 0x1 (most recent call first):\n  File "torch/distributed/x.py", line 1 in all_reduce\n',
)
ELSEWHERE = 'Thread 0x2 (most recent call first):\n  File "torch/distributed/x.py", line 1 in y\n\n' + (
    'Current thread 0x1 (most recent call first):\n  File "views.py", line 1 in crop\n'
)


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        ({"why": "dead", "state": "dead (killed)", "beats": 9}, "rank 1 on b is dead (killed), in step 10 (step)"),
        ({"state": "stopped by a signal", "stacks": "x"}, "rank 1 on b is stopped by a signal, in step 10"),
        ({"beats": 20, "doing": "data"}, "rank 1 on b is behind the others: sleeping, in step 10 (data), reading s"),
        ({"stacks": ELSEWHERE}, "rank 1 on b does not wait for the others, which wait for it: sleeping, in step 10"),
        ({}, "all ranks stand still, and none of them stands out"),
    ],
)
def test_who_holds_up_the_others(odd: dict[str, Any], sentence: str) -> None:
    reports = [WELL, replace(WELL, rank=1, host="b", **odd), replace(WELL, rank=2, host="c")]
    assert describe_culprits(reports, world_size=3).startswith(sentence)
    assert [RankReport.parse(report.text()) for report in reports] == reports


def test_who_left_no_report_is_named() -> None:
    assert describe_culprits([WELL, replace(WELL, rank=3)], world_size=4).startswith("ranks 1, 2 left no report")
    stopped = replace(WELL, rank=3, state="stopped by a signal")
    assert describe_culprits([WELL, stopped], world_size=4).endswith("; ranks 1, 2 left no report")


LIMITS: dict[Activity, float] = {"idle": 10, "waiting": 50, "working": 100}
PULSE = Pulse(beats=1, step=0, patience=0.0, closed=False, doing="", shards="", ending="")


def test_an_announced_patience_raises_the_limit_until_the_next_beat() -> None:
    timer, patient = SilenceTimer(LIMITS), replace(PULSE, patience=600)
    timer.exceeded(patient, elapsed=0)
    assert not timer.exceeded(patient, elapsed=600)
    assert timer.exceeded(patient, elapsed=0.1) == "idle"
    assert not timer.exceeded(replace(PULSE, beats=2), elapsed=1)
    assert not timer.exceeded(replace(PULSE, beats=2), elapsed=10)
    assert timer.exceeded(replace(PULSE, beats=2), elapsed=0.1) == "idle"


def test_a_sign_of_life_ends_a_silence_without_a_beat() -> None:
    timer = SilenceTimer(LIMITS)
    for signs in range(10):
        assert not timer.exceeded(replace(PULSE, signs=signs), elapsed=8)
    assert timer.seconds == 0


@pytest.mark.parametrize("activity", LIMITS)
def test_each_kind_of_silence_has_its_own_limit(activity: Activity) -> None:
    timer = SilenceTimer(LIMITS)
    timer.exceeded(PULSE, elapsed=0)
    assert not timer.exceeded(PULSE, elapsed=LIMITS[activity], activity=activity)
    for other in LIMITS.keys() - {activity}:
        assert not timer.exceeded(PULSE, elapsed=LIMITS[other], activity=other)
    assert timer.exceeded(PULSE, elapsed=0.1, activity=activity) == activity


@pytest.mark.slow
@pytest.mark.parametrize(
    "body", [toy_ranks.work_for_long, toy_ranks.wait_for_another_rank, toy_ranks.read_by_a_worker_that_works]
)
def test_work_and_waiting_for_others_is_no_stall(tmp_path: Path, body: Callable[[Watchdog], None]) -> None:
    """Each takes longer than an idle rank may, without a sign of life."""
    with one_rank(tmp_path, body) as process:
        wait_for_the_end([process], seconds=60)
        assert process.exitcode == 0, (tmp_path / "stderr_0").read_text()
    assert not (tmp_path / "stalled").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (toy_ranks.loop_for_ever, r"in step 2 \(step\); if the run is only slow, raise watchdog\.working_seconds=2$"),
        (
            toy_ranks.wait_for_ever,
            r"in step 2 \(step, communication\); if the run is only slow, raise watchdog\.waiting_seconds=2$",
        ),
        (toy_ranks.freeze, r"sleeping, in step 2 \(step\); if the run is only slow, raise watchdog\.limit_seconds=1$"),
    ],
)
def test_what_never_ends_is_reported_with_the_setting_that_it_exceeded(
    tmp_path: Path, body: Callable[[Watchdog], None], said: str
) -> None:
    with one_rank(tmp_path, body, busy_seconds=2) as process:
        wait_for_the_end([process], seconds=30)
        assert process.exitcode == -signal.SIGKILL
    assert re.search(said, (tmp_path / "stalled.txt").read_text().splitlines()[0])


@pytest.mark.slow
def test_a_stopped_rank_is_idle_though_it_stands_in_a_collective(tmp_path: Path) -> None:
    with one_rank(tmp_path, toy_ranks.stop_in_a_collective) as process:
        wait_for_the_end([process], seconds=20)
    assert "watchdog.limit_seconds=1" in (tmp_path / "stalled.txt").read_text().splitlines()[0]


def train_with_slow_blocks(data: Path, directory: Path) -> str:
    """Take two steps that are longer than the limit, in blocks that are shorter than it, without computing.

    Returns what the log said meanwhile.
    """
    progress.SECONDS_BETWEEN_LINES = 0.3
    forward = BasicBlock.forward

    def slow(block: BasicBlock, x: torch.Tensor) -> Any:
        time.sleep(0.4)
        return forward(block, x)

    BasicBlock.forward = slow
    config = resolve_recipe(
        "debug:image",
        [
            f"data.train_dir={data / 'train'}",
            f"data.test_dir={data / 'test'}",
            "global_batch_size=16",
            "num_epochs=1",
            "tracking.wandb=disabled",
            "watchdog.limit_seconds=2",
        ],
    )
    with contextlib.redirect_stderr(io.StringIO()) as said:
        train(config, RunDir(directory), device=torch.device("cpu"), command="test")
    return said.getvalue()


@pytest.mark.ranks
def test_a_slow_step_is_no_stall_and_the_log_says_what_it_does(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=32, num_test=20)
    (said,) = run_ranks(train_with_slow_blocks, 1, data, tmp_path / "run")
    assert re.search(r"^train debug\S*: 0/2, first step: forward, \d+ s$", said, re.MULTILINE), said
    assert re.search(r"^train debug\S*: 1/2, step 2: forward, \d+ s$", said, re.MULTILINE), said
    assert RunDir(tmp_path / "run").latest_step() == 2
    assert not (tmp_path / "run" / "stalled").exists()


@pytest.mark.process
def test_a_real_run_with_a_frozen_rank(tmp_path: Path) -> None:
    write_tiny_pair(tmp_path / "data", num_train=83, num_test=20)
    settings = {
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
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
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
        os.kill(ranks[CULPRIT], signal.SIGSTOP)
        _, stderr = process.communicate(timeout=90)
    finally:
        kill_tree(process)
    assert process.returncode != 0
    said = f"rank {CULPRIT} on {os.uname().nodename} is stopped by a signal"
    assert said in stderr
    report = (run_dir.path / "stalled.txt").read_text()
    assert report.startswith(said)
    assert "shard-0" in report.splitlines()[0]
    assert report.count("in train") >= NUM_RANKS
