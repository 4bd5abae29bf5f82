"""Runs on this machine are forked from one process, and train as under every other launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import launch.slurm
from launch.slurm_command import plan_from
from launch.states import status_of
from tests.commands import float64_recipe
from tests.nursery import PythonProcess, run_python
from tests.processes import kill_tree
from tests.slow_steps import SLOW_STEPS, pausing
from tests.tiny_data import on_data, write_tiny_pair
from trainer.run_dir import RunDir, is_held

ROOT = Path(__file__).parents[2]
NAMES = [f"debug-image-seed{seed}" for seed in range(4)]
ENVIRON = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=64, num_test=20)


def recipe(data: Path, *more: str) -> list[str]:
    """Return the arguments of a small recipe, with further settings."""
    settings = on_data(data, "num_epochs=2", "log_every_steps=1", *more)
    once = {setting.partition("=")[0]: setting for setting in settings}  # the last of each name
    return ["--config", "debug:image", *(word for one in once.values() for word in ("--set", one))]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def trains(run_dir: RunDir) -> bool:
    return len(run_dir.read_metrics()) > 1


def process_of(run_dir: RunDir) -> int:
    """Return the process that trains a run, from its lock."""
    return int((run_dir.path / ".lock").read_text().split()[1])


@contextlib.contextmanager
def started(words: list[str], *, pause: float) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a session of its own, with slow steps; it ends with the block at the latest."""
    command, environ, pipe = [sys.executable, *words], pausing(pause, ENVIRON), subprocess.PIPE
    process = PythonProcess(command, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        yield process
    finally:
        kill_tree(process)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return float64_recipe(tmp_path_factory.mktemp("float64"))


@pytest.fixture(scope="module")
def alone(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Return the run of one process; tests/slurm shows that a new interpreter and a fork have the same bits."""
    run_dir = RunDir(tmp_path_factory.mktemp("runs") / "alone")
    command = [sys.executable, "launch/train.py", *words, "--run-dir", str(run_dir.path)]
    done = run_python(command, cwd=ROOT, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    assert len(losses(run_dir)) == 8
    return run_dir


def losses(run_dir: RunDir) -> list[float]:
    return [line["train/loss"] for line in run_dir.read_metrics()]


@pytest.mark.process
def test_torchrun_gives_the_same_curve(words: list[str], alone: RunDir, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "launch.train"]
    done = run_python([sys.executable, *torchrun, *words, "--run-dir", str(tmp_path)], cwd=ROOT, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    assert RunDir(tmp_path).read_provenance()["starts"][0]["world_size"] == 2
    assert losses(RunDir(tmp_path)) == pytest.approx(losses(alone), rel=1e-9)


@pytest.mark.process
def test_ranks_of_this_machine_give_the_same_curve_until_ctrl_c(
    words: list[str], alone: RunDir, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "here")
    here = ["launch/slurm.py", "--executor", "local", "--tasks-per-node", "2", *words, *SLOW_STEPS]
    with started([*here, "--run-dir", str(run_dir.path)], pause=0.4) as process:
        wait_until(lambda: trains(run_dir))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130, stderr
    wait_until(lambda: not is_held(run_dir))
    state = status_of(run_dir, {})
    assert (state.state, "as Ctrl-C asked" in state.reason) == ("stopped", True)
    assert run_dir.latest_step() == len(losses(run_dir)) > 1
    assert losses(run_dir) == pytest.approx(losses(alone)[: len(losses(run_dir))], rel=1e-9)
    assert "rank 1 (launcher: torchrun): cpu of " in (run_dir.path / "logs" / "here_0_log.out").read_text()


@pytest.mark.process
def test_a_status_shows_the_error_of_rank_1_and_not_that_of_rank_0_which_lost_it(data: Path, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "launch/train.py"]
    command = [sys.executable, *torchrun, *recipe(data), "--code", "failing_views", "--set", "views.kind=failing"]
    command += ["--run-dir", str(tmp_path / "run")]
    environ = pausing(0, ENVIRON)
    done = run_python(command, cwd=ROOT, env=environ | {"FAILING_RANK": "1"})
    assert done.returncode == 1
    status = status_of(RunDir(tmp_path / "run"), {})
    assert (status.state, status.reason) == ("failed", "rank 1: KeyError: 'a label that only rank 1 has'")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], 12),
        (["--tasks-per-node", "2", "--cpus-per-task", "3"], 3),
        (["--sweep", "seed=0,1,2,3", "--at-a-time", "2", "--tasks-per-node", "2"], 3),
        (["--sweep", "seed=0,1,2,3", "--at-a-time", "4", "--tasks-per-node", "4"], 1),
    ],
)
def test_ranks_of_this_machine_share_its_cores(
    flags: list[str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.chdir(tmp_path)
    arguments = launch.slurm._parser().parse_args(["--config", "debug:image", "--executor", "local", *flags])
    assert plan_from(arguments).resources.cpus_per_task == expected


@pytest.mark.process
def test_forked_runs_have_the_bits_of_one_alone_and_go_on_without_one_that_is_killed(
    words: list[str], alone: RunDir, tmp_path: Path
) -> None:
    """SIGTERM then saves those that train, and the last one does not start."""
    first, second, third, fourth = (RunDir(tmp_path / name) for name in NAMES)
    study = ["launch/slurm.py", *words, "--set", "num_epochs=1000", *SLOW_STEPS, "--sweep", "seed=0,1,2,3"]
    study += ["--executor", "local", "--at-a-time", "2", "--study-dir", str(tmp_path)]
    with started(study, pause=0.2) as process:
        wait_until(lambda: trains(first) and trains(second))
        os.kill(process_of(first), signal.SIGKILL)
        wait_until(lambda: trains(third))
        assert is_held(second)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "3 of 4 run(s) did not finish" in stderr
    assert f"{NAMES[0]}: killed" in stdout
    assert stdout.count("as SIGTERM asked") == 2
    assert all((run_dir.latest_step() or 0) > 0 for run_dir in (second, third))
    assert not fourth.metrics.exists()
    assert losses(first)[:8] == losses(alone)[: len(losses(first))]
    assert "as SIGTERM asked" in (tmp_path / "logs" / f"{NAMES[1]}_0_log.out").read_text()
    (code,) = (tmp_path / "code").iterdir()
    assert first.read_provenance()["starts"][0]["snapshot_sha256"].startswith(code.name)
