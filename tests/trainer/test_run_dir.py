"""The files of a run directory: metrics and provenance, steps, who trains there, and writing."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from launch.states import status_of
from tests.trainer.reports.made_runs import make_run
from trainer.checkpoint.save import CheckpointWriter
from trainer.run_dir import LOCK_NAME, RunDir, TakenError, hold, is_held, steps_in
from trainer.training_log import open_tracker

GOOD = {"step": 3, "epoch": 0, "train/loss": 1.5}


def write_metrics(run_dir: RunDir, *lines: bytes, end: bytes = b"\n") -> None:
    run_dir.path.mkdir(exist_ok=True)
    run_dir.metrics.write_bytes(b"\n".join(lines) + end)


def good(step: int) -> bytes:
    return json.dumps(GOOD | {"step": step}).encode()


@pytest.mark.parametrize("line", [b"\xff\xfe", b"null", b'{"epoch": 1}', b'{"step": 4, "train/loss": "low"}', b'{"st'])
def test_a_damaged_line_is_named(line: bytes, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_metrics(run_dir, good(1), line, good(5))
    for read in (run_dir.read_metrics, run_dir.read_last_metrics):
        with pytest.raises(UserError, match=re.escape(ascii(line))):
            read()


def test_numbers_that_are_not_finite_and_a_line_that_a_kill_cut_short_are_left_out(tmp_path: Path) -> None:
    write_metrics(
        RunDir(tmp_path), b'{"step": 1, "a": NaN, "b": -Infinity, "c": 1e400, "e": 2}', b'{"step": 2', end=b""
    )
    assert RunDir(tmp_path).read_metrics() == [{"step": 1, "e": 2}]


def test_the_end_of_a_long_file_has_its_last_values(tmp_path: Path) -> None:
    run_dir = RunDir(make_run(tmp_path / "run"))
    write_metrics(
        run_dir, *(good(step) for step in range(1, 20_001)), b'{"step": 20000, "train/loss": 0.5}', b"{", end=b""
    )
    whole, end = run_dir.read_metrics(), run_dir.read_last_metrics()
    assert whole[-1] == GOOD | {"step": 20_000, "train/loss": 0.5}
    assert 100 < len(end) < len(whole) / 2
    assert end == whole[-len(end) :]
    status = status_of(run_dir, {})
    assert (status.step, status.loss) == (20_000, 0.5)


def test_a_restart_drops_the_steps_that_it_repeats_and_says_which_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = RunDir(tmp_path)
    write_metrics(run_dir, good(3), good(4), good(9))
    config = resolve_recipe("debug:image", ["tracking.wandb=disabled", "log_every_steps=2"])
    tracker = open_tracker(run_dir, config, start_step=5)
    tracker.log(6, {"epoch": 1, "train/loss": 0.5})
    tracker.close()
    assert [entry["step"] for entry in run_dir.read_metrics()] == [3, 4, 6]
    assert not caplog.text
    open_tracker(run_dir, config, start_step=8).close()
    assert f"{run_dir.metrics} lacks lines up to step 8" in caplog.text


@pytest.mark.parametrize("name", ["step_x", "step_5", "step_0000001１", "step_-0000001", "step_00000007.json"])
def test_a_name_that_is_no_step_is_named_and_passed_over(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = RunDir(tmp_path)
    for directory in (name, "step_00000011"):
        (run_dir.all_probes / directory).mkdir(parents=True)
    (run_dir.all_probes / "step_00000005").write_text("stray")
    assert steps_in(run_dir.all_probes) == [11]
    assert f"{tmp_path}/probes/{name} is not the directory of a step" in caplog.text


@pytest.mark.parametrize("content", [b"step_x", b"\xff", b"", b"step_" + b"9" * 5000])
def test_a_damaged_latest_is_no_step(content: bytes, tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path / "run"))
    run.latest.write_bytes(content)
    assert run.latest_step() is None
    assert status_of(run, {}).step == 11


def test_looking_at_a_directory_neither_takes_it_nor_refuses_it_to_a_trainer(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert not is_held(run_dir)
    assert not list(tmp_path.iterdir()), "it is only looked at"
    with hold(run_dir):
        assert is_held(run_dir)
        with pytest.raises(UserError, match=f"another process is training in {tmp_path}: process {os.getpid()} on "):
            hold(run_dir)
    assert not is_held(run_dir)
    began = time.monotonic()
    hold(run_dir).close()
    assert time.monotonic() - began < 1, "a directory that was given back needs no wait"


def test_a_heartbeat_is_seen_where_the_times_of_files_are_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS and sshfs answer stat from what they have seen, for a minute or less, but ask the server when they open."""
    for name, seconds in (("_BEAT_SECONDS", 0.05), ("_WATCH_SECONDS", 0.5)):
        monkeypatch.setattr(f"trainer.run_dir.{name}", seconds)
    with hold(RunDir(tmp_path)):
        seen, stat = (tmp_path / LOCK_NAME).stat(), Path.stat
        monkeypatch.setattr(Path, "stat", lambda path, **how: seen if path.name == LOCK_NAME else stat(path, **how))
        time.sleep(0.6)
        assert is_held(RunDir(tmp_path))
        with pytest.raises(UserError, match="another process is training"):
            hold(RunDir(tmp_path))
        monkeypatch.undo()


