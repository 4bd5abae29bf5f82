"""What has become of a run that was submitted: by what squeue says, and by what lies in its run directory.

RUN_DIR/job.json names the job. What may never happen: a run that is called failed while its job is still in the queue.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from submitit.core.utils import JobPaths, pickle_load

from data_pipeline.errors import UserError
from data_pipeline.manifest import load_manifest
from data_pipeline.remote import is_remote
from data_pipeline.schema import Schema
from data_pipeline.stream import num_steps_per_epoch
from launch.resources import Resources
from trainer.config import RunConfig, read_config
from trainer.rundir import RunDir, write_json

State = Literal["pending", "waiting", "running", "finished", "failed", "stopped", "unknown"]

SQUEUE_SECONDS = 60
_SAME_CAUSE_SECONDS = 300.0  # the errors of several ranks so close together have one cause: the first of them
_LOG_END_BYTES = 20_000
_STOPPED, _CANCELLED = "stopped after step", "cancelled"
_CANCEL_LINE = re.compile(r"slurmstepd: error: \*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+(.*?) \*\*\*")


class Submission(Schema):
    """RUN_DIR/job.json: the job that trains this run, and all that is needed to submit the same again.

    `host` is where it was submitted; None in records of an earlier version of this code, which are taken to be of here.
    """

    job_id: str
    executor: Literal["slurm", "local"]
    logs: str
    submitted_at: str
    home: str
    at_a_time: int
    resources: Resources
    host: str | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether only another machine knows what has become of it: a local job is one of that machine's processes."""
        return self.executor == "local" and self.host not in {None, socket.gethostname()}

    @property
    def log(self) -> Path:
        """That of rank 0, and of Slurm about the job."""
        return self.rank_log(0)

    def rank_log(self, rank: int) -> Path:
        path: Path = JobPaths(self.logs, job_id=self.job_id, task_id=rank).stdout
        return path


@dataclass(frozen=True)
class RunStatus:
    """A run's state, its last logged step of all its steps (None: not known), the last loss, and why it is so."""

    state: State
    step: int | None
    num_steps: int | None
    loss: float | None
    reason: str


def record(run_dir: RunDir, submission: Submission) -> None:
    write_json(run_dir.path / "job.json", submission.model_dump(mode="json"))


