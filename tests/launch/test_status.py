"""The table of a study: each state, from the answer of squeue and the files of the run directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pickle
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import submitit
import torch

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from launch import rank as rank_module
from launch import runs as runs_module
from launch import status as status_module
from launch import submitted as submitted_module
from launch.outcome import Ended, RankOutcome, note_end, outcome_path
from launch.planned_run import PlannedRun
from launch.preloaded import PreloadedProcess
from launch.resources import Resources
from launch.runs import resubmit, run_study_here, runs_in, status_of, table, wait, wait_for_study
from launch.snapshot import Snapshot
from launch.submission import SubmissionPlan
from launch.submitted import RunStatus, Submission, last_submission, queue_for, record, refuse_if_active, run_status
from tests.tiny_data import write_tiny_dataset, write_tiny_pair
from trainer import analyze, export, probe
from trainer.checkpoint import restore as restore_module
from trainer.checkpoint.files import INDEX_NAME, check_sizes, check_whole, write_files
from trainer.config import read_config
from trainer.fault_tolerance.preemption import StoppedError
from trainer.run_dir import LOCK_NAME, RunDir, forget_ends, hold, left_out_of, write_json

RESOURCES = Resources(nodes=2, tasks_per_node=1, cpus_per_task=2, threads_per_task=1, time_minutes=60)

NOTHING_QUEUED: Mapping[str, str] = {}


def make_run(home: Path, name: str, *, job_id: str | None = "7_0", train_dir: Path | None = None) -> RunDir:
    """Make a run directory as a submission leaves it."""
    run_dir = RunDir(home / name)
    settings = [] if train_dir is None else [f"data.train_dir={train_dir}"]
    write_json(run_dir.config, resolve_recipe("debug:image", settings).model_dump(mode="json"))
    if job_id is not None:
        submission = Submission(
            job_id=job_id,
            executor="slurm",
            home="..",
            submitted_at=datetime.now(UTC) - timedelta(seconds=60),
            at_a_time=2,
            resources=RESOURCES,
            host=socket.gethostname(),
        )
        record(run_dir, submission)
    return run_dir


def write_checkpoint(run_dir: RunDir, step: int, *, is_latest: bool = True) -> Path:
    """Write a small whole checkpoint, and name it in LATEST; return its directory."""
    directory = run_dir.checkpoint(step)
    directory.mkdir(parents=True)
    write_files(directory, step=step, states={"encoder": {"weight": torch.zeros(3)}})
    if is_latest:
        run_dir.latest.write_text(f"{directory.name}\n")
    return directory


def submission_of(run_dir: RunDir) -> Submission:
    submission = last_submission(run_dir)
    assert submission is not None
    return submission


def log(run_dir: RunDir, text: str) -> None:
    path = submission_of(run_dir).rank_log(run_dir, 0)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def leave_outcome(run_dir: RunDir, rank: int, ended: Ended, reason: str, *, seconds_ago: float = 0) -> None:
    submission = submission_of(run_dir)
    path = outcome_path(submission.logs_of(run_dir), job_id=submission.job_id, rank=rank)
    write_json(path, RankOutcome(ended=ended, at=time.time() - seconds_ago, reason=reason).model_dump())


def cancel_lines(job_id: str, why: str = "") -> str:
    """Return what Slurm writes into the log of rank 0 when it ends a job: a line for the ranks, one for the script."""
    return "".join(
        f"slurmstepd: error: *** {what} ON n1 CANCELLED AT 2026-11-21T10:00:00{why} ***\n"
        for what in (f"STEP {job_id}.0", f"JOB {job_id}")
    )


def state_of(run_dir: RunDir, queue: Mapping[str, str] | None = NOTHING_QUEUED) -> tuple[str, str]:
    status = run_status(run_dir, queue)
    return status.state, status.reason


def test_while_a_job_is_in_the_queue_squeue_is_right(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a")
    leave_outcome(run_dir, 0, "failed", "ValueError: of the start before")
    assert state_of(run_dir, {"7_0": "RUNNING"}) == ("running", "")
    assert state_of(run_dir, {"7_0": "PENDING (JobArrayTaskLimit)"}) == ("waiting", "PENDING (JobArrayTaskLimit)")
    with hold(run_dir):
        shown = state_of(run_dir, {"7_0": "PENDING (Priority)"})
        assert shown == ("running", "without job 7_0, which is PENDING (Priority)")
    assert state_of(run_dir, {"7_0": "COMPLETING"}) == ("running", "COMPLETING")
    assert state_of(run_dir, {"7_1": "RUNNING"})[0] == "failed"
    assert state_of(run_dir, None)[0] == "unknown"


def test_states_after_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = make_run(tmp_path, "never", job_id=None)
    assert state_of(never) == ("pending", "not started")
    done = make_run(tmp_path, "done", job_id="1")
    write_json(done.provenance, {"finished_step": 16, "starts": []})
    assert state_of(done, None) == ("finished", "")
    cancelled = make_run(tmp_path, "cancelled", job_id="2")
    log(cancelled, "going on\n" + cancel_lines("2"))
    assert state_of(cancelled) == ("stopped", "cancelled")
    late = make_run(tmp_path, "late", job_id="3")
    log(late, "slurmstepd: error: *** JOB 3 ON n1 CANCELLED AT 2026-11-21T10:00:00 DUE TO TIME LIMIT ***\n")
    assert state_of(late) == ("failed", "its time limit was reached")
    warned = make_run(tmp_path, "warned", job_id="4")
    leave_outcome(warned, 0, "stopped", "stopped after step 5, as SIGTERM asked; start it again")
    assert state_of(warned) == ("stopped", "stopped after step 5, as SIGTERM asked; start it again")
    unseen = make_run(tmp_path, "unseen", job_id="5")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert state_of(unseen) == (
        "failed",
        f"no log: it was cancelled while it waited, or the nodes cannot write to {tmp_path}/logs",
    )


@pytest.mark.parametrize(
    ("program", "says", "state"),
    [
        ("scontrol", "JobId=5 JobName=CANCELLED\n   JobState=CANCELLED Reason=None", "stopped"),
        ("scontrol", "JobId=5 JobName=CANCELLED\n   JobState=FAILED Reason=None", "failed"),
        ("sacct", "CANCELLED by 0 ", "stopped"),
        ("sacct", "    FAILED ", "failed"),
    ],
)
def test_a_job_that_was_cancelled_while_it_waited_has_not_failed(
    program: str, says: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm is asked, because such a job leaves no files."""
    script = tmp_path / "bin" / program
    script.parent.mkdir()
    script.write_text(f"#!/bin/bash\n[[ ${{!#}} == 5 ]] && echo '{says}'")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))  # the real Slurm may take minutes to answer
    run_dir = make_run(tmp_path, "a", job_id="5")
    if program == "sacct":
        monkeypatch.setattr(shutil, "which", lambda name: name if name == "sacct" else None)
    shown, reason = state_of(run_dir)
    assert shown == state
    assert (reason == "cancelled while it waited") == (state == "stopped")


