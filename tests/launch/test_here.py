"""Runs on this machine are forked from one process, and train as under every other launcher."""

from __future__ import annotations

import contextlib
import json
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
from launch.states import run_status
from tests.commands import float64_recipe
from tests.nursery import PythonProcess, run_python
from tests.processes import kill_tree
from tests.slow_steps import SLOW_STEPS, pausing
from tests.tiny_data import write_tiny_pair
from trainer.run_dir import RunDir, is_held

ROOT = Path(__file__).parents[2]
NAMES = [f"debug-image-seed{seed}" for seed in range(3)]
ENVIRON = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
LONG = ["num_epochs=1000", "checkpoint_every_steps=10000"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=64, num_test=20)


def recipe(data: Path, *more: str) -> list[str]:
    """Return the arguments of a small recipe, with further settings."""
    settings = [f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}", "data.num_workers=0"]
    settings += ["num_epochs=2", "tracking.wandb=disabled", "log_every_steps=1", *more]
    once = {setting.partition("=")[0]: setting for setting in settings}  # the last of each name
    return ["--config", "debug:image", *(word for one in once.values() for word in ("--set", one))]


def study(data: Path, home: Path, *more: str) -> list[str]:
    words = [sys.executable, "launch/slurm.py", *recipe(data, *more), "--sweep", "seed=0,1,2"]
    return [*words, "--executor", "local", "--at-a-time", "2", "--study-dir", str(home)]


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
def long_study(data: Path, home: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Start a study on this machine that would take long, in a session of its own."""
    pipe = subprocess.PIPE
    process = PythonProcess(
        [*study(data, home, *LONG), *SLOW_STEPS, *flags],
        cwd=ROOT,
        env=pausing(0.1, ENVIRON),
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill_tree(process)


@pytest.mark.process
def test_forked_runs_have_the_bits_of_a_new_process_and_are_not_run_twice(data: Path, tmp_path: Path) -> None:
    done = run_python(study(data, tmp_path / "forked"), cwd=ROOT, env=ENVIRON)
    assert done.returncode == 0, done.stdout + done.stderr
    again = run_python(study(data, tmp_path / "forked"), cwd=ROOT, env=ENVIRON)
    assert again.stdout.splitlines()[:-1] == [f"{name} is finished already" for name in NAMES]
    forked, alone = (RunDir(tmp_path / way / NAMES[0]) for way in ("forked", "alone"))
    words = [sys.executable, "launch/train.py", *recipe(data, "seed=0"), "--run-dir", str(alone.path)]
    new = subprocess.run(words, cwd=ROOT, env=ENVIRON, capture_output=True, text=True)
    assert new.returncode == 0, new.stderr
    step = forked.latest_step()
    assert step == alone.latest_step() == 4
    weights = [(run.checkpoint(step) / "encoder.safetensors").read_bytes() for run in (forked, alone)]
    assert weights[0] == weights[1]
    losses = [[line["train/loss"] for line in run.read_metrics()] for run in (forked, alone)]
    assert losses[0] == losses[1]
    assert "loss" in (tmp_path / "forked" / "logs" / f"{NAMES[0]}_0_log.out").read_text()
    (code,) = (tmp_path / "forked" / "code").iterdir()
    start = json.loads(forked.provenance.read_text())["starts"][0]
    assert start["snapshot_sha256"].startswith(code.name)


@pytest.mark.process
def test_every_launcher_gives_the_same_curve(tmp_path: Path) -> None:
    launchers = {
        "alone": ["-m", "launch.train"],
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "launch.train"],
        "here": ["-m", "launch.slurm", "--executor", "local", "--tasks-per-node", "2"],
    }
    words = float64_recipe(tmp_path)
    losses = {}
    for name, launcher in launchers.items():
        run_dir = RunDir(tmp_path / name)
        command = [sys.executable, *launcher, *words, "--run-dir", str(run_dir.path)]
        done = run_python(command, cwd=ROOT, env=ENVIRON)
        assert done.returncode == 0, done.stderr
        assert run_dir.read_provenance()["starts"][0]["world_size"] == (1 if name == "alone" else 2)
        losses[name] = [line["train/loss"] for line in run_dir.read_metrics()]
    assert len(losses["alone"]) == 8
    assert losses["torchrun"] == pytest.approx(losses["alone"], rel=1e-9)
    assert losses["here"] == pytest.approx(losses["alone"], rel=1e-9)
    log = (tmp_path / "here" / "logs" / "here_0_log.out").read_text()
    assert "rank 1 (launcher: torchrun): cpu of " in log


@pytest.mark.process
def test_a_status_shows_the_error_of_rank_1_and_not_that_of_rank_0_which_lost_it(data: Path, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "launch/train.py"]
    command = [sys.executable, *torchrun, *recipe(data), "--code", "failing_views", "--set", "views.kind=failing"]
    command += ["--run-dir", str(tmp_path / "run")]
    environ = pausing(0, ENVIRON)
    done = run_python(command, cwd=ROOT, env=environ | {"FAILING_RANK": "1"})
    assert done.returncode == 1
    status = run_status(RunDir(tmp_path / "run"), {})
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
def test_ctrl_c_saves_the_runs_of_several_ranks_and_starts_no_more(data: Path, tmp_path: Path) -> None:
    first, second, third = (RunDir(tmp_path / "study" / name) for name in NAMES)
    with long_study(data, tmp_path / "study", "--tasks-per-node", "2") as process:
        wait_until(lambda: trains(first) and trains(second))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130, stderr
    wait_until(lambda: not is_held(first) and not is_held(second))
    for run_dir in (first, second):
        state = run_status(run_dir, {})
        assert (state.state, "as Ctrl-C asked" in state.reason) == ("stopped", True)
        assert (run_dir.latest_step() or 0) > 0
    assert not third.metrics.exists()


@pytest.mark.process
def test_a_killed_run_does_no_harm_to_the_others_and_sigterm_saves_them(data: Path, tmp_path: Path) -> None:
    first, second, third = (RunDir(tmp_path / "study" / name) for name in NAMES)
    with long_study(data, tmp_path / "study") as process:
        wait_until(lambda: trains(first) and trains(second))
        os.kill(process_of(first), signal.SIGKILL)
        wait_until(lambda: trains(third))
        assert is_held(second)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "3 of 3 run(s) did not finish" in stderr
    assert f"{NAMES[0]}: killed" in stdout
    assert stdout.count("as SIGTERM asked") == 2
    assert all((run_dir.latest_step() or 0) > 0 for run_dir in (second, third))
