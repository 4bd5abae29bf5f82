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
import torch

import launch.slurm
from launch.ports import free_ports
from launch.slurm_command import plan_from, request_from
from launch.submitted import is_job_here, run_status
from tests.commands import Done, call, float64_recipe
from tests.nursery import PythonProcess, run_python
from tests.processes import kill_tree
from tests.slow_steps import SLOW_STEPS, pausing
from trainer.run_dir import RunDir

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

    (job_id,) = re.findall(r"^job (\d+): 2 rank\(s\) on this machine$", local.stdout, re.MULTILINE)
    assert re.search(r"^1 +0 +\S+ +1 +cpu +\d+$", local.stdout, re.MULTILINE), "rank 1 is not in the rank table"
    assert (tmp_path / "local" / "logs" / f"{job_id}_1_log.out").is_file()


@pytest.mark.process
def test_a_failing_rank_is_named_with_status_1(
    slurm_py: Callable[..., Done], recipe: list[str], tmp_path: Path
) -> None:
    diverges = ["--set", "optimizer.learning_rate=1e30", "--set", "max_skipped_in_a_row=2"]
    done = slurm_py("--executor", "local", "--wait", *recipe, *diverges, "--run-dir", tmp_path / "run")
    assert done.status == 1, done.stdout + done.stderr
    assert re.search(r"^error: rank 0 of job \d+ failed: .*UserError: \S", done.stderr, re.MULTILINE)
    assert "in a row" in done.stderr


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
        assert re.search(r"^error: rank 1 of job \d+ failed: KeyError: ", done.stderr, re.MULTILINE)
        return
    done = run_python(command, cwd=ROOT, env=environ | {"FAILING_RANK": ""})
    assert done.returncode == 0, done.stderr
    assert RunDir(tmp_path / "run").ends() == {}, "they are removed at the next start"


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


@pytest.mark.parametrize(("gpus", "said"), [("2", "trains on GPU 4, GPU-1a of this machine"), ("0", None)])
def test_a_submission_says_which_gpus_of_this_machine_it_takes(
    gpus: str,
    said: str | None,
    slurm_py: Callable[..., Done],
    recipe: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another submission at the same time would take the same ones."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-1a,7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr("launch.slurm_command._submit_one", lambda plan, then_wait: None)
    done = slurm_py("--executor", "local", "--gpus-per-node", gpus, *recipe, "--run-dir", tmp_path / "run")
    assert done.status == 0, done.stderr
    assert said is None or said in done.stdout
    assert ("trains on GPU" in done.stdout) == (said is not None)


@pytest.mark.process
def test_ctrl_c_in_a_terminal_saves_a_run_of_two_ranks(recipe: list[str], tmp_path: Path) -> None:
    """It reaches the launcher, the controller of submitit and the ranks."""
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
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        kill_tree(process)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    while is_job_here(str(json.loads((run_dir.path / "job.json").read_text())["job_id"])):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    status = run_status(run_dir, {})
    assert (status.state, "as Ctrl-C asked" in status.reason) == ("stopped", True)
    assert (run_dir.latest_step() or 0) > 1


@pytest.mark.process
def test_a_study_runs_here_and_is_not_run_twice(
    slurm_py: Callable[..., Done], recipe: list[str], tmp_path: Path
) -> None:
    settings = recipe[recipe.index("--set") :]
    flags = ["--executor", "local", "--study", "studies:debug_seeds", *settings]
    flags += ["--set", "num_epochs=1", "--at-a-time", "2", "--study-dir", str(tmp_path / "study")]
    first = slurm_py(*flags)
    assert first.status == 0, first.stdout + first.stderr
    names = sorted(path.name for path in (tmp_path / "study").iterdir() if RunDir(path).config.is_file())
    assert len(names) == 4
    for name in names:
        assert f"\n{name}: finished\n" in first.stdout
        assert len(losses(tmp_path / "study" / name)) == 4
    assert len(list((tmp_path / "study" / "code").iterdir())) == 1, "all by the same code"
    again = slurm_py(*flags)
    assert [f"{name} is finished already" for name in names] == sorted(again.stdout.splitlines()[:-1])