@pytest.mark.parametrize(("says", "state"), [("", "stopped"), ("   JobState=NODE_FAIL Reason=None", "failed")])
def test_a_member_of_an_array_that_was_cancelled_while_it_waited_has_not_failed(
    says: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm forgets it at once, so the log of another member says that the nodes can write logs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "scontrol").write_text(f"#!/bin/bash\necho '{says}'; [[ -n '{says}' ]]\n")
    (tmp_path / "scontrol").chmod(0o755)
    run_dir, other = make_run(tmp_path, "a", job_id="7_1"), make_run(tmp_path, "b", job_id="7_10")
    assert state_of(run_dir)[0] == "failed", "perhaps the nodes cannot write"
    log(other, "step 6\n")
    assert state_of(run_dir)[0] == state


START = "submitit INFO (2026-11-21 10:00:00,000) - Starting with JobEnvironment(job_id=7, hostname=n1)\n"
REQUEUED = START + "stopped after step 5, as SIGUSR2 asked\n" + cancel_lines("7", " DUE TO JOB REQUEUE")


def test_a_rank_that_was_killed_is_not_called_cancelled(tmp_path: Path) -> None:
    """Its death ends the step of the other ranks, which Slurm logs as cancelled. The job is submitted again."""
    run_dir = make_run(tmp_path, "a")
    killed = (
        "srun: error: n2: task 1: Killed\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T10:00:00 ***\n"
        "srun: error: n1: task 0: Killed\n"
    )
    for text in (START + killed, REQUEUED + START + killed):
        log(run_dir, text)
        assert state_of(run_dir) == ("failed", "srun: error: n2: task 1: Killed")
    log(run_dir, f"{START}ImportError: no module x\nsrun: error: n1: task 0: Exited with exit code 1\n")
    assert state_of(run_dir) == ("failed", "ImportError: no module x")


def test_a_job_that_was_cancelled_while_it_waited_to_start_again_has_not_failed(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a")
    log(run_dir, REQUEUED + "srun: forcing job termination\n")
    leave_outcome(run_dir, 1, "failed", "RuntimeError: Connection closed by peer", seconds_ago=9)
    assert state_of(run_dir) == ("stopped", "cancelled while it waited to start again")
    log(run_dir, REQUEUED + START + "step 6\n")
    leave_outcome(run_dir, 1, "failed", "ValueError: the loss is nan")
    assert state_of(run_dir) == ("failed", "rank 1: ValueError: the loss is nan")


def test_a_daemon_for_each_node_of_one_machine_names_its_node(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a")
    log(run_dir, START + cancel_lines("7").replace("slurmstepd:", "slurmstepd-n1:"))
    assert state_of(run_dir) == ("stopped", "cancelled")


def test_the_reason_is_that_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a")
    log(run_dir, "RuntimeError: Connection closed by peer\n")
    closed, first = "RuntimeError: Connection closed by peer", "ValueError: the loss is nan at step 3"
    leave_outcome(run_dir, 0, "failed", closed, seconds_ago=1)
    leave_outcome(run_dir, 1, "failed", first, seconds_ago=2)
    assert state_of(run_dir) == ("failed", f"rank 1: {first}")
    leave_outcome(run_dir, 0, "failed", first, seconds_ago=1)
    assert state_of(run_dir) == ("failed", f"rank 0: {first}"), "raised by both"
    leave_outcome(run_dir, 0, "failed", closed, seconds_ago=1)
    leave_outcome(run_dir, 1, "failed", "ValueError: long ago, in an earlier start", seconds_ago=4_000)
    assert state_of(run_dir) == ("failed", f"rank 0: {closed}")
    leave_outcome(run_dir, 0, "finished", "")
    leave_outcome(run_dir, 1, "finished", "")
    assert state_of(run_dir) == ("failed", closed), "only its log is left to ask"


def leave_stacks(run_dir: RunDir) -> Path:
    """Write what the watchdog of a frozen rank leaves."""
    path = run_dir.stalled / "rank_2.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        'rank 2 on n2\nTimeout (0:01:00)!\nThread 0x1 (most recent call first):\n  File "a.py", line 1 in b\n'
    )
    return path


def test_without_an_outcome_the_log_and_the_watchdog_speak(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a")
    log(run_dir, "step 1\nslurmstepd: error: Detected 1 oom_kill event in StepId=7.0\nsrun: terminating\n")
    assert state_of(run_dir) == ("failed", "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0")
    log(run_dir, "step 1\nstep 2\n\n")
    assert state_of(run_dir) == ("failed", "step 2")
    stalled = leave_stacks(run_dir)
    stuck = state_of(run_dir)
    assert stuck[1].startswith("rank 2 on n2")
    os.utime(stalled, (time.time() - 30,) * 2)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(run_dir.provenance, {"starts": [{"started_at": now}]})
    assert state_of(run_dir) == ("failed", "step 2"), "the same job was started again after that"
    run_dir.provenance.unlink()
    assert state_of(run_dir) == stuck
    os.utime(stalled, (0, 0))
    assert state_of(run_dir) == ("failed", "step 2"), "a report of an earlier job says nothing about this one"


def test_the_table_shows_steps_and_losses(tmp_path: Path) -> None:
    train_dir = write_tiny_dataset(tmp_path / "train", num_samples=96)
    started = make_run(tmp_path / "s", "b-started", job_id="1", train_dir=train_dir)
    started.metrics.write_text('{"step": 1, "train/loss": 3.5}\n{"step": 4, "train/loss": 2.25}\n')
    make_run(tmp_path / "s", "a-waiting", job_id="2", train_dir=tmp_path / "nowhere")
    runs = runs_in(tmp_path / "s")
    queue = {"1": "RUNNING", "2": "PENDING (Priority)"}
    shown = table({run_dir.path.name: run_status(run_dir, queue) for run_dir in runs})
    assert shown.splitlines() == [
        "run        state    step  loss    reason",
        "a-waiting  waiting  0/?           PENDING (Priority)",
        "b-started  running  4/6   2.2500",
    ]
    assert runs_in(started.path) == [started]
    with pytest.raises(UserError, match="holds no run"):
        runs_in(tmp_path / "train")


def test_a_run_and_a_link_to_it_are_one_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "s", "b")
    (tmp_path / "s" / "a").symlink_to("b")
    (tmp_path / "s" / "c").symlink_to("b")
    assert runs_in(tmp_path / "s") == [run]
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "d").symlink_to(run.path)
    assert runs_in(tmp_path / "links") == [RunDir(tmp_path / "links" / "d")]


