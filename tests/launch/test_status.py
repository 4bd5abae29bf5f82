"""The state of a run, from the answer of squeue and the files of the run directory."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from launch import follow as follow_module
from launch import status as status_module
from launch.follow import wait
from launch.planned_run import PlannedRun
from launch.rank import noting_its_end
from launch.states import RunStatus, State, runs_in, status_of, table
from launch.submitted import Submission, queue_for, record
from tests.commands import Call
from trainer.config import read_config
from trainer.fault_tolerance.preemption import StoppedError
from trainer.run_dir import RunDir, TakenError, hold, write_json

NOTHING_QUEUED: Mapping[str, str] = {}


def make_run(home: Path, name: str, *, job_id: str | None = "7_0") -> RunDir:
    """Make a run directory as a submission leaves it."""
    run_dir = RunDir(home / name)
    write_json(run_dir.config, resolve_recipe("debug:image").model_dump(mode="json"))
    if job_id is not None:
        log = home / "logs" / f"{job_id}_0_log.out"
        record(run_dir, Submission(job_id=job_id, submitted_at=datetime.now(UTC) - timedelta(seconds=60), log=log))
    return run_dir


def leave_end(run_dir: RunDir, ended: str, reason: str, *, rank: int = 0) -> None:
    write_json(run_dir.ended, {"ended": ended, "at": 0.0, "rank": rank, "reason": reason})


def start(run_dir: RunDir, *, host: str = platform.node(), **more: object) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(run_dir.provenance, {"starts": [{"started_at": now, "host": host, **more}]})


def state_of(run_dir: RunDir, queue: Mapping[str, str] | None = NOTHING_QUEUED) -> tuple[str, str]:
    status = status_of(run_dir, queue)
    return status.state, status.reason


def test_while_a_job_is_in_the_queue_squeue_is_right(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a")
    leave_end(run_dir, "failed", "ValueError: of the start before")
    assert state_of(run_dir, {"7_0": "RUNNING"}) == ("running", "")
    assert state_of(run_dir, {"7_0": "PENDING (Priority)"}) == ("waiting", "PENDING (Priority)")
    with hold(run_dir):
        assert state_of(run_dir, {"7_0": "PENDING (Priority)"}) == ("running", "")
        assert state_of(run_dir, {"7_1": "RUNNING"}) == ("running", "")
    assert state_of(run_dir, {"7_1": "RUNNING"}) == ("failed", "ValueError: of the start before")
    assert state_of(run_dir, None)[0] == "unknown"


def test_states_after_the_job(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a")
    state, reason = state_of(run_dir)
    assert (state, "no log" in reason) == ("failed", True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "7_0_0_log.out").write_text("srun: error: n2: task 1: Killed\n")
    start(run_dir, slurm_job_id="7")
    state, reason = state_of(run_dir, {"7_0": "OUT_OF_MEMORY"})
    assert (state, "OUT_OF_MEMORY" in reason, str(tmp_path / "logs") in reason) == ("failed", True, True)
    cancelled = {"7_0": "CANCELLED (BeginTime)"}
    assert state_of(run_dir, cancelled) == ("stopped", "cancelled")
    leave_end(run_dir, "failed", "KeyError: 'dog'", rank=1)
    assert state_of(run_dir, cancelled) == ("failed", "rank 1: KeyError: 'dog'")
    leave_end(run_dir, "stopped", "stopped after step 5, as SIGTERM asked")
    assert state_of(run_dir, cancelled) == ("stopped", "stopped after step 5, as SIGTERM asked")
    write_json(run_dir.provenance, {"finished_step": 16, "starts": []})
    assert state_of(run_dir) == ("finished", "")


def test_a_run_without_a_job_is_known_by_its_lock_and_by_what_it_left(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a", job_id=None)
    assert state_of(run_dir) == ("pending", "not started")
    start(run_dir)
    with hold(run_dir):
        assert state_of(run_dir) == ("running", "")
    state, reason = state_of(run_dir)
    assert (state, "0 min ago" in reason, "from the start" in reason) == ("killed", True, True)
    run_dir.latest.write_text("step_00000005\n")
    assert "from step 5" in state_of(run_dir)[1]
    start(run_dir, host="another")
    assert state_of(run_dir)[0] == "unknown"


def test_a_frozen_rank_is_named(tmp_path: Path) -> None:
    """Unless a rank has said why the start ended, or the files are of an earlier start."""
    run_dir = make_run(tmp_path, "a", job_id=None)
    start(run_dir)
    run_dir.stalled.mkdir()
    for rank, stack in ((0, 'torch/distributed/distributed_c10d.py", line 1 in barrier'), (1, "")):
        dump = f'Timeout (0:01:00)!\nThread 0x1 (most recent call first):\n  File "{stack}\n' if stack else ""
        (run_dir.stalled / f"rank_{rank}.txt").write_text(f"rank {rank} on n{rank}, in step 5\n{dump}")
    state, reason = state_of(run_dir)
    assert (state, reason.startswith("rank 1 on n1")) == ("failed", True)
    leave_end(run_dir, "failed", "KeyError: 'dog'")
    assert state_of(run_dir) == ("failed", "KeyError: 'dog'")
    run_dir.ended.unlink()
    for path in run_dir.stalled.iterdir():
        os.utime(path, (0, 0))
    assert state_of(run_dir)[0] == "killed"


def test_a_running_run_that_logs_nothing_says_for_how_long(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a", job_id=None)
    run_dir.metrics.write_text('{"step": 1, "train/loss": 3.5}\n')
    for seconds, said in ((60, ""), (3_000, "50 min ago")):
        os.utime(run_dir.metrics, (time.time() - seconds - 1,) * 2)
        with hold(run_dir):
            state, reason = state_of(run_dir)
        assert (state, said in reason, reason == "") == ("running", True, said == "")


def test_the_table_shows_steps_and_losses(tmp_path: Path) -> None:
    started = make_run(tmp_path / "s", "b-started", job_id="1")
    started.metrics.write_text('{"step": 1, "train/loss": 3.5}\n{"step": 4, "train/loss": 2.25}\n')
    write_json(started.provenance, {"num_steps": 6})
    make_run(tmp_path / "s", "a-waiting", job_id="2")
    queue = {"1": "RUNNING", "2": "PENDING (Priority)"}
    shown = table([(run_dir.path.name, status_of(run_dir, queue)) for run_dir in runs_in([tmp_path / "s"])])
    assert shown.splitlines() == [
        "run        state    step  loss    reason",
        "a-waiting  waiting  0/?           PENDING (Priority)",
        "b-started  running  4/6   2.2500",
    ]
    assert [run_dir.path for run_dir in runs_in([started.path])] == [started.path]
    with pytest.raises(UserError, match="nowhere holds no run"):
        runs_in([started.path, tmp_path / "s" / "nowhere"])


def test_a_damaged_file_hides_no_other_run(tmp_path: Path) -> None:
    good, bad = (make_run(tmp_path, name, job_id=None) for name in ("good", "bad"))
    for path in (bad.path / "job.json", bad.ended):
        path.write_text("{")
        status = status_of(bad, {})
        assert (status.state, str(path) in status.reason) == ("unknown", True)
        path.unlink()
    assert status_of(good, {}).state == "pending"
    (bad.path / "job.json").write_text("{")
    assert queue_for([good, bad]) == {}, "Slurm is not asked without a job"


def test_a_run_and_a_link_to_it_are_one_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "s", "b")
    (tmp_path / "s" / "a").symlink_to("b")
    assert [run_dir.path for run_dir in runs_in([tmp_path / "s"])] == [run.path]


def test_what_is_left_out_of_the_table_is_named(tmp_path: Path, call: Call) -> None:
    make_run(tmp_path / "runs", "alone", job_id=None)
    study = tmp_path / "runs" / "study"
    make_run(study, "inner", job_id=None)
    said = call(status_module.main, tmp_path / "runs").stderr
    assert f"left out, because they hold runs of their own: {study};" in said
    shown = call(status_module.main, tmp_path / "runs", study)
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["run", "runs/alone", "study/inner"]
    assert shown.stderr == ""


def test_a_run_that_may_not_be_opened_is_named(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a table of a study would lack it without a word. Root may open all, so that the system is not asked."""
    make_run(tmp_path, "open", job_id=None)
    closed = tmp_path / "closed"
    closed.mkdir()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != closed)
    assert (
        call(status_module.main, tmp_path).stderr
        == f"left out, because you may not open them: {closed}; ask their owner\n"
    )


