"""Find out the state of a run from squeue, from its lock and from the files of its run directory.

RUN_DIR/job.json names the job of a submitted run. Invariant: a run is never called failed while its job is in the queue
or a process trains in it. Invariant: no file of a run directory is trusted, because it may come from a stranger. Its
code is not run, no file outside of it (or of its study) is read, and every value is checked before it is used. Only a
checkpoint may lie elsewhere, behind a link to another disk: of it, only the index and the sizes of files are read.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import AwareDatetime, Field, PositiveInt
from submitit.core.utils import JobPaths

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Line, Schema
from data_pipeline.core.system import command_of
from data_pipeline.remote.cache import is_remote
from data_pipeline.storage.manifest import load_manifest
from launch.going_on import GoingOn, going_on
from launch.outcome import RankOutcome, cause, how_it_ended, is_inside, outcomes_of_job, read_end
from launch.resources import Resources
from launch.slurm_client import queued_jobs, was_cancelled
from trainer.data import DataConfig
from trainer.fault_tolerance.stalls import describe_stall
from trainer.run_dir import RunDir, is_held, write_json

State = Literal["pending", "waiting", "running", "finished", "failed", "stopped", "killed", "unknown"]

_LOG_END_BYTES = 20_000
_RECORD_BYTES = 1_000_000
_CANCELLED = "cancelled"
_CANCELLED_AGAIN = f"{_CANCELLED} while it waited to start again"
# Slurm also writes such a line for the STEP, but then a rank may have ended, whose end ends the others.
_CANCEL_LINE = re.compile(r"slurmstepd\S*: error: \*\*\* (JOB|STEP) \S+ ON \S+ CANCELLED AT \S+(.*?) \*\*\*")
_START_LINE = "Starting with JobEnvironment("  # submitit's first line in the log of each start
_RANK_DIED = re.compile(r"srun: error: \S+: tasks? [\d,-]+: ")


class Submission(Schema):
    """RUN_DIR/job.json: the job that trains this run, with the request to submit it again.

    home: the directory of the logs and the code, relative to the run directory: itself, or the directory of its study.
    host: the machine on which the job was submitted.
    """

    job_id: str = Field(pattern=r"^[0-9]{1,19}(_[0-9]{1,19})?$")
    executor: Literal["slurm", "local"]
    home: Literal[".", ".."]
    submitted_at: AwareDatetime
    at_a_time: PositiveInt
    resources: Resources
    host: Line

    @property
    def is_elsewhere(self) -> bool:
        """Tell whether only another machine knows the state of the job, because it is a process there."""
        return self.executor == "local" and self.host != socket.gethostname()

    def home_of(self, run_dir: RunDir) -> Path:
        return run_dir.path if self.home == "." else run_dir.path.parent

    def logs_of(self, run_dir: RunDir) -> Path:
        return self.home_of(run_dir) / "logs"

    def rank_log(self, run_dir: RunDir, rank: int) -> Path:
        """Return the log of a rank. In the log of rank 0 Slurm also writes about the job."""
        path: Path = JobPaths(self.logs_of(run_dir), job_id=self.job_id, task_id=rank).stdout
        return path


@dataclass(frozen=True)
class RunStatus:
    """The state of a run and the reason for it, its last step of all its steps, and the last loss.

    The last step is that of the log or of the newest whole checkpoint. A value that is not known is None.
    `problem` is one sentence if the newest checkpoint is not whole, else "".
    """

    state: State
    step: int | None
    num_steps: int | None
    loss: float | None
    reason: str
    problem: str = ""


def record(run_dir: RunDir, submission: Submission) -> None:
    write_json(run_dir.path / "job.json", submission.model_dump(mode="json"))


def last_submission(run_dir: RunDir) -> Submission | None:
    """Return the last submission of a run; None if there is none. Raises `UserError` if its file is damaged."""
    path = run_dir.path / "job.json"
    if not path.is_file():
        return None
    text = read_end(path, inside=run_dir.path, max_bytes=_RECORD_BYTES)
    if text is None:
        raise UserError(f"{path} cannot be read, or is a link that leads out of the run directory; remove it")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no valid JSON ({error}); remove it, and end its job by hand with scancel") from None
    return Submission.parse(value, where=str(path))


def queue_for(run_dirs: Iterable[RunDir]) -> dict[str, str] | None:
    """Return `queued_jobs` of these runs, without asking Slurm if none of them was submitted to it."""
    job_ids = []
    for run_dir in run_dirs:
        with contextlib.suppress(UserError):  # the status of this run says it
            submission = last_submission(run_dir)
            if submission is not None and submission.executor == "slurm":
                job_ids.append(submission.job_id)
    return queued_jobs(job_ids) if job_ids else {}


def in_queue(submission: Submission, queue: Mapping[str, str] | None) -> str | None:
    """Return the state of a job that has not ended; None if it has ended, or if this machine cannot know."""
    if submission.executor == "slurm":
        return None if queue is None else queue.get(submission.job_id)
    if submission.is_elsewhere:
        return None
    return "RUNNING" if is_job_here(submission.job_id) else None


def is_job_here(job_id: str) -> bool:
    """Tell whether a job of this machine runs. Its id is the process id of its controller."""
    command_line = command_of(job_id)
    return "submitit" in command_line or "launch.preloaded" in command_line


def refuse_if_active(run_dir: RunDir, queue: Mapping[str, str] | None) -> None:
    """Raise `UserError` if a job for this run waits or runs."""
    submission = last_submission(run_dir)
    state = None if submission is None else in_queue(submission, queue)
    if submission is not None and state is not None:
        end = f"scancel {submission.job_id}" if submission.executor == "slurm" else f"kill {submission.job_id}"
        raise UserError(
            f"job {submission.job_id} is {state} for {run_dir.path} already; wait for it, end it with `{end}`, or pass "
            "another --run-dir"
        )


def run_status(run_dir: RunDir, queue: Mapping[str, str] | None) -> RunStatus:
    """Return the status of a run; `queue` is from `queued_jobs`. Raises `UserError` if a file of the run is damaged."""
    config = run_dir.read_config()  # as data, because the code that registers its kinds may not be imported
    metrics = run_dir.read_last_metrics("train/loss")
    losses = [line["train/loss"] for line in metrics if "train/loss" in line]
    provenance = run_dir.read_provenance()
    newest = going_on(run_dir)
    ended = _state(run_dir, last_submission(run_dir), queue, provenance, newest)
    known = (metrics[-1]["step"] if metrics else 0, newest.step, provenance.get("finished_step"))
    return RunStatus(
        state=ended.state,
        step=max(step or 0 for step in known),
        num_steps=_num_steps(config),
        loss=losses[-1] if losses else None,
        reason=ended.reason,
        problem="" if ended.state == "finished" and not newest.has_directories else newest.problem,
    )


@dataclass(frozen=True)
class Standing:
    """A state, and the reason for it."""

    state: State
    reason: str = ""


@dataclass(frozen=True)
class _LastStart:
    """When (in seconds since 1970) and on which host the run last started to train, from provenance.json."""

    at: float
    host: str


def _state(
    run_dir: RunDir,
    submission: Submission | None,
    queue: Mapping[str, str] | None,
    provenance: Mapping[str, Any],
    newest: GoingOn,
) -> Standing:
    if submission is not None and (queued := in_queue(submission, queue)) is not None:
        if queued.startswith("PENDING"):
            if is_held(run_dir):
                return Standing("running", f"without job {submission.job_id}, which is {queued}")
            return Standing("waiting", queued)
        return Standing("running", "" if queued == "RUNNING" else queued)
    if is_held(run_dir):
        return Standing("running", "" if submission is None else f"without job {submission.job_id}, which has ended")
    if "finished_step" in provenance:
        return Standing("finished")
    start = _last_start(provenance)
    if submission is None or _is_newer(start, submission, run_dir):
        return _how_it_ended_without_a_job(run_dir, start, newest)
    if submission.executor == "slurm" and queue is None:
        return Standing("unknown", "there is no squeue on this machine; ask on a login node of the cluster")
    if submission.is_elsewhere:
        return Standing("unknown", f"it was started on {submission.host}, another machine; ask there")
    return _how_the_job_ended(run_dir, submission, start)


def _is_newer(start: _LastStart | None, submission: Submission, run_dir: RunDir) -> bool:
    """Tell whether the run was started by hand after its job: the log of the job ends before that start."""
    if start is None or start.at <= submission.submitted_at.timestamp():
        return False
    log = submission.rank_log(run_dir, 0)
    return not log.is_file() or log.stat().st_mtime < start.at


def _how_it_ended_without_a_job(run_dir: RunDir, start: _LastStart | None, newest: GoingOn) -> Standing:
    """Return the standing of an unfinished run of python or torchrun that no process trains any more."""
    since = start.at if start is not None else 0.0
    rank, outcome = how_it_ended(run_dir, since=since) or (0, None)
    if stalled := describe_stall(run_dir, since=since):
        return Standing("failed", stalled)
    if outcome is not None and rank > 0:
        return Standing(outcome.ended, f"rank {rank}: {outcome.reason}")
    if outcome is not None:
        return Standing(outcome.ended, outcome.reason)
    if start is None and (newest.has_begun or _has_metrics(run_dir)):
        return Standing("unknown", f"provenance.json is damaged or missing, though the run has begun; {newest.advice}")
    if start is None:
        return Standing("pending", "not started")
    if start.host != platform.node():
        return Standing("unknown", f"it was started on {start.host}, another machine; ask there")
    return Standing("killed", f"it ended without a message; {newest.advice}")


def _has_metrics(run_dir: RunDir) -> bool:
    return run_dir.metrics.is_file() and run_dir.metrics.stat().st_size > 0


def _how_the_job_ended(run_dir: RunDir, submission: Submission, start: _LastStart | None) -> Standing:
    """Return how the job of an unfinished run ended; `start` is when the run last started to train."""
    home, log = submission.home_of(run_dir), submission.rank_log(run_dir, 0)
    lines = _lines_of_last_start(read_end(log, inside=home, max_bytes=_LOG_END_BYTES) or "")
    cancelled = _cancelled(lines)
    if cancelled is not None and cancelled.reason == _CANCELLED_AGAIN:  # what ended the start before is past
        return cancelled
    since = max(submission.submitted_at.timestamp(), start.at if start is not None else 0.0)
    if stalled := describe_stall(run_dir, since=since):
        return Standing("failed", stalled)
    if found := first_error(run_dir, submission):
        rank, error = found
        return Standing(error.ended, error.reason if error.ended == "stopped" else f"rank {rank}: {error.reason}")
    if not log.is_file():
        was_it = was_cancelled(submission.job_id) if submission.executor == "slurm" else False
        if was_it or (was_it is None and _others_have_logs(submission, log)):
            return Standing("stopped", f"{_CANCELLED} while it waited")
        return Standing(
            "failed", f"no log: it was cancelled while it waited, or the nodes cannot write to {log.parent}"
        )
    if not is_inside(log, home):
        return Standing("failed", f"{log} leads out of {home}, and such a link is not followed; read it yourself")
    return cancelled or Standing("failed", _error_in_log(lines))


def _others_have_logs(submission: Submission, log: Path) -> bool:
    """Tell whether another job of an array has a log, so that the nodes can write logs."""
    array, is_member, _ = submission.job_id.partition("_")
    return bool(is_member) and any(log.parent.glob(f"{array}_*_{log.name.removeprefix(f'{submission.job_id}_')}"))


def _lines_of_last_start(text: str) -> list[str]:
    """Return the lines of a log that are not empty, from the last start of the job on."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if _START_LINE in line]
    return lines[starts[-1] :] if starts else lines