def test_studies_beside_runs_are_named_as_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "runs", "alone", job_id=None)
    make_run(tmp_path / "runs" / "study", "inner", job_id=None)
    (tmp_path / "runs" / "notes").mkdir()
    monkeypatch.setattr(sys, "argv", ["status", str(tmp_path / "runs")])
    status_module.main()
    shown = capsys.readouterr()
    study = tmp_path / "runs" / "study"
    assert shown.err.strip() == (
        f"left out, because they hold runs of their own: {study}; pass the path of each to take its runs"
    )
    assert "alone" in shown.out
    assert "inner" not in shown.out
    assert left_out_of([tmp_path / "runs", study]) is None
    assert left_out_of([study, study / "inner"]) is None


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (probe.main, ["{}", "--out", "{}/probes", "--label", "of_no_dataset"]),
        (analyze.main, ["views", "{}"]),
        (export.main, ["{}", "--results", "{}/results.tar.xz"]),
    ],
)
def test_commands_that_take_studies_name_what_they_leave_out(
    main: Callable[[], None],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_run(tmp_path / "runs", "alone", job_id=None)
    make_run(tmp_path / "runs" / "study", "inner", job_id=None)
    monkeypatch.setattr(sys, "argv", ["command", *(word.format(tmp_path / "runs") for word in words)])
    with contextlib.suppress(UserError, SystemExit):  # the run has nothing to probe or analyse
        main()
    assert f"left out, because they hold runs of their own: {tmp_path / 'runs' / 'study'};" in capsys.readouterr().err


def test_only_what_failed_is_submitted_again_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = [make_run(tmp_path, name, job_id=job_id) for name, job_id in (("a", "1_0"), ("b", "1_1"))]
    alone = make_run(tmp_path / "other", "c", job_id="2")
    done = make_run(tmp_path, "d", job_id="1_2")
    write_json(done.provenance, {"finished_step": 16, "starts": []})
    plans: list[SubmissionPlan] = []

    def submit(plan: SubmissionPlan, *, command: str) -> list[object]:
        plans.append(plan)
        return []

    monkeypatch.setattr(submitted_module, "queued_jobs", lambda job_ids: {})
    monkeypatch.setattr(runs_module, "submit", submit)
    monkeypatch.setattr(runs_module, "print_submitted", lambda plan, jobs: None)
    resubmit([*failed, alone], command="again")
    assert [[planned.run_dir for planned in plan.runs] for plan in plans] == [failed, [alone]]
    assert [(plan.home, plan.at_a_time, plan.resources) for plan in plans] == [
        (tmp_path, 2, RESOURCES),
        (tmp_path / "other", 1, RESOURCES),
    ]
    monkeypatch.setattr(sys, "argv", ["launch/status.py", str(tmp_path), "--resubmit-failed"])
    plans.clear()
    status_module.main()
    assert [[planned.run_dir for planned in plan.runs] for plan in plans] == [failed]


def test_what_was_submitted_again_alone_is_together_with_the_others_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run(tmp_path, name) for name in "abc"]
    before = last_submission(runs[0])
    assert before is not None
    record(runs[0], before.model_copy(update={"at_a_time": 1}))
    plans: list[SubmissionPlan] = []
    monkeypatch.setattr(submitted_module, "queued_jobs", lambda job_ids: {})
    monkeypatch.setattr(runs_module, "submit", lambda plan, **_: plans.append(plan))
    monkeypatch.setattr(runs_module, "print_submitted", lambda plan, jobs: None)
    resubmit(runs, command="again")
    assert [([planned.run_dir for planned in plan.runs], plan.at_a_time) for plan in plans] == [(runs, 2)]


def test_what_failed_on_this_machine_does_not_stop_what_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run(tmp_path / name, "run") for name in "abc"]
    before = last_submission(runs[0])
    assert before is not None
    for run_dir in runs:
        record(run_dir, before.model_copy(update={"executor": "local"}))
    started: list[str] = []

    def run_study_here(plan: SubmissionPlan, *, command: str) -> None:
        started.append(plan.name)
        if plan.name == "b":
            raise SystemExit(1)

    monkeypatch.setattr(runs_module, "run_study_here", run_study_here)
    resubmit([runs[0], runs[2]], command="again")
    assert started == ["a", "c"]
    with pytest.raises(SystemExit) as end:
        resubmit(runs, command="again")
    assert end.value.code == 1
    assert started == ["a", "c", "a", "b", "c"]


def test_a_run_that_has_a_job_is_not_submitted_again(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a")
    refuse_if_active(run_dir, {})
    refuse_if_active(make_run(tmp_path, "b", job_id=None), {"7_0": "RUNNING"})
    with pytest.raises(UserError, match=r"job 7_0 is RUNNING for .*/a already; .*`scancel 7_0`"):
        refuse_if_active(run_dir, {"7_0": "RUNNING"})


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a squeue on the PATH that shows job 7, of another user, unless it is asked for the jobs of this user."""
    script = tmp_path / "bin" / "squeue"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/bash\n"
        "[[ $* == *--user* ]] && exit 0\n"
        "[[ $* == *'--jobs 7'* ]] && { echo '7_0|RUNNING|None'; exit 0; }\n"
        "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/bin")
    return script


def test_the_queued_job_of_a_colleague_has_not_failed_and_is_not_submitted_twice(
    squeue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "study", "a", job_id="7_0")
    monkeypatch.setattr(sys, "argv", ["launch/status.py", str(tmp_path / "study"), "--resubmit-failed"])
    monkeypatch.setattr(runs_module, "submit", lambda *_, **__: pytest.fail("its job runs"))
    status_module.main()
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split()[:2] == ["a", "running"]
    assert shown[2] == "nothing has failed"
    with pytest.raises(UserError, match=r"job 7_0 is RUNNING for .*/a already"):
        resubmit([run_dir], command="again")


def test_a_job_that_slurm_has_forgotten_is_not_in_the_queue(squeue: Path, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "study", "a", job_id="8_3")
    assert queue_for([run_dir]) == {}
    squeue.write_text("#!/bin/bash\necho 'slurm_load_jobs error: Unable to contact controller' >&2; exit 1\n")
    with pytest.raises(UserError, match=r"squeue failed .*Unable to contact controller"):
        queue_for([run_dir])


@pytest.mark.process
def test_a_local_job_is_active_while_its_process_is(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a")
    submission = last_submission(run_dir)
    assert submission is not None
    with (
        subprocess.Popen(["sleep", "60"]) as other,
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "submitit"]) as own,
    ):
        try:
            record(run_dir, submission.model_copy(update={"executor": "local", "job_id": str(other.pid)}))
            refuse_if_active(run_dir, None)
            record(run_dir, submission.model_copy(update={"executor": "local", "job_id": str(own.pid)}))
            with pytest.raises(UserError, match=f"`kill {own.pid}`"):
                refuse_if_active(run_dir, None)
        finally:
            own.kill()
            other.kill()
    refuse_if_active(run_dir, None)


@pytest.mark.process
@pytest.mark.parametrize(("host", "state"), [("here", "running"), ("there", "unknown")])
def test_a_local_job_is_known_only_on_its_own_machine(
    host: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine has other processes by the same numbers."""
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    run_dir = make_run(tmp_path, "a")
    submission = last_submission(run_dir)
    assert submission is not None
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "submitit"]) as process:
        try:
            local = submission.model_copy(update={"executor": "local", "job_id": str(process.pid), "host": host})
            write_json(run_dir.path / "job.json", local.model_dump(mode="json", exclude_none=True))
            assert state_of(run_dir)[0] == state
        finally:
            process.kill()
    if state == "unknown":
        refuse_if_active(run_dir, None)
        assert state_of(run_dir)[1] == "it was started on there, another machine; ask there"
        write_json(run_dir.provenance, {"finished_step": 16, "starts": []})
        assert state_of(run_dir)[0] == "finished"


