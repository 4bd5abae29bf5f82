"""The end of the batch script, with fake programs of Slurm, and the end of a rank; the drill has the real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOB = ROOT / "launch" / "job.sh"


class Batch:
    """The end of a batch script, with a `srun` whose starts of the ranks do what `starts` says, one after another."""

    def __init__(self, path: Path, *, state: str = "RUNNING", dead_node: bool = False) -> None:
        self._bin, self.run_dir, self._asked = path / "bin", path / "run", path / "asked"
        self._dead_node, self._path = dead_node, path
        for directory in (self._bin, self.run_dir):
            directory.mkdir()
        asks_a_node = '[[ "$*" == *--nodelist=n0* ]]' if dead_node else "true"
        self._write(
            "scontrol", f'if [[ $1 == show ]]; then echo "JobState={state} "; else echo "$@" >> {self._asked}; fi'
        )
        self._write("srun", f'if [[ "$*" == *--overlap* ]]; then {asks_a_node}; else exec {path}/ranks; fi')

    def _write(self, name: str, body: str) -> None:
        (self._bin / name).write_text(f"#!/bin/bash\n{body}\n")
        (self._bin / name).chmod(0o755)

    def run(self, *starts: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run it. Each start is a piece of bash in the run directory; one more would be an error."""
        cases = "\n".join(f"{number}) {start};;" for number, start in enumerate([*starts, "touch ../too_often"]))
        count = self._path / "count"
        count.write_text("0")
        ranks = self._path / "ranks"
        ranks.write_text(
            f"#!/bin/bash\ncd {self.run_dir}\nn=$(<{count}); echo $((n + 1)) > {count}\ncase $n in {cases} esac\n"
        )
        ranks.chmod(0o755)
        lines = [
            f"run_dirs=(/else {self.run_dir})",
            "ranks=(srun --kill-on-bad-exit=1)",
            JOB.read_text(),
            "train python",
        ]
        slurm = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n0", "SLURM_RESTART_COUNT": "0"}
        slurm |= {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1", "PATH": f"{self._bin}:/usr/bin:/bin"}
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)], env=slurm | environ, capture_output=True, text=True, timeout=60
        )
        assert done.stderr == ""
        assert not (self._path / "too_often").exists()
        assert int(count.read_text()) == len(starts), "as often as it should"
        return done

    @property
    def asked(self) -> Sequence[str]:
        return self._asked.read_text().splitlines() if self._asked.exists() else []


def ended(how: str) -> str:
    """Return the bash that leaves the reason for an end, as a rank does."""
    return f"echo '{json.dumps({'ended': how, 'at': 0.0, 'rank': 0, 'reason': 'x'})}' > ended.json"


SAVES = "echo . >> LATEST"
KILLED = "exit 137"


def test_a_run_that_ends_or_raises_is_not_started_again(tmp_path: Path) -> None:
    batch = Batch(tmp_path)
    assert batch.run("true").returncode == 0
    assert batch.run(f"{SAVES}; {ended('failed')}; exit 1").returncode == 1
    assert batch.run(f"{SAVES}; mkdir stalled; echo 'Timeout (0:01:00)!' > stalled/rank_2.txt; exit 1").returncode == 1
    assert batch.asked == []


def test_a_run_that_stopped_is_requeued_as_one_member_of_its_array(tmp_path: Path) -> None:
    """The last member of an array has the array's number as its own, and that number would start all members again."""
    batch = Batch(tmp_path)
    assert batch.run(ended("stopped")).returncode == 0
    assert batch.asked == ["requeue 12_1"]


def test_a_run_that_was_cancelled_is_not_started_again(tmp_path: Path) -> None:
    batch = Batch(tmp_path, state="COMPLETING")
    assert batch.run(ended("stopped")).returncode == 0
    assert batch.run(f"{SAVES}; {KILLED}").returncode == 137
    assert batch.asked == []


def test_a_rank_that_died_without_a_word_is_started_again_while_checkpoints_are_gained(tmp_path: Path) -> None:
    batch = Batch(tmp_path)
    assert batch.run(f"{SAVES}; {KILLED}", f"{SAVES}; {KILLED}", "true").returncode == 0
    assert batch.run(f"{SAVES}; {KILLED}", KILLED).returncode == 137
    assert batch.run(*[f"{SAVES}; {KILLED}"] * 11).returncode == 137, "not for ever"
    (batch.run_dir / "ended.json").write_text('{"ended": "failed"}')
    assert batch.run(f"{SAVES}; {KILLED}", "true").returncode == 0, "of a start before"
    assert batch.asked == []


def test_a_dead_node_is_replaced_by_slurm(tmp_path: Path) -> None:
    batch = Batch(tmp_path, dead_node=True)
    assert batch.run(f"{SAVES}; {KILLED}").returncode == 137
    assert batch.asked == ["requeue 12_1"]
    batch.run(KILLED, SLURM_RESTART_COUNT="100")
    assert len(batch.asked) == 1, "not for ever"


@pytest.mark.process
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
"""


@pytest.mark.process
@pytest.mark.parametrize("kind", ["ends", "stuck"])
def test_a_rank_leaves_no_temporary_files_no_worker_and_always_ends(kind: str, tmp_path: Path) -> None:
    """For example the spool of a remote dataset, and the workers of a DataLoader that an exception still holds."""
    spool = tmp_path / "spool"
    spool.touch()
    command = [sys.executable, "-c", RANK, kind, str(spool)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
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
