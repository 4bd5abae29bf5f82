"""The runs of a study on this machine are forked from one process, and are otherwise runs of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import submitit.local.local

import launch.slurm
import launch.train
from launch.job import MAX_TIMEOUTS_HERE
from launch.outcome import RankOutcome, read_outcome
from launch.submitted import is_job_here, last_submission
from tests.commands import Done, call
from tests.nursery import PythonProcess, run_python
from tests.processes import kill_tree
from tests.slow_steps import SLOW_STEPS, pausing
from tests.tiny_data import write_tiny_pair
from trainer.run_dir import RunDir

ROOT = Path(__file__).parents[2]
NAMES = [f"debug-image-seed{seed}" for seed in range(3)]
TWO_AT_A_TIME = ["--sweep", "seed=0,1,2", "--executor", "local", "--at-a-time", "2", "--study-dir"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=64, num_test=20)


def recipe(data: Path, *more: str) -> list[str]:
    """Return the arguments of a small recipe, with further settings."""
    settings = [f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}", "data.num_workers=0"]
    settings += ["num_epochs=2", "tracking.wandb=disabled", "log_every_steps=1", *more]
    return ["--config", "debug:image", *(word for one in settings for word in ("--set", one))]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the `main` of a command in this process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return partial(call, monkeypatch=monkeypatch, capsys=capsys)


def outcome(run_dir: RunDir) -> RankOutcome:
    submission = last_submission(run_dir)
    assert submission is not None
    home = run_dir.path.parent
    found = read_outcome(home / "logs" / f"{submission.job_id}_0_outcome.json", inside=home)
    assert found is not None
    return found


@contextlib.contextmanager
def study_here(data: Path, home: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a study on this machine that would take long, in a session of its own."""
    long = ["num_epochs=1000", "checkpoint_every_steps=10000"]
    words = [sys.executable, "launch/slurm.py", *recipe(data, *long), *SLOW_STEPS, *TWO_AT_A_TIME, str(home)]
    environ = pausing(0.1, os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    pipe = subprocess.PIPE
    process = PythonProcess(words, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        yield process
    finally:
        kill_tree(process)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def new_interpreter(words: list[str], *, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True)


def job_of(run_dir: RunDir) -> int:
    submission = last_submission(run_dir)
    assert submission is not None
    return int(submission.job_id)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def trains(run_dir: RunDir) -> bool:
    return len(run_dir.read_metrics()) > 1


@pytest.mark.process
def test_forked_runs_have_the_bits_of_new_processes_and_logs_of_their_own_and_are_not_run_twice(
    command: Callable[..., Done], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitit.local.local, "start_controller", lambda **_: pytest.fail("a new process"))
    done = command(launch.slurm.main, *recipe(data), *TWO_AT_A_TIME, tmp_path / "forked")
    assert done.status == 0, done.stdout + done.stderr
    again = command(launch.slurm.main, *recipe(data), *TWO_AT_A_TIME, tmp_path / "forked")
    assert sorted(again.stdout.splitlines()[:-1]) == [f"{name} is finished already" for name in NAMES]
    monkeypatch.undo()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for seed, name in enumerate(NAMES):
        forked, alone = (RunDir(tmp_path / way / name) for way in ("forked", "alone"))
        words = [*recipe(data, f"seed={seed}"), "--run-dir", str(alone.path)]
        start = new_interpreter if seed == 0 else run_python
        new = start([sys.executable, "launch/train.py", *words], cwd=ROOT)
        assert new.returncode == 0, new.stderr
        step = forked.latest_step()
        assert step == alone.latest_step() == 4
        weights = [(run.checkpoint(step) / "encoder.safetensors").read_bytes() for run in (forked, alone)]
        assert weights[0] == weights[1]
        losses = [[line["train/loss"] for line in run.read_metrics()] for run in (forked, alone)]
        assert losses[0] == losses[1]
        assert outcome(forked).ended == "finished"
        log = (tmp_path / "forked" / "logs" / f"{job_of(forked)}_0_log.out").read_text()
        assert log.count("Starting with JobEnvironment") == 1
        start = json.loads(forked.provenance.read_text())["starts"][0]
        assert start["snapshot_sha256"] is not None


@pytest.mark.process
def test_ctrl_c_in_a_terminal_saves_each_run(data: Path, tmp_path: Path) -> None:
    run_dirs = [RunDir(tmp_path / "study" / name) for name in NAMES[:2]]
    with study_here(data, tmp_path / "study") as process:
        wait_until(lambda: all(map(trains, run_dirs)))
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "interrupted" in stderr
    wait_until(lambda: not any(is_job_here(str(job_of(run_dir))) for run_dir in run_dirs))
    for run_dir in run_dirs:
        assert "as Ctrl-C asked" in outcome(run_dir).reason
        assert (run_dir.latest_step() or 0) > 0


@pytest.mark.process
def test_a_killed_run_and_a_killed_preloaded_process_do_no_harm_to_the_others(data: Path, tmp_path: Path) -> None:
    first, second, third = (RunDir(tmp_path / "study" / name) for name in NAMES)
    with study_here(data, tmp_path / "study") as process:
        wait_until(lambda: trains(first) and trains(second))
        (preloaded,) = [pid for pid in children(process.pid) if is_job_here(str(pid))]
        os.kill(preloaded, signal.SIGKILL)
        (rank,) = children(job_of(first))
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: trains(third))  # started by submitit
        assert is_job_here(str(job_of(second)))
        os.kill(job_of(second), signal.SIGTERM)
        wait_until(lambda: not is_job_here(str(job_of(second))))
        assert "as SIGTERM asked" in outcome(second).reason
        os.kill(job_of(third), signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "3 of 3 run(s) did not finish" in stderr
    assert f"{NAMES[0]}: failed" in stdout
    assert stdout.count("as SIGTERM asked") == 2


REACHES_ITS_TIME_LIMIT = """
import os, sys
from pathlib import Path
from launch.preloaded import _control
folder = Path(sys.argv[1])
submitted = folder / f"{os.getpid()}_submitted.pkl"
submitted.touch()
_control(folder)
with (folder / "starts").open("a") as file:
    file.write(f"{os.getppid()}\\n")
sys.exit(144)
"""


@pytest.mark.process
def test_a_time_limit_starts_a_forked_run_again_as_often_as_submitit_does(tmp_path: Path) -> None:
    environ = os.environ | {
        "SUBMITIT_LOCAL_NTASKS": "1",
        "SUBMITIT_LOCAL_COMMAND": "",
        "SUBMITIT_LOCAL_TIMEOUT_S": "60",
        "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "1",
        "SUBMITIT_LOCAL_WITH_SHELL": "",
        "SUBMITIT_STDERR_TO_STDOUT": "1",
    }
    done = run_python([sys.executable, "-c", REACHES_ITS_TIME_LIMIT, tmp_path], cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stderr
    starts = (tmp_path / "starts").read_text().splitlines()
    assert len(starts) == 1 + MAX_TIMEOUTS_HERE
    assert len(set(starts)) == 1