def test_slurm_is_asked_only_about_its_own_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have Slurm's programs and no cluster."""
    monkeypatch.setattr(submitted_module, "queued_jobs", lambda job_ids: dict.fromkeys(job_ids, "RUNNING"))
    never, on_slurm = make_run(tmp_path, "a", job_id=None), make_run(tmp_path, "b")
    assert queue_for([never]) == {}
    assert queue_for([never, on_slurm]) == {"7_0": "RUNNING"}
    submission = last_submission(on_slurm)
    assert submission is not None
    record(on_slurm, submission.model_copy(update={"executor": "local"}))
    assert queue_for([never, on_slurm]) == {}


def test_waiting_for_a_job_ends_with_the_reason_that_the_status_gives(
    squeue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ranks have left no outcome: it was cancelled, or a rank was killed before it could write."""
    monkeypatch.setattr(runs_module, "POLL_SECONDS", 0)
    run_dir = make_run(tmp_path, "a", job_id="8")
    job = submitit.SlurmJob[None](submission_of(run_dir).logs_of(run_dir), "8", tasks=[0, 1])
    for text, said in {
        START + cancel_lines("8"): "job 8 stopped: cancelled",
        START + "srun: error: n2: task 1: Killed\n": "job 8 failed: srun: error: n2: task 1: Killed",
    }.items():
        log(run_dir, text)
        with pytest.raises(SystemExit) as end:
            wait(PlannedRun(run_dir, read_config(run_dir.config)), job)
        assert end.value.code == 1
        assert capsys.readouterr().err == f"error: {said}; see {tmp_path}/logs/8_0_log.out\n"


def test_waiting_for_a_study_tells_each_change_and_ends_with_status_1_if_a_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done, failed = make_run(tmp_path, "a", job_id="7_0"), make_run(tmp_path, "b", job_id="7_1")
    write_json(done.provenance, {"finished_step": 16, "starts": []})
    leave_outcome(failed, 0, "failed", "ValueError: no")
    runs = [PlannedRun(run_dir, resolve_recipe("debug:image")) for run_dir in (done, failed)]
    queues: list[Mapping[str, str] | UserError] = [
        {"7_0": "RUNNING", "7_1": "PENDING (Priority)"},
        {"7_0": "RUNNING", "7_1": "PENDING (Priority)"},
        UserError("squeue failed"),
        {"7_1": "RUNNING"},
        {},
    ]

    def queued(job_ids: Iterable[str]) -> Mapping[str, str]:
        answer = queues.pop(0)
        if isinstance(answer, UserError):
            raise answer
        return answer

    monkeypatch.setattr(submitted_module, "queued_jobs", queued)
    monkeypatch.setattr(runs_module, "POLL_SECONDS", 0.0)
    with pytest.raises(SystemExit) as end:
        wait_for_study(runs)
    assert end.value.code == 1
    said = capsys.readouterr()
    assert said.err == "squeue failed\n"
    assert said.out.splitlines() == [
        "a: running",
        "b: waiting PENDING (Priority)",
        "a: finished",
        "b: running",
        "b: failed rank 0: ValueError: no",
    ]


def test_waiting_for_a_study_on_this_machine_asks_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with Slurm's programs but no cluster the command would ask for ever."""
    run_dir = make_run(tmp_path, "a")
    write_json(run_dir.provenance, {"finished_step": 16, "starts": []})
    submission = last_submission(run_dir)
    assert submission is not None
    record(run_dir, submission.model_copy(update={"executor": "local", "job_id": "0"}))
    for module in (runs_module, submitted_module):
        monkeypatch.setattr(module, "queued_jobs", lambda job_ids: pytest.fail("Slurm was asked"))
    monkeypatch.setattr(runs_module, "POLL_SECONDS", 0.0)
    wait_for_study([PlannedRun(run_dir, resolve_recipe("debug:image"))])


class JobHere:
    """A job of this machine that has ended when it is asked for the third time."""

    def __init__(self, run_dir: RunDir, *, finishes: bool) -> None:
        self.job_id = "7"
        self._run_dir, self._finishes, self._asked = run_dir, finishes, 0

    def done(self) -> bool:
        self._asked += 1
        if self._asked == 3 and self._finishes:
            write_json(self._run_dir.provenance, {"finished_step": 16, "starts": []})
        return self._asked >= 3


def test_a_study_on_this_machine_keeps_its_places_full_and_outlives_a_run_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_pair(tmp_path / "data", num_train=32, num_test=8)
    settings = [f"data.{split}_dir={tmp_path / 'data' / split}" for split in ("train", "test")]
    config = resolve_recipe("debug:image", settings)
    runs = [PlannedRun(RunDir(tmp_path / "study" / name), config) for name in "abcde"]
    plan = SubmissionPlan(runs, tmp_path / "study", RESOURCES, at_a_time=2, name="study", executor="local")
    active: list[JobHere] = []
    places: list[tuple[str, int]] = []

    def submit(plan: SubmissionPlan, *, command: str, snapshot: Snapshot, preloaded: PreloadedProcess) -> list[JobHere]:
        (planned,) = plan.runs
        name = planned.run_dir.path.name
        if name == "d":
            raise UserError("its disk is full; free some")
        assert len([job for job in active if job._asked < 3]) < 2
        places.append((name, plan.slot))
        active.append(JobHere(planned.run_dir, finishes=name != "b"))
        return active[-1:]

    monkeypatch.setattr(runs_module, "submit", submit)
    monkeypatch.setattr(runs_module, "POLL_HERE_SECONDS", 0.0)
    with pytest.raises(SystemExit) as end:
        run_study_here(plan, command="train")
    assert end.value.code == 1
    assert places == [("a", 0), ("b", 1), ("c", 0), ("e", 1)]
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "d: not started: its disk is full; free some",
        "error: 2 of 5 run(s) did not finish; repeat the command to go on with them",
    ]
    assert said.out.splitlines() == [
        "a: job 7, 4 to come",
        "b: job 7, 3 to come",
        "a: finished",
        "c: job 7, 2 to come",
        "b: pending not started",
        "e: job 7, 0 to come",
        "c: finished",
        "e: finished",
    ]


