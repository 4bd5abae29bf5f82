"""The batch script's end, a rank's end and its time limit on one machine; tests/slurm has the rest of `launch.job`."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import submitit
from submitit.core.utils import pickle_load
from submitit.helpers import DelayedSubmission
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE, Controller

import launch.job
from data_pipeline.core.errors import UserError
from launch.job import AFTER_SRUN, EARLY_SECONDS, MAX_TIMEOUTS_HERE, TrainJob
from launch.outcome import outcome_path, read_outcome, write_outcome
from launch.submission import WARNING_SECONDS
from trainer.fault_tolerance.preemption import WARNINGS

ROOT = Path(__file__).parents[2]
TIME_LIMIT_SECONDS = 600


@pytest.mark.parametrize(
    ("array", "name"),
    [({}, "12"), ({"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}, "12_3")],
)
def test_the_batch_script_speaks_of_one_member_of_an_array(array: dict[str, str], name: str, tmp_path: Path) -> None:
    """The last member of an array has the array's number as its own, and that number would start all members again."""
    programs = {
        "scontrol": f'echo "$@" >> {tmp_path}/asked; echo JobState=RUNNING',
        "srun": '[[ "$*" == *--nodelist=n0* ]]',
    }
    for program, body in programs.items():
        (tmp_path / program).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / program).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2"}
    script = "\n".join(["(exit 7)", *AFTER_SRUN])
    done = subprocess.run(["bash", "-c", script], env=environ | {"SLURMD_NODENAME": "n0"} | array)
    assert done.returncode == 7
    shown = f"show job {name}"
    assert (tmp_path / "asked").read_text().splitlines() == [shown, shown, f"requeue {name}"]


RANK = """
import ctypes, multiprocessing, signal, sys, tempfile, time, weakref
from multiprocessing.util import Finalize
from pathlib import Path
import launch.job

def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(multiprocessing.current_process().pid, flush=True)
    time.sleep(600)

class Held:
    pass

def take_lock_twice():
    libc, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(lock), libc.pthread_mutex_lock(lock)  # for ever, with the interpreter's lock held

kind, spool = sys.argv[1], Path(sys.argv[2])
held = Held()
weakref.finalize(held, spool.with_name("finalized").touch)
temporary = tempfile.TemporaryDirectory(dir=spool.parent)
Finalize(None, spool.unlink, exitpriority=-10)
if kind == "stuck":
    launch.job.TIDY_SECONDS = 1.0
    Finalize(None, take_lock_twice, exitpriority=0)
ending = launch.job.Ending()
ending.status = 7
worker = multiprocessing.get_context("fork").Process(target=deaf, daemon=True)
worker.start()
time.sleep(0.5)
if kind == "leaves":
    ending.leave()
"""


@pytest.mark.process
@pytest.mark.parametrize("kind", ["ends", "leaves", "stuck"])
def test_a_rank_leaves_no_temporary_files_no_worker_and_always_ends(kind: str, tmp_path: Path) -> None:
    """For example the spool of a remote dataset, and the workers of a DataLoader that an exception still holds."""
    spool = tmp_path / "spool"
    spool.touch()
    command = [sys.executable, "-c", RANK, kind, str(spool)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if kind == "stuck":
        assert done.returncode == 1, done.stderr
        assert "take_lock_twice" in done.stderr
    else:
        assert done.returncode == 7, done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["finalized"]
    deadline = time.monotonic() + 10
    (worker,) = done.stdout.split()
    while Path("/proc", worker, "cmdline").exists() and Path("/proc", worker, "cmdline").read_bytes():
        assert time.monotonic() < deadline, "a worker lives on"
        time.sleep(0.1)


@pytest.fixture
def local_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainJob:
    """Return a job of submitit's local executor, whose rank is this process."""
    for name, value in {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_FOLDER": str(tmp_path),
        "SUBMITIT_LOCAL_JOB_ID": "12",
        "SUBMITIT_LOCAL_TIMEOUT_S": str(TIME_LIMIT_SECONDS),
        "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(WARNING_SECONDS),
    }.items():
        monkeypatch.setenv(name, value)
    job = TrainJob(run_dir=tmp_path, command="", local_port=1)
    delayed = DelayedSubmission(job)
    delayed.set_timeout(TIME_LIMIT_SECONDS // 60, MAX_TIMEOUTS_HERE)
    delayed.dump(tmp_path / "12_submitted.pkl")
    return job


def test_on_one_machine_the_time_limit_counts_from_before_the_imports(
    local_job: TrainJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning comes after `at_warning` seconds of the clock that starts in `__call__`, and some more."""
    at_warning = TIME_LIMIT_SECONDS - WARNING_SECONDS
    job = submitit.JobEnvironment()
    early = local_job._start_again(job, seconds=at_warning - EARLY_SECONDS - 1.0, stopped="stopped")
    assert early == "on one machine only the time limit starts it again by itself"
    for left in reversed(range(MAX_TIMEOUTS_HERE)):
        with pytest.raises(SystemExit) as end:
            local_job._start_again(job, seconds=at_warning - 20.0, stopped="stopped")
        assert end.value.code == LOCAL_REQUEUE_RETURN_CODE
        assert f"started again ({left} time limits more at most)" in capsys.readouterr().out
        assert pickle_load(tmp_path / "12_submitted.pkl")._timeout_countdown == left
    assert "as often as it may" in local_job._start_again(job, seconds=float(at_warning), stopped="stopped")


def test_on_one_machine_no_more_starts_are_announced_than_submitit_makes() -> None:
    assert inspect.signature(Controller.run).parameters["max_retry"].default == 1 + MAX_TIMEOUTS_HERE


def test_a_start_takes_away_the_outcome_of_the_start_before_and_leaves_its_own(
    local_job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this start is cancelled, the earlier outcome would be taken for its reason."""
    own, other = (outcome_path(tmp_path, job_id="12", rank=rank) for rank in (0, 1))
    for path in (own, other):
        write_outcome(path, "failed", "RuntimeError: Connection closed by peer")
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(launch.job, "read_run_config", lambda _, **__: None)
    monkeypatch.setattr(launch.job, "Ending", lambda: SimpleNamespace(status=1))  # this process must not end
    monkeypatch.setattr(os, "environ", os.environ.copy())
    before = {number: signal.getsignal(number) for number in WARNINGS}
    seen: list[bool] = []

    def fail(*_: object, **__: object) -> None:
        seen.append(own.exists())
        raise UserError("the loss was not finite\nin 10 steps in a row")

    try:
        monkeypatch.setattr(launch.job, "run", lambda *_, **__: seen.append(own.exists()))
        local_job()
        finished = read_outcome(own, inside=tmp_path)
        monkeypatch.setattr(launch.job, "run", fail)
        with pytest.raises(UserError):
            local_job()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen == [False, False]
    assert finished is not None
    assert (finished.ended, finished.reason) == ("finished", "")
    failed = read_outcome(own, inside=tmp_path)
    assert failed is not None
    assert (failed.ended, failed.reason) == ("failed", "in 10 steps in a row")
    assert other.exists(), "another rank's own"
    assert not list(tmp_path.glob("*_result.pkl")), "submitit's own is all that is pickled"