def test_of_two_starts_at_the_same_moment_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have seen that nobody trains there."""
    with hold(RunDir(tmp_path)):
        monkeypatch.setattr("trainer.run_dir._beats", lambda _: False)
        monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(UserError, match="another process is training"):
            hold(RunDir(tmp_path))
        monkeypatch.undo()


# Holds a run directory, forks as a data worker is forked, says the worker's pid, and is killed.
KILLED = """
import os, sys, time
from pathlib import Path
from trainer.run_dir import RunDir, hold
held = hold(RunDir(Path(sys.argv[1])))
worker = os.fork()
if worker == 0:
    time.sleep(60)
    os._exit(0)
print(worker, flush=True)
time.sleep(60)
"""


@pytest.mark.process
def test_a_data_worker_does_not_hold_the_run_directory_of_a_rank_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        worker = int(killed.stdout.readline())
        holder = f"process {killed.pid} on {socket.gethostname()}"
        with pytest.raises(UserError, match=re.escape(f"another process is training in {tmp_path}: {holder}")):
            hold(RunDir(tmp_path))
        killed.kill()
    try:
        hold(RunDir(tmp_path)).close()
    finally:
        os.kill(worker, 9)


@pytest.fixture
def fast_hearts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.run_dir._BEAT_SECONDS", 0.05)
    monkeypatch.setattr("trainer.run_dir._WATCH_SECONDS", 1.0)


def test_a_process_of_a_container_with_the_name_of_its_host_is_one_of_another_machine(tmp_path: Path) -> None:
    with hold(RunDir(tmp_path)):
        name = (tmp_path / LOCK_NAME).read_text()
    dead = re.sub("process [0-9]+", "process 999999999", name)
    elsewhere = re.sub(r"\(.*\)", "(pid:[7])", dead)
    for owner, holds in ((dead, False), (elsewhere, True)):
        (tmp_path / LOCK_NAME).write_text(owner)
        assert is_held(RunDir(tmp_path)) is holds


@pytest.mark.usefixtures("fast_hearts")
def test_a_process_of_another_machine_is_known_by_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.run_dir._HERE", " on node1,")
    run_dir = RunDir(tmp_path)
    first = hold(run_dir)
    monkeypatch.setattr("trainer.run_dir._HERE", " on node2,")
    assert is_held(run_dir)
    with pytest.raises(UserError, match=r"process [0-9]+ on node1, start"):
        hold(run_dir)
    first._is_closing.set()  # it is frozen, or cut off from the disk
    time.sleep(0.2)
    second = hold(run_dir)
    second.check()
    with pytest.raises(TakenError, match=r"another process trains in .* now: process [0-9]+ on node2, .* on node1, "):
        first.check()
    first.close()
    second.check()
    with pytest.raises(UserError, match="saves no checkpoint"), CheckpointWriter(run_dir, keep=1, held=first) as writer:
        writer.save(1, engines={}, objective_state={})
    assert not run_dir.checkpoint(1).exists()
    second.close()