def plan_of_tiny_runs(tmp_path: Path, names: str) -> SubmissionPlan:
    """Return a plan of runs of this machine, one at a time, on data that exist."""
    write_tiny_pair(tmp_path / "data", num_train=32, num_test=8)
    settings = [f"data.{split}_dir={tmp_path / 'data' / split}" for split in ("train", "test")]
    config = resolve_recipe("debug:image", settings)
    runs = [PlannedRun(RunDir(tmp_path / "study" / name), config) for name in names]
    return SubmissionPlan(runs, tmp_path / "study", RESOURCES, at_a_time=1, name="study", executor="local")


def test_a_run_whose_directory_is_removed_does_not_keep_the_others_from_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def submit(plan: SubmissionPlan, **_: object) -> list[JobHere]:
        (planned,) = plan.runs
        is_removed = planned.name == "a"
        if is_removed:
            shutil.rmtree(planned.run_dir.path)
        return [JobHere(planned.run_dir, finishes=not is_removed)]

    monkeypatch.setattr(runs_module, "submit", submit)
    monkeypatch.setattr(runs_module, "POLL_HERE_SECONDS", 0.0)
    monkeypatch.setattr(runs_module, "POLL_SECONDS", 0.0)
    plan = plan_of_tiny_runs(tmp_path, "ab")
    with pytest.raises(SystemExit) as end:
        run_study_here(plan, command="train")
    assert end.value.code == 1
    said = capsys.readouterr()
    assert "a: unknown " in said.out
    assert said.out.splitlines()[-1] == "b: finished"
    assert "error: 1 of 2 run(s) did not finish" in said.err
    with pytest.raises(SystemExit) as end:
        wait_for_study(plan.runs)
    assert end.value.code == 1
    assert "b: finished" in capsys.readouterr().out


def test_two_launchers_of_a_study_on_this_machine_share_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of_tiny_runs(tmp_path, "abcd")
    submitted: list[str] = []
    with contextlib.ExitStack() as other:

        def submit(plan: SubmissionPlan, **_: object) -> list[JobHere]:
            submitted.append(plan.runs[0].name)
            if plan.runs[0].name == "a":  # meanwhile, the other launcher ends c and begins d
                write_json(tmp_path / "study" / "c" / "provenance.json", {"finished_step": 16, "starts": []})
                other.enter_context(hold(RunDir(tmp_path / "study" / "d")))
            return [JobHere(plan.runs[0].run_dir, finishes=True)]

        monkeypatch.setattr(runs_module, "submit", submit)
        monkeypatch.setattr(runs_module, "POLL_HERE_SECONDS", 0.0)
        other.enter_context(hold(plan.runs[1].run_dir))
        write_json(plan.runs[1].run_dir.config, plan.runs[1].config.model_dump(mode="json"))
        run_study_here(plan, command="train")
    assert submitted == ["a"]
    assert capsys.readouterr().out.splitlines() == [
        "a: job 7, 3 to come",
        "a: finished",
        "b is running already",
        "c is finished already",
        "d is running already",
    ]


def test_a_run_that_another_launcher_took_over_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of_tiny_runs(tmp_path, "a")
    with contextlib.ExitStack() as other:

        def submit(plan: SubmissionPlan, **_: object) -> list[JobHere]:
            other.enter_context(hold(plan.runs[0].run_dir))
            return [JobHere(plan.runs[0].run_dir, finishes=False)]

        monkeypatch.setattr(runs_module, "submit", submit)
        monkeypatch.setattr(runs_module, "POLL_HERE_SECONDS", 0.0)
        run_study_here(plan, command="train")
    assert capsys.readouterr().out.splitlines() == ["a: job 7, 0 to come", "a: running"]


def test_a_study_on_this_machine_starts_nothing_where_one_run_could_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_pair(tmp_path / "data", num_train=32, num_test=8)
    settings = [f"data.{split}_dir={tmp_path / 'data' / split}" for split in ("train", "test")]
    configs = [resolve_recipe("debug:image", settings), resolve_recipe("debug:image", ["data.train_dir=nowhere"])]
    runs = [PlannedRun(RunDir(tmp_path / "study" / f"{number}"), config) for number, config in enumerate(configs)]
    plan = SubmissionPlan(runs, tmp_path / "study", RESOURCES, at_a_time=1, name="study", executor="local")
    with pytest.raises(UserError, match="nowhere does not exist"):
        run_study_here(plan, command="train")
    assert not (tmp_path / "study").exists()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    on_gpus = plan.resources.model_copy(update={"gpus_per_node": 2})
    with pytest.raises(UserError, match=r"names 3 GPU\(s\), but 4 are needed"):
        run_study_here(replace(plan, runs=[runs[0]] * 2, at_a_time=3, resources=on_gpus), command="train")
    assert not (tmp_path / "study").exists()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(UserError, match=r"torch sees 3 GPU\(s\) on \S+, but 4 are needed"):
        run_study_here(replace(plan, runs=[runs[0]] * 2, at_a_time=3, resources=on_gpus), command="train")
    assert not (tmp_path / "study").exists()


def test_a_damaged_record_is_one_sentence(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a")
    (run_dir.path / "job.json").write_text("{")
    with pytest.raises(UserError, match=r"job\.json is no valid JSON"):
        last_submission(run_dir)


def test_a_file_that_may_not_be_read_hides_no_other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, other = make_run(tmp_path, "a", job_id=None), make_run(tmp_path, "b", job_id=None)
    closed.metrics.write_text("{}\n")
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **keywords: Any) -> Any:
        if path == closed.metrics:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", refuse)
    statuses = {run_dir.path.name: status_of(run_dir, {}) for run_dir in runs_in(tmp_path)}
    assert statuses["a"].state == "unknown"
    assert statuses["a"].reason == f"{closed.metrics} cannot be read (Permission denied)"
    assert statuses["b"] == status_of(other, {})
    assert statuses["b"].state == "pending"