@pytest.mark.parametrize("ends", ["finished", "failed"])
def test_waiting_shows_each_change_and_the_log_and_tells_failure(
    ends: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    statuses = iter([RunStatus("waiting"), RunStatus("running"), RunStatus("running"), RunStatus(ends, reason="x")])

    def status(run_dir: RunDir, queue: Mapping[str, str]) -> RunStatus:
        with log.open("a") as file:
            file.write("step\n")
        return next(statuses)

    monkeypatch.setattr(follow_module, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(follow_module, "status_of", status)
    run = PlannedRun(RunDir(tmp_path / "a"), resolve_recipe("debug:image"))
    with contextlib.nullcontext() if ends == "finished" else pytest.raises(SystemExit):
        wait([run], log=log)
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["a: waiting", "step", "a: running", "step", "step", f"a: {ends} x", "step"]
    assert (shown.err == "") == (ends == "finished")


def noted(run_dir: RunDir, error: BaseException) -> dict[str, object] | None:
    """Return what a start that ends with `error` leaves."""
    with pytest.raises(type(error)), noting_its_end(read_config(run_dir.config), run_dir.path):
        raise error
    found: dict[str, object] | None = json.loads(run_dir.ended.read_text()) if run_dir.ended.exists() else None
    run_dir.ended.unlink(missing_ok=True)
    return found


def test_a_start_notes_why_it_ended_unless_it_was_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(tmp_path, "a", job_id=None)
    end = noted(run_dir, ValueError("the loss\nis nan"))
    assert end is not None
    assert (end["ended"], end["rank"], end["reason"]) == ("failed", 0, "is nan")
    for error in (StoppedError(5, "as SIGTERM asked"), KeyboardInterrupt()):
        end = noted(run_dir, error)
        assert end is not None
        assert end["ended"] == "stopped"
    with hold(run_dir):
        assert noted(run_dir, UserError("another process is training")) is None
    assert noted(run_dir, TakenError("this process was frozen, and another trains there now")) is None
    other = read_config(run_dir.config).model_copy(update={"seed": 5})
    with pytest.raises(UserError), noting_its_end(other, run_dir.path):
        raise UserError("it belongs to another config")
    assert not run_dir.ended.exists()


def test_only_the_first_error_that_is_no_consequence_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(tmp_path, "a", job_id=None)
    config = read_config(run_dir.config)
    with pytest.raises(RuntimeError) as raised:
        exec(compile("raise RuntimeError('any words')", "torch/distributed/distributed_c10d.py", "exec"))
    lost = raised.value

    def end_of(rank: int, error: Exception) -> None:
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", 2)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29500")
        with pytest.raises(type(error)), noting_its_end(config, run_dir.path):
            raise error

    end_of(0, lost)
    assert not run_dir.ended.exists(), "a rank died without a word"
    end_of(1, StoppedError(5, "as SIGTERM asked"))
    assert not run_dir.ended.exists(), "rank 0 says that"
    end_of(1, KeyError("dog"))
    end_of(0, ValueError("later"))
    assert state_of(run_dir) == ("failed", "rank 1: KeyError: 'dog'")