def last_submission(run_dir: RunDir) -> Submission | None:
    """The last one of this run; None if it was never submitted. Raises `UserError` if its file is damaged."""
    path = run_dir.path / "job.json"
    if not path.is_file():
        return None
    try:
        return Submission.parse(json.loads(path.read_text()), where=str(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is no valid JSON ({error}); remove it, and end its job by hand with scancel") from None


def queued_jobs() -> dict[str, str] | None:
    """Of every job of this user in the queue, by its id, the state and the reason; None where there is no squeue.

    Each member of a job array has an id of its own, such as 12_3. Raises `UserError` if squeue gets no answer.
    """
    if shutil.which("squeue") is None:
        return None
    command = ["squeue", "--noheader", "--array", "--user", getpass.getuser(), "--format", "%i|%T|%r"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"squeue gave no answer within {SQUEUE_SECONDS} s; try again") from None
    if done.returncode:
        raise UserError(f"squeue failed ({' '.join(done.stderr.split())}); try again when Slurm answers")
    return parse_queue(done.stdout)


def queue_for(run_dirs: Iterable[RunDir]) -> dict[str, str] | None:
    """`queued_jobs`, but Slurm is left alone where none of these runs was ever submitted to it."""
    submissions = [last_submission(run_dir) for run_dir in run_dirs]
    if any(submission is not None and submission.executor == "slurm" for submission in submissions):
        return queued_jobs()
    return {}


def parse_queue(text: str) -> dict[str, str]:
    """Lines of `%i|%T|%r`.

    Examples:
        >>> parse_queue("12_0|RUNNING|None\\n12_1|PENDING|JobArrayTaskLimit\\n")
        {'12_0': 'RUNNING', '12_1': 'PENDING (JobArrayTaskLimit)'}
    """
    found = {}
    for line in text.splitlines():
        job_id, state, reason = (part.strip() for part in line.split("|", 2))
        found[job_id] = state if reason == "None" else f"{state} ({reason})"
    return found


def in_queue(submission: Submission, queue: Mapping[str, str] | None) -> str | None:
    """What is known of a job that has not ended; None if it has, or if nothing can be known of it here."""
    if submission.executor == "slurm":
        return None if queue is None else queue.get(submission.job_id)
    if submission.is_elsewhere:
        return None
    command_line = Path("/proc", submission.job_id, "cmdline")  # its id is that of a process of this machine
    try:
        return "RUNNING" if b"submitit" in command_line.read_bytes() else None
    except OSError:
        return None


def refuse_if_active(run_dir: RunDir, queue: Mapping[str, str] | None) -> None:
    """Raises `UserError` if a job for this run waits or runs."""
    submission = last_submission(run_dir)
    state = None if submission is None else in_queue(submission, queue)
    if submission is not None and state is not None:
        end = f"scancel {submission.job_id}" if submission.executor == "slurm" else f"kill {submission.job_id}"
        raise UserError(
            f"job {submission.job_id} is {state} for {run_dir.path} already; wait for it, end it with `{end}`, or pass "
            "another --run-dir"
        )


def run_status(run_dir: RunDir, queue: Mapping[str, str] | None) -> RunStatus:
    """Where a run stands, `queue` being what `queued_jobs` gave."""
    config = read_config(run_dir.config)
    metrics = run_dir.read_metrics()
    losses = [line["train/loss"] for line in metrics if "train/loss" in line]
    submission = last_submission(run_dir)
    provenance = json.loads(run_dir.provenance.read_text()) if run_dir.provenance.is_file() else {}
    state, reason = _state(run_dir, submission, queue, provenance)
    return RunStatus(
        state=state,
        step=max(metrics[-1]["step"] if metrics else 0, run_dir.latest_step() or 0),
        num_steps=_num_steps(config),
        loss=losses[-1] if losses else None,
        reason=reason,
    )


def _state(
    run_dir: RunDir, submission: Submission | None, queue: Mapping[str, str] | None, provenance: Mapping[str, Any]
) -> tuple[State, str]:
    if submission is not None and (queued := in_queue(submission, queue)) is not None:
        if queued.startswith("PENDING"):
            return "waiting", queued
        return "running", "" if queued == "RUNNING" else queued
    if "finished_step" in provenance:
        return "finished", ""
    if submission is None:
        return "pending", "not submitted"
    if submission.executor == "slurm" and queue is None:
        return "unknown", "there is no squeue on this machine; ask on a login node of the cluster"
    if submission.is_elsewhere:
        return "unknown", f"it was started on {submission.host}, another machine; ask there"
    starts = provenance.get("starts", [])
    reason = why_it_ended(run_dir, submission, last_start=starts[-1]["started_at"] if starts else None)
    return ("stopped" if reason.startswith((_STOPPED, _CANCELLED)) else "failed"), reason


def why_it_ended(run_dir: RunDir, submission: Submission, *, last_start: str | None = None) -> str:
    """One line about a job that has ended before the run was finished; `last_start` is when it last began to train."""
    since = max(datetime.fromisoformat(text).timestamp() for text in (submission.submitted_at, last_start) if text)
    stalled = run_dir.path / "stalled.txt"
    if stalled.is_file() and stalled.stat().st_mtime >= since:
        return f"{_first_line(stalled.read_text())} (see {stalled})"
    if error := first_error(submission):
        return error.line if error.line.startswith(_STOPPED) else f"rank {error.rank}: {error.line}"
    text = _end_of(submission.log)
    if text is None:
        if submission.executor == "slurm" and _was_cancelled(submission.job_id):
            return f"{_CANCELLED} while it waited"
        return f"no log: it was cancelled while it waited, or the nodes cannot write to {submission.logs}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        if match := _CANCEL_LINE.search(line):
            return "its time limit was reached" if "TIME LIMIT" in match[1] else f"{_CANCELLED}{match[1].lower()}"
    wrong = [line for line in lines if re.search(r"\b\w*(?:[Ee]rror|Exception)\b|Killed|oom", line)]
    return (wrong or lines or ["its log is empty"])[-1]


def _was_cancelled(job_id: str) -> bool:
    """By slurmctld, which forgets a job minutes after its end, else by the accounting, which many clusters lack."""
    ways = (("scontrol", "show", "job"), ("sacct", "--noheader", "--allocations", "--format=State", "--jobs"))
    for command in ways:
        if shutil.which(command[0]) is None:
            continue
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run([*command, job_id], capture_output=True, text=True, timeout=SQUEUE_SECONDS)
            if re.search(r"^\s*(?:JobState=)?CANCELLED\b", done.stdout, re.MULTILINE):
                return True
    return False


@dataclass(frozen=True)
class RankError:
    """The last line of the exception that ended a rank."""

    rank: int
    line: str


def first_error(submission: Submission) -> RankError | None:
    """The first exception, which the others follow from, and the lowest rank that raised it; None if none is known."""
    errors: list[tuple[float, int, str]] = []
    for rank in range(submission.resources.num_ranks):
        path = JobPaths(submission.logs, job_id=submission.job_id, task_id=rank).result_pickle
        if not path.is_file():
            continue
        outcome, result = pickle_load(path)
        if outcome == "error" and str(result).strip():
            errors.append((path.stat().st_mtime, rank, str(result).strip().splitlines()[-1]))
    if not errors:
        return None
    newest = max(errors)[0]
    first = min(error for error in errors if newest - error[0] <= _SAME_CAUSE_SECONDS)[2]
    return RankError(min(rank for _, rank, line in errors if line == first), first)


def _num_steps(config: RunConfig) -> int | None:
    """None where the data cannot be asked, as from another directory or over a network."""
    if is_remote(config.data.train_dir):
        return None
    try:
        num_samples = load_manifest(Path(config.data.train_dir)).num_samples
    except UserError:
        return None
    return config.num_epochs * num_steps_per_epoch(num_samples, config.global_batch_size)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _end_of(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_END_BYTES))
        return file.read().decode(errors="replace")