def test_a_lock_that_the_file_system_does_not_answer_for_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path, "a", job_id=None)
    (run_dir.path / LOCK_NAME).touch()

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", refuse)
    status = status_of(run_dir, {})
    assert (status.state, status.reason) == ("unknown", f"{run_dir.path} cannot be read (Input/output error)")


class Trap:
    """An object whose pickle leaves a file behind when it is read."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._canary,)


def test_no_pickle_of_a_run_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger may have left files under the names that submitit uses."""
    canary, run_dir = tmp_path / "canary", make_run(tmp_path / "study", "a")
    log(run_dir, "ValueError: no\n")
    logs = submission_of(run_dir).logs_of(run_dir)
    for rank in range(2):
        for name in ("result.pkl", "submitted.pkl", "outcome.json", "outcome.pkl"):
            (logs / f"7_0_{rank}_{name}").write_bytes(pickle.dumps(Trap(canary)))
    (logs / "7_0_submitted.pkl").write_bytes(pickle.dumps(Trap(canary)))
    monkeypatch.setattr(submitted_module, "queued_jobs", lambda job_ids: {})
    monkeypatch.setattr(sys, "argv", ["launch/status.py", str(tmp_path / "study")])
    status_module.main()
    assert state_of(run_dir) == ("failed", "ValueError: no")
    assert not canary.exists()
    pickle.loads((logs / "7_0_0_result.pkl").read_bytes())
    assert canary.exists(), "the trap works"