def _cancelled(lines: Sequence[str]) -> Standing | None:
    """Return how Slurm ended the job, from its last line about that in the log; None if it did not."""
    matches = [match for line in lines if (match := _CANCEL_LINE.search(line)) and match[1] == "JOB"]
    if not matches:
        return None
    why = matches[-1][2].strip().lower()
    if "time limit" in why:
        return Standing("failed", "its time limit was reached")
    if "requeue" in why:  # it is no longer in the queue
        return Standing("stopped", _CANCELLED_AGAIN)
    return Standing("stopped", f"{_CANCELLED} {why}".rstrip())


def _error_in_log(lines: Sequence[str]) -> str:
    """Return the line of a log that best says why the job failed: an error, or the first rank that died."""
    wrong = [line for line in lines if re.search(r"\b\w*(?:[Ee]rror|Exception)\b|Killed|oom", line)]
    deaths = [line for line in wrong if _RANK_DIED.match(line)]
    errors = [line for line in wrong if line not in deaths and not _CANCEL_LINE.search(line)]
    return (errors[-1:] or deaths[:1] or lines[-1:] or ["its log is empty"])[0]


def _last_start(provenance: Mapping[str, Any]) -> _LastStart | None:
    """Return the last start of a run; None if it has not started to train, or if its record does not say when."""
    starts = provenance.get("starts")
    last = starts[-1] if isinstance(starts, list) and starts else None
    if not isinstance(last, dict):
        return None
    try:
        return _LastStart(datetime.fromisoformat(str(last.get("started_at"))).timestamp(), str(last.get("host")))
    except (ValueError, OverflowError):
        return None


def first_error(run_dir: RunDir, submission: Submission) -> tuple[int, RankOutcome] | None:
    """Return what `cause` finds in the outcomes of a job: the error that caused the others, after its rank."""
    return cause(
        outcomes_of_job(submission.logs_of(run_dir), job_id=submission.job_id, inside=submission.home_of(run_dir))
    )


def _num_steps(config: Mapping[str, Any]) -> int | None:
    """Return the number of steps of a run; None if its data are not here, such as data on a network."""
    try:
        data = DataConfig.parse(config["data"], where="data")
        locations = data.train_locations.values()
        if any(map(is_remote, locations)):
            return None
        num_samples = sum(load_manifest(Path(location)).num_samples for location in locations)
        num_steps = config["num_epochs"] * data.num_steps_per_epoch(num_samples, config["global_batch_size"])
    except (KeyError, TypeError, UserError):
        return None
    return int(num_steps)
