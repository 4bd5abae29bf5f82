"""The end of a job after its ranks have stopped, with a scontrol that is a script. The drill has a real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from submitit.core.utils import pickle_load
from submitit.helpers import DelayedSubmission

import launch.job
from launch.job import AFTER_SRUN, TrainJob
from launch.outcome import outcome_path, read_outcome
from tests.nursery import PythonProcess
from tests.slow_steps import SLOW_STEPS, pausing
from tests.tiny_data import write_tiny_pair
from trainer.fault_tolerance.preemption import WARNINGS, StoppedError
from trainer.run_dir import RunDir

ROOT = Path(__file__).parents[2]
RUNNING = "JobState=RUNNING Reason=None RunTime=00:10:00 TimeLimit=04:00:00"
AT_ITS_LIMIT = "JobState=RUNNING Reason=None RunTime=03:58:01 TimeLimit=04:00:00"
CANCELLED = "JobState=COMPLETING Reason=None RunTime=00:10:00 TimeLimit=04:00:00"


class Ending:
    """A stand-in that does not end this process."""

    status = 1

    def leave(self) -> None:
        raise SystemExit(self.status)


class StoppedJob:
    """A `TrainJob` on rank `rank` of a Slurm job, just after it has stopped; scontrol shows the job as `shown`."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, *, shown: str, rank: int, timeouts: int) -> None:
        self._path = path
        bin_dir = path / "bin"
        bin_dir.mkdir()
        scontrol = bin_dir / "scontrol"
        scontrol.write_text(
            f'#!/bin/bash\nif [[ $1 == show ]]; then echo "{shown}"; else echo "$@" >> {path}/asked; fi'
        )
        scontrol.chmod(0o755)
        for name, value in {
            "PATH": f"{bin_dir}:/usr/bin:/bin",
            "SUBMITIT_EXECUTOR": "slurm",
            "SUBMITIT_FOLDER": str(path),
            "SLURM_JOB_ID": "12",
            "SLURM_PROCID": str(rank),
        }.items():
            monkeypatch.setenv(name, value)
        (path / "config.json").touch()
        monkeypatch.setattr(launch.job, "read_run_config", lambda _, **__: None)
        monkeypatch.setattr(launch.job, "run", self._run)
        monkeypatch.setattr(launch.job, "Ending", Ending)
        self._rank = rank
        self._job = TrainJob(run_dir=path, command="", local_port=1)
        delayed = DelayedSubmission(self._job)
        delayed.set_timeout(240, timeouts)
        delayed.dump(path / "12_submitted.pkl")

    def _run(self, *_: object, **__: object) -> None:
        error = StoppedError(7, "as SIGUSR2 asked")
        error.is_first_rank = self._rank == 0
        raise error

    def __call__(self) -> int:
        """Return its exit status."""
        before = {number: signal.getsignal(number) for number in WARNINGS}
        try:
            with pytest.raises(SystemExit) as end:
                self._job()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        assert isinstance(end.value.code, int)
        return end.value.code

    @property
    def asked(self) -> list[str]:
        path = self._path / "asked"
        return path.read_text().splitlines() if path.is_file() else []

    @property
    def timeouts(self) -> int:
        count: int = pickle_load(self._path / "12_submitted.pkl")._timeout_countdown
        return count


