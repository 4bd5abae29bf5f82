"""Two ranks of submitit's local executor train as one process does, and so do torchrun and the real Slurm."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import launch.slurm
from launch.ports import free_ports
from launch.slurm_command import plan_from, request_from
from launch.states import run_status
from tests.commands import Done, call, float64_recipe
from tests.nursery import PythonProcess, run_python
from tests.processes import kill_tree
from tests.slow_steps import SLOW_STEPS, pausing
from trainer.run_dir import RunDir, is_held

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return float64_recipe(tmp_path_factory.mktemp("data"))


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    return run_python(words, cwd=ROOT, env=environ)


@pytest.fixture
def slurm_py(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run `python launch/slurm.py ARGUMENTS` in this process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return partial(call, launch.slurm.main, monkeypatch=monkeypatch, capsys=capsys)


def losses(run_dir: Path) -> list[float]:
    return [line["train/loss"] for line in RunDir(run_dir).read_metrics()]


@pytest.mark.process
def test_every_launcher_gives_the_same_curve_and_a_port_that_is_taken_meanwhile_is_passed_over(
    slurm_py: Callable[..., Done], recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, command in {"alone": [sys.executable], "torchrun": torchrun}.items():
        process = run(*command, "launch/train.py", *recipe, "--run-dir", tmp_path / name)
        assert process.returncode == 0, f"{name}: {process.stdout}{process.stderr}"
    (port,) = free_ports(1)
    monkeypatch.setattr("launch.submission.free_ports", lambda count: [port] * count)
    with socket.create_server(("", port)):
        flags = ["--executor", "local", "--tasks-per-node", "2", "--wait"]
        local = slurm_py(*flags, *recipe, "--run-dir", tmp_path / "local")
    assert local.status == 0, local.stdout + local.stderr
    assert f"port {port} is in use on " in local.stdout

    alone = losses(tmp_path / "alone")
    assert len(alone) == 8
    for name in ("alone", "torchrun", "local"):
        assert losses(tmp_path / name) == pytest.approx(alone, rel=1e-9), name
        world_size = json.loads(RunDir(tmp_path / name).provenance.read_text())["world_size"]
        assert world_size == (1 if name == "alone" else 2)
        assert RunDir(tmp_path / name).latest_step() == 8

    assert re.search(r"^1 +0 +\S+ +1 +cpu +\d+$", local.stdout, re.MULTILINE), "rank 1 is not in the rank table"
    assert len(list((tmp_path / "local" / "logs").glob("*_1_log.out"))) == 1


@pytest.mark.process
@pytest.mark.parametrize("launcher", ["torchrun", "local"])
def test_a_status_shows_the_error_of_rank_1_and_not_that_of_rank_0_which_lost_it(
    launcher: str, recipe: list[str], tmp_path: Path
) -> None:
    words = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "launch/train.py"],
        "local": ["launch/slurm.py", "--executor", "local", "--tasks-per-node", "2", "--wait"],
    }[launcher]
    command = [sys.executable, *words, *recipe, "--code", "failing_views", "--set", "views.kind=failing"]
    command += ["--run-dir", str(tmp_path / "run")]
    environ = pausing(0, os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "FAILING_RANK": "1"})
    done = run_python(command, cwd=ROOT, env=environ)
    assert done.returncode == 1
    status = run_status(RunDir(tmp_path / "run"), {})
    assert (status.state, status.reason) == ("failed", "rank 1: KeyError: 'a label that only rank 1 has'")
    if launcher == "local":
        assert re.search(r"^error: run failed: rank 1: KeyError: ", done.stderr, re.MULTILINE)
        return
    done = run_python(command, cwd=ROOT, env=environ | {"FAILING_RANK": ""})
    assert done.returncode == 0, done.stderr
    assert not RunDir(tmp_path / "run").ended.exists(), "it is removed at the next start"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], 12),
        (["--tasks-per-node", "2"], 6),
        (["--tasks-per-node", "2", "--cpus-per-task", "3"], 3),
        (["--study", "--at-a-time", "2"], 6),
        (["--study"], 12),
        (["--study", "--at-a-time", "4", "--tasks-per-node", "4"], 1),
    ],
)
def test_ranks_of_this_machine_share_its_cores(
    flags: list[str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.chdir(tmp_path)
    what = ["--study", "studies:debug_seeds"] if "--study" in flags else ["--config", "debug:image"]
    words = [*what, "--executor", "local", *(flag for flag in flags if flag != "--study")]
    arguments = launch.slurm._parser().parse_args(words)
    assert plan_from(arguments, request_from(arguments)).resources.cpus_per_task == expected


@pytest.mark.process
@pytest.mark.parametrize(("number", "who", "status"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGUSR2, "rank", 1)])
def test_a_request_saves_a_run_of_two_ranks(
    number: signal.Signals, who: str, status: int, recipe: list[str], tmp_path: Path
) -> None:
    """Ctrl-C in a terminal reaches the launcher, the controller of submitit and the ranks; SIGUSR2 only rank 1."""
    words = [sys.executable, "launch/slurm.py", "--executor", "local", "--tasks-per-node", "2", "--wait", *recipe]
    words += ["--set", "num_epochs=10000", *SLOW_STEPS, "--run-dir", str(tmp_path / "run")]
    environ = pausing(0.1, os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    pipe = subprocess.PIPE
    process = PythonProcess(words, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    run_dir, deadline = RunDir(tmp_path / "run"), time.monotonic() + 120
    try:
        while len(run_dir.read_metrics()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            os.kill(local_rank(run_dir, 1), number)
        _, stderr = process.communicate(timeout=60)
        while is_held(run_dir) or not run_dir.ended.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        kill_tree(process)
    assert process.returncode == status
    assert "Traceback" not in stderr
    shown = run_status(run_dir, {})
    assert (shown.state, f"{who} asked" in shown.reason) == ("stopped", True)
    assert (run_dir.latest_step() or 0) > 1


def local_rank(run_dir: RunDir, number: int) -> int:
    """Return the process id of a rank that submitit's local executor has started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            environ = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            b"submitit.core._submit" in words
            and str(run_dir.path / "logs").encode() in words
            and f"SUBMITIT_LOCAL_GLOBALID={number}".encode() in environ
        ):
            return int(path.name)
    raise AssertionError(f"no rank {number}")
