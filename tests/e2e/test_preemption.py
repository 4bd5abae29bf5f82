"""A warning to any one of the ranks stops all of them after the same step, saved, and no step is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from launch.states import status_of
from tests.nursery import PythonProcess
from tests.processes import kill_tree, ranks_of
from tests.slow_steps import SLOW_STEPS, pausing
from tests.small_encoder import CONVNET
from tests.tiny_data import on_data, write_tiny_pair
from trainer.run_dir import RunDir, hold

ROOT = Path(__file__).parents[2]
NUM_STEPS = 12
PAUSE_SECONDS = 0.4  # in each step that waits for a warning, so that it comes in time


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=64, num_test=20)


@contextmanager
def start(data: Path, run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a run on two ranks; it ends with the block at the latest."""
    small = [CONVNET, "global_batch_size=16", f"num_epochs={NUM_STEPS // 4}", "checkpoint_every_steps=1000"]
    settings = on_data(data, *small)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["launch/train.py", "--config", "debug:image", "--run-dir", str(run_dir)]
    command += [*SLOW_STEPS, *(word for setting in settings for word in ("--set", setting))]
    environ = pausing(PAUSE_SECONDS, os.environ)
    process = PythonProcess(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        kill_tree(process)


def wait_for_steps(run_dir: RunDir, num_steps: int) -> None:
    deadline = time.monotonic() + 120
    while len(run_dir.read_metrics()) < num_steps:
        assert time.monotonic() < deadline, "training did not get so far"
        time.sleep(0.05)


def test_ranks_stop_together_if_one_is_warned_and_if_their_torchrun_is_killed(data: Path, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    with start(data, run_dir.path) as process:
        wait_for_steps(run_dir, 3)
        assert status_of(run_dir, {}).state == "running"
        os.kill(ranks_of(process.pid)[1], signal.SIGUSR2)
        said, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    status, step = status_of(run_dir, {}), run_dir.latest_step()
    assert (status.state, status.step) == ("stopped", step)
    assert status.reason.startswith(f"stopped after step {step}, as ")
    assert step is not None
    assert 3 <= step < NUM_STEPS
    assert f"stopped after step {step}" in said
    assert "StoppedError" not in said  # torchrun adds a traceback of its own

    with start(data, run_dir.path) as process:
        wait_for_steps(run_dir, step + 2)
        assert not run_dir.ended.exists(), "the reason for an end is removed at the next start"
        ranks = ranks_of(process.pid)
        try:
            for rank in ranks:
                os.kill(rank, signal.SIGSTOP)  # so that they are there while they are looked at
            process.kill()
            process.wait()
            assert status_of(run_dir, {}).state == "running", "it runs as long as its ranks do"
            for rank in ranks:
                os.kill(rank, signal.SIGCONT)
            said, _ = process.communicate(timeout=120)  # until the last of them has closed its output
        finally:
            for pid in ranks:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert f"going on from step {step} of {NUM_STEPS}" in said
    last = run_dir.latest_step()
    assert last is not None
    assert step + 2 <= last < NUM_STEPS
    assert f"stopped after step {last}, because torchrun (process {process.pid}) has ended; start it again" in said
    assert [entry["step"] for entry in run_dir.read_metrics()] == list(range(1, last + 1)), "no step is lost"
    hold(run_dir).close()


def test_ctrl_c_stops_a_run_with_a_checkpoint(data: Path, tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches the process, its data workers and its watchdog, all at once."""
    run_dir = RunDir(tmp_path / "run")
    settings = [
        *(f"data.{name}_dir={data / name}" for name in ("train", "test")),
        *("data.num_workers=2", "data.placement=stream", "global_batch_size=16", "num_epochs=250"),
        *("checkpoint_every_steps=1000", "tracking.wandb=disabled"),
    ]
    command = [sys.executable, "launch/train.py", "--config", "debug:image", "--run-dir", str(run_dir.path)]
    command += [word for setting in settings for word in ("--set", setting)]
    process = PythonProcess(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        wait_for_steps(run_dir, 3)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=240)
    finally:
        kill_tree(process)
    step = run_dir.latest_step()
    assert step is not None, said
    assert 3 <= step < 1_000
    assert process.returncode == 1
    assert f"stopped after step {step}, as Ctrl-C asked" in said
    assert "Traceback" not in said
    status = status_of(run_dir, {})
    assert (status.state, status.step) == ("stopped", step)