@pytest.mark.parametrize(
    "change",
    [
        {"home": "/etc"},
        {"home": "../.."},
        {"job_id": "../../7"},
        {"job_id": "--all"},
        {"job_id": ""},
        {"submitted_at": "yesterday"},
        {"at_a_time": 0},
        {"host": "a\nb"},
        {"resources": {"nodes": 10**30}},
        {"resources": {"partition": "a\n#SBATCH --wrap=touch"}},
        {"resources": {"sbatch": {"comment": "a\nb"}}},
        {"resources": {"sbatch": {"a b": 1}}},
        {"resources": {"sbatch": {"output": "/etc/passwd"}}},
    ],
)
def test_a_record_that_could_lead_elsewhere_is_refused_and_hides_no_other_run(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, other = make_run(tmp_path, "a"), make_run(tmp_path, "b", job_id=None)
    path = run_dir.path / "job.json"
    value = json.loads(path.read_text())
    value["resources"] |= change.get("resources", {})
    path.write_text(json.dumps(value | {name: entry for name, entry in change.items() if name != "resources"}))
    with pytest.raises(UserError, match=r"/a/job\.json: "):
        last_submission(run_dir)
    monkeypatch.setattr(sys, "argv", ["launch/status.py", str(tmp_path)])
    status_module.main()
    shown = capsys.readouterr().out.splitlines()
    assert re.match(r"a +unknown +\S*/a/job\.json: ", shown[1])
    assert shown[2].split() == [other.path.name, "pending", "0/?", "not", "started"]


def test_files_that_are_none_and_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    """Reading a pipe would block for ever, and reading a device would never end."""
    home, secret = tmp_path / "study", tmp_path / "secret"
    secret.write_text("SecretError: 42\n")
    run_dir = make_run(home, "a")
    log(run_dir, "ValueError: no\n")
    logs = submission_of(run_dir).logs_of(run_dir)
    os.mkfifo(logs / "7_0_0_outcome.json")
    (logs / "7_0_1_outcome.json").symlink_to("/dev/zero")
    os.mkfifo(run_dir.path / LOCK_NAME)
    assert state_of(run_dir) == ("failed", "ValueError: no")
    (logs / "7_0_0_log.out").unlink()
    (logs / "7_0_0_log.out").symlink_to(secret)
    state, reason = state_of(run_dir)
    assert state == "failed"
    assert "such a link is not followed" in reason
    (run_dir.path / "job.json").unlink()
    (run_dir.path / "job.json").symlink_to(secret)
    with pytest.raises(UserError, match="a link that leads out of the run directory"):
        last_submission(run_dir)


@pytest.mark.parametrize("text", ["", "null", "5", "[" * 100_000, '{"starts": 5}', '{"starts": [5]}', '{"starts": []}'])
def test_a_damaged_provenance_is_named_and_passed_over(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = make_run(tmp_path, "a", job_id=None)
    run_dir.provenance.write_text(text)
    status = status_of(run_dir, {})
    assert (status.state, status.reason) == ("pending", "not started")
    assert (f"{run_dir.provenance}" in caplog.text) == (text != '{"starts": []}')


def test_nothing_that_steers_a_terminal_is_printed() -> None:
    status = RunStatus("failed", 1, 2, 0.5, "\x1b]0;title\x07 a\nb" + "c" * 10_000)
    (_, row) = table({"run\x1b[2J": status}).splitlines()
    assert row.startswith("run\\x1b[2J")
    assert "\\x1b]0;title\\x07 a\\nb" in row
    assert len(row) < 1_000


def begin(run_dir: RunDir, *, at: datetime | None = None, host: str | None = None) -> None:
    """Write the record of a start, as a training does."""
    started_at = (at or datetime.now(UTC)).isoformat(timespec="seconds")
    write_json(run_dir.provenance, {"starts": [{"started_at": started_at, "host": host or platform.node()}]})


def test_a_run_without_a_job_is_known_by_its_lock_and_by_what_it_left(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a", job_id=None)
    config = read_config(run_dir.config)
    assert state_of(run_dir) == ("pending", "not started")
    with hold(run_dir):
        assert state_of(run_dir) == ("running", ""), "while it starts"
        begin(run_dir)
        assert state_of(run_dir) == ("running", "")
        note_end(run_dir, config, "failed", "another process is training")
        assert not run_dir.ended(0).exists(), "that was the end of another process"
    killed = "it ended without a message; start it again with the same command and it goes on from "
    assert state_of(run_dir) == ("killed", f"{killed}the start")
    write_checkpoint(run_dir, 20)
    assert state_of(run_dir) == ("killed", f"{killed}step 20")
    note_end(run_dir, resolve_recipe("debug:image", ["seed=5"]), "failed", "holds a run with another config")
    assert state_of(run_dir)[0] == "killed", "the directory is of another config"
    note_end(run_dir, config, "stopped", "stopped after step 20, as SIGTERM asked; start it again")
    assert state_of(run_dir) == ("stopped", "stopped after step 20, as SIGTERM asked; start it again")
    begin(run_dir, at=datetime.now(UTC) + timedelta(seconds=5))
    assert state_of(run_dir)[0] == "killed", "it was started again after that"
    begin(run_dir, at=datetime.now(UTC) - timedelta(seconds=5))
    leave_stacks(run_dir)
    assert state_of(run_dir)[1].startswith("rank 2 on n2")
    write_json(run_dir.provenance, {"starts": [], "finished_step": 20})
    assert state_of(run_dir) == ("finished", "")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"starts": []}', '{"starts": [{"host": "n1"}]}'])
def test_a_run_that_has_begun_is_not_called_pending_if_its_provenance_is_damaged(
    content: str | None, tmp_path: Path
) -> None:
    said = (
        "provenance.json is damaged or missing, though the run has begun; start it again with the same command and it "
    )
    logged, saved = (make_run(tmp_path, name, job_id=None) for name in ("logged", "saved"))
    logged.metrics.write_text('{"step": 1, "train/loss": 0.5}\n')
    write_checkpoint(saved, 20)
    for run_dir in (logged, saved):
        if content is not None:
            run_dir.provenance.write_text(content)
    assert state_of(logged) == ("unknown", f"{said}goes on from the start")
    assert state_of(saved) == ("unknown", f"{said}goes on from step 20")
    note_end(saved, read_config(saved.config), "stopped", "stopped after step 20")
    assert state_of(saved) == ("stopped", "stopped after step 20"), "it has said so itself"


def leave_end(run_dir: RunDir, rank: int, reason: str, *, ended: Ended = "failed", seconds_ago: float = 0) -> None:
    """Write how a rank of a run without a job ended."""
    outcome = RankOutcome(ended=ended, at=time.time() - seconds_ago, reason=reason)
    write_json(run_dir.ended(rank), outcome.model_dump())


CLOSED = "RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:28131"


def test_the_error_of_another_rank_comes_before_that_of_rank_0_which_lost_it(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a", job_id=None)
    begin(run_dir, at=datetime.now(UTC) - timedelta(seconds=60))
    leave_end(run_dir, 0, CLOSED)
    assert state_of(run_dir) == ("failed", CLOSED)
    leave_end(run_dir, 2, "KeyError: 'b'", seconds_ago=2)
    leave_end(run_dir, 10, "KeyError: 'a'", seconds_ago=3)
    assert state_of(run_dir) == ("failed", "rank 10: KeyError: 'a'"), "the first of them"
    ends: dict[Ended, str] = {"failed": "UserError: the disk is full", "stopped": "stopped after step 5"}
    for ended, own in ends.items():
        leave_end(run_dir, 0, own, ended=ended)
        assert state_of(run_dir) == (ended, own)
    leave_end(run_dir, 0, "KeyError: 'a'")
    assert state_of(run_dir) == ("failed", "KeyError: 'a'"), "all ranks have it"
    run_dir.ended(0).unlink()
    assert state_of(run_dir) == ("failed", "rank 10: KeyError: 'a'"), "rank 0 was killed"
    with hold(run_dir):
        assert state_of(run_dir)[0] == "running"


@pytest.mark.parametrize("seconds_ahead", [-100, 100])
def test_clocks_of_nodes_that_differ_do_not_hide_the_rank_that_failed(seconds_ahead: int, tmp_path: Path) -> None:
    here, job = make_run(tmp_path, "here", job_id=None), make_run(tmp_path, "job")
    begin(here)
    leave_end(here, 0, CLOSED)
    leave_end(here, 1, "KeyError: 'a'", seconds_ago=-seconds_ahead)
    leave_outcome(job, 0, "failed", CLOSED)
    leave_outcome(job, 1, "failed", "KeyError: 'a'", seconds_ago=-seconds_ahead)
    leave_outcome(job, 2, "failed", "DistBackendError: NCCL error", seconds_ago=500)
    for run_dir in (here, job):
        assert state_of(run_dir) == ("failed", "rank 1: KeyError: 'a'")


def test_the_end_of_a_rank_of_an_earlier_start_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(tmp_path, "a", job_id=None)
    config = read_config(run_dir.config)
    begin(run_dir)
    leave_end(run_dir, 1, "KeyError: 'a'", seconds_ago=1_000)
    assert state_of(run_dir)[0] == "killed", "no start has removed it, and it is too old"
    leave_end(run_dir, 0, CLOSED)
    assert state_of(run_dir) == ("failed", CLOSED)
    (run_dir.path / "ended_rank_notes.json").write_text("{}")
    forget_ends(run_dir)
    assert run_dir.ends() == {}
    assert (run_dir.path / "ended_rank_notes.json").exists(), "it is of somebody else"
    monkeypatch.setattr(rank_module, "read_env", lambda _: SimpleNamespace(rank=1))
    with hold(run_dir), pytest.raises(KeyError), rank_module.noting_its_end(config, run_dir.path):
        raise KeyError("of a second start, which is refused")
    assert run_dir.ends() == {}
    with pytest.raises(KeyError), rank_module.noting_its_end(config, run_dir.path), hold(run_dir):
        raise KeyError("of this start, whose rank 0 has the lock")
    assert list(run_dir.ends()) == [1]


def test_a_pipe_and_a_link_in_place_of_the_end_of_a_rank_are_not_followed(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "study", "a", job_id=None)
    begin(run_dir)
    leave_end(run_dir, 3, "KeyError: 'secret'")
    run_dir.ended(3).rename(tmp_path / "secret.json")
    run_dir.ended(3).symlink_to(tmp_path / "secret.json")
    os.mkfifo(run_dir.ended(1))
    run_dir.ended(2).write_text("[" * 100_000)
    assert state_of(run_dir)[0] == "killed"


def cut(checkpoint: Path) -> str:
    path = checkpoint / "encoder.safetensors"
    path.write_bytes(path.read_bytes()[:5])
    return "encoder.safetensors has 5 bytes, but 84 were written"


def remove_index(checkpoint: Path) -> str:
    (checkpoint / INDEX_NAME).unlink()
    return "checkpoint.json is missing"


def remove(checkpoint: Path) -> str:
    shutil.rmtree(checkpoint)
    return "it is missing"


@pytest.mark.parametrize("damage", [cut, remove_index, remove])
def test_the_newest_whole_checkpoint_counts_and_not_the_one_that_latest_names(
    damage: Callable[[Path], str], tmp_path: Path
) -> None:
    run_dir = make_run(tmp_path, "a", job_id=None)
    begin(run_dir)
    write_checkpoint(run_dir, 5)
    write_checkpoint(run_dir, 10)
    reason = damage(write_checkpoint(run_dir, 20))
    status = run_status(run_dir, {})
    said = "it ended without a message; start it again with the same command and it goes on from step 10"
    assert (status.state, status.step, status.reason) == ("killed", 10, said)
    problem = f"LATEST names step 20, whose checkpoint is not whole ({reason}); a restart goes on from step 10"
    assert status.problem == problem
    assert table({"a": status}).splitlines()[2:] == [f"a: {problem}"]
    planned = PlannedRun(run_dir, read_config(run_dir.config))
    assert planned.state == "at step 10"
    for step in (5, 10):
        shutil.rmtree(run_dir.checkpoint(step))
    refused = run_status(run_dir, {})
    assert refused.step == 0
    assert refused.reason == "it ended without a message; it cannot go on, because no checkpoint can be used"
    assert refused.problem.endswith(f"so a restart is refused until you copy a whole one to {run_dir.checkpoints}")
    assert planned.state == "damaged"


def test_a_newer_checkpoint_than_latest_names_and_a_link_to_another_disk_are_no_problem(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "study", "a", job_id=None)
    begin(run_dir)
    write_checkpoint(run_dir, 20).rename(tmp_path / "elsewhere")
    run_dir.checkpoint(20).symlink_to(tmp_path / "elsewhere")
    write_checkpoint(run_dir, 30, is_latest=False)
    status = run_status(run_dir, {})
    assert (status.step, status.problem) == (20, ""), "a restart takes the one in LATEST"


def test_a_checkpoint_of_a_newer_version_does_not_hide_the_state(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a", job_id=None)
    index = write_checkpoint(run_dir, 20) / INDEX_NAME
    write_json(index, json.loads(index.read_text()) | {"format_version": 99})
    with hold(run_dir):
        status = run_status(run_dir, {})
    assert status.state == "running"
    assert "was written by another version of this project" in status.problem


def test_a_finished_run_without_checkpoints_has_no_problem(tmp_path: Path) -> None:
    packed, tidied, damaged = (make_run(tmp_path, name, job_id=None) for name in ("packed", "tidied", "damaged"))
    for run_dir in (packed, tidied, damaged):
        write_json(run_dir.provenance, {"finished_step": 20, "starts": []})
    remove(write_checkpoint(tidied, 20))
    write_checkpoint(damaged, 10)
    cut(write_checkpoint(damaged, 20))
    statuses = [run_status(run_dir, {}) for run_dir in (packed, tidied, damaged)]
    assert [(status.state, status.step) for status in statuses] == [("finished", 20)] * 3
    assert [status.problem for status in statuses[:2]] == ["", ""]
    assert statuses[2].problem.startswith("LATEST names step 20, whose checkpoint is not whole")


def test_a_status_and_a_restart_take_the_same_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if training saves the next checkpoint, and removes the oldest one, while they look."""
    run_dir = make_run(tmp_path, "a", job_id=None)
    write_checkpoint(run_dir, 10)

    def check_late(directory: Path) -> object:
        if directory == run_dir.checkpoint(10) and directory.is_dir():
            write_checkpoint(run_dir, 20)
            shutil.rmtree(directory)
        return check_sizes(directory)

    monkeypatch.setattr(restore_module, "check_sizes", check_late)
    status = run_status(run_dir, {})
    assert (status.step, status.problem) == (20, "")
    assert restore_module.first_whole(run_dir, lambda step: check_whole(run_dir.checkpoint(step))).step == 20


def test_a_run_of_another_machine_is_not_called_killed(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a", job_id=None)
    begin(run_dir, host="elsewhere")
    assert state_of(run_dir) == ("unknown", "it was started on elsewhere, another machine; ask there")


def test_what_went_on_by_hand_after_its_job_is_not_told_from_the_job(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "a")
    log(run_dir, "ValueError: of the job\n")
    leave_outcome(run_dir, 0, "failed", "ValueError: of the job", seconds_ago=30)
    path = submission_of(run_dir).rank_log(run_dir, 0)
    os.utime(path, (time.time() - 30,) * 2)
    begin(run_dir, at=datetime.now(UTC) - timedelta(seconds=40))
    assert state_of(run_dir) == ("failed", "rank 0: ValueError: of the job")
    begin(run_dir, at=datetime.now(UTC) - timedelta(seconds=10))
    assert state_of(run_dir)[0] == "killed"
    with hold(run_dir):
        assert state_of(run_dir) == ("running", "without job 7_0, which has ended")
        assert state_of(run_dir, None)[0] == "running", "the lock is known without Slurm"


def test_only_what_was_submitted_can_be_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path, "a", job_id=None)
    note_end(run_dir, read_config(run_dir.config), "failed", "ValueError: no")
    monkeypatch.setattr(sys, "argv", ["launch/status.py", str(tmp_path), "--resubmit-failed"])
    monkeypatch.setattr(runs_module, "resubmit", lambda *_, **__: pytest.fail("it has no job"))
    status_module.main()
    assert capsys.readouterr().out.splitlines()[-1] == ("a was never submitted; start it again with its own command")


@pytest.mark.parametrize(
    ("error", "rank", "state", "reason"),
    [
        (StoppedError(5, "as SIGTERM asked"), 0, "stopped", "stopped after step 5, as SIGTERM asked; start it again"),
        (ValueError("of this rank"), 0, "failed", "ValueError: of this rank"),
        (UserError("of this rank"), 0, "failed", "UserError: of this rank"),
        (
            KeyboardInterrupt(),
            0,
            "stopped",
            "interrupted by a second Ctrl-C, which saves no checkpoint; start it again",
        ),
        (ValueError("of this rank"), 1, "failed", "rank 1: ValueError: of this rank"),
        (UserError("of this rank"), 1, "failed", "rank 1: UserError: of this rank"),
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), 1, "failed", "rank 1: RuntimeError: DataLo"),
        (RuntimeError("Connection closed by peer"), 1, "killed", "it ended without a message"),
        (StoppedError(5, "as SIGTERM asked"), 1, "killed", "it ended without a message"),
        (KeyboardInterrupt(), 1, "killed", "it ended without a message"),
    ],
)
def test_a_run_of_train_py_notes_why_it_ended(
    error: BaseException, rank: int, state: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path, "a", job_id=None)

    def fail(*_: object, **__: object) -> None:
        begin(run_dir)
        raise error

    monkeypatch.setattr(rank_module, "run", fail)
    numbers = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    for name, value in {**numbers, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(type(error)):
        rank_module.run_noting_its_end(read_config(run_dir.config), run_dir.path, command="")
    shown = state_of(run_dir)
    assert shown[0] == state
    assert shown[1].startswith(reason)