@pytest.mark.parametrize(
    ("shown", "rank", "asked", "timeouts"),
    [
        (RUNNING, 0, ["requeue 12"], 3),
        (AT_ITS_LIMIT, 0, ["requeue 12"], 2),
        (RUNNING.replace("04:00:00", "UNLIMITED"), 0, ["requeue 12"], 3),
        (RUNNING, 1, [], 3),
        (CANCELLED, 0, [], 3),
    ],
)
def test_the_first_rank_asks_once_while_the_job_runs(
    shown: str,
    rank: int,
    asked: list[str],
    timeouts: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = StoppedJob(tmp_path, monkeypatch, shown=shown, rank=rank, timeouts=3)
    assert job() == 0, "an error would end the others"
    assert job.asked == asked
    assert job.timeouts == timeouts, "only time limits count"
    assert not list(tmp_path.glob("*outcome*")), "it has not ended"
    will_start = "it goes on from there when the job starts again" in capsys.readouterr().out
    assert will_start == bool(asked), "a job that is cancelled does not start again"


def test_the_last_time_limit_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = StoppedJob(tmp_path, monkeypatch, shown=AT_ITS_LIMIT, rank=0, timeouts=0)
    assert job() == 1
    assert job.asked == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stopped after step 7, as SIGUSR2 asked; start it again and it goes on from there; ")
    assert line.endswith("has reached its time limit as often as it may, so it is not started again by itself")
    assert outcome_of(tmp_path) == ("stopped", line)


def test_a_controller_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = StoppedJob(tmp_path, monkeypatch, shown=RUNNING, rank=0, timeouts=3)
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/bash\nexit 1")
    assert job() == 1
    ended, reason = outcome_of(tmp_path)
    assert ended == "stopped"
    assert "Slurm could not be asked" in reason


def outcome_of(logs: Path) -> tuple[str, str]:
    outcome = read_outcome(outcome_path(logs, job_id="12", rank=0), inside=logs)
    assert outcome is not None
    return outcome.ended, outcome.reason


@pytest.mark.parametrize(
    ("status", "silent", "state", "asked"),
    [
        (1, "n1", "RUNNING", True),
        (0, "n1", "RUNNING", False),
        (1, "none", "RUNNING", False),  # an error of the program, on healthy nodes
        (1, "all", "RUNNING", False),  # if Slurm starts nothing at all, that says nothing about the nodes
        (1, "n1", "COMPLETING", False),
    ],
)
def test_the_end_of_the_batch_script_asks_only_for_a_dead_node(
    status: int, silent: str, state: str, asked: bool, tmp_path: Path
) -> None:
    programs = {
        "scontrol": f'if [[ $1 == show ]]; then echo "JobState={state} Reason=None"; else touch {tmp_path}/asked; fi',
        "srun": f'case {silent} in all) exit 1;; none) exit 0;; *) [[ "$*" == *--nodelist=n0* ]];; esac',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = "\n".join([f"(exit {status})", *AFTER_SRUN])
    slurm = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n0"}
    done = subprocess.run(["bash", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"} | slurm)
    assert done.returncode == status
    assert (tmp_path / "asked").exists() is asked


def test_a_warning_during_the_imports_waits() -> None:
    listener = "import os, signal; print('up', flush=True); input(); signal.signal(signal.SIGUSR2, lambda *_: None); "
    listener += "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2]); print('listens')"
    command = [sys.executable, "launch/block_signals.py", sys.executable, "-c", listener]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGUSR2)
    said, _ = process.communicate("\n", timeout=30)
    assert (process.returncode, said) == (0, "listens\n")


def test_on_one_machine_a_warning_stops_with_a_checkpoint(tmp_path: Path) -> None:
    """One of two ranks is warned. Only the user can start the run again, and is told so."""
    data = write_tiny_pair(tmp_path / "data", num_train=64, num_test=20)
    run_dir = RunDir(tmp_path / "run")
    settings = [f"data.train_dir={data / 'train'}", f"data.test_dir={data / 'test'}", "data.num_workers=0"]
    settings += ["global_batch_size=16", "num_epochs=1000", "tracking.wandb=disabled"]
    command = [sys.executable, "launch/slurm.py", "--executor", "local", "--tasks-per-node", "2", "--wait"]
    command += ["--config", "debug:image", "--run-dir", str(run_dir.path)]
    command += [*SLOW_STEPS, *(word for setting in settings for word in ("--set", setting))]
    environ = pausing(0.1, os.environ | {"OMP_NUM_THREADS": "1"})
    process = PythonProcess(command, cwd=ROOT, env=environ, text=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while len(run_dir.read_metrics()) < 3:
        assert time.monotonic() < deadline, "training did not begin"
        time.sleep(0.1)
    os.kill(local_rank(run_dir, 1), signal.SIGUSR2)
    _, said = process.communicate(timeout=120)
    step = run_dir.latest_step()
    assert step is not None
    assert process.returncode == 1
    assert f"failed: stopped after step {step}, as a signal to another rank asked; start it again" in said
    assert run_dir.checkpoint(step).is_dir()
    assert [entry["step"] for entry in run_dir.read_metrics()] == list(range(1, step + 1))


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
