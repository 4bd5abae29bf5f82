"""Find out the state of a run: from squeue, its lock, its ended.json, and the last sign of life in metrics.jsonl."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from data_pipeline.core.errors import UserError
from launch.ended import read_end
from launch.slurm_client import has_ended
from launch.submitted import Submission, last_submission
from trainer.fault_tolerance.stalls import describe_stall
from trainer.run_dir import RunDir, is_held, runs_of

State = Literal["pending", "waiting", "running", "finished", "failed", "stopped", "killed", "unknown"]

LEFT_ALONE: Final = frozenset({"finished", "waiting", "running"})  # states of runs that are not started again
_QUIET_MINUTES = 10  # after so long without a logged step, the state of a running run says so
_MAX_REASON = 500  # characters that are shown


@dataclass(frozen=True)
class RunStatus:
    """The state of a run and the reason for it, its last step of all its steps, and the last loss.

    The last step is that of the log or of the newest checkpoint. A value that is not known is None.
    """

    state: State
    step: int | None = None
    num_steps: int | None = None
    loss: float | None = None
    reason: str = ""


def status_of(run_dir: RunDir, queue: Mapping[str, str] | None) -> RunStatus:
    """Return the status of a run; `queue` is from `queue_for`.

    Its state is `unknown` if one of its files is damaged or cannot be read.
    """
    if not run_dir.config.is_file():
        return RunStatus("pending", reason="not started")
    try:
        metrics, provenance, latest = run_dir.read_last_metrics(), run_dir.read_provenance(), run_dir.latest_step()
        state, reason = _state(run_dir, queue, provenance)
    except (UserError, OSError) as error:
        return RunStatus("unknown", reason=str(error))
    losses = [line["train/loss"] for line in metrics if "train/loss" in line]
    known = (metrics[-1]["step"] if metrics else 0, latest, provenance.get("finished_step"))
    return RunStatus(
        state,
        step=max(step or 0 for step in known),
        num_steps=provenance.get("num_steps"),
        loss=losses[-1] if losses else None,
        reason=reason,
    )


def _state(run_dir: RunDir, queue: Mapping[str, str] | None, provenance: Mapping[str, Any]) -> tuple[State, str]:
    """Return the state and the reason for it. A run has not failed while its job is queued or a process trains it."""
    submission = last_submission(run_dir)
    said = "" if submission is None or queue is None else queue.get(submission.job_id, "")
    is_queued = bool(said) and not has_ended(said)
    if is_held(run_dir) or (is_queued and not said.startswith("PENDING")):
        minutes = _minutes(run_dir)
        return "running", "" if minutes < _QUIET_MINUTES else f"its last step is {minutes} min ago"
    if is_queued:
        return "waiting", said
    if "finished_step" in provenance:
        return "finished", ""
    if submission is not None and queue is None:
        return "unknown", "there is no squeue on this machine; ask on a login node of the cluster"
    if (end := read_end(run_dir)) is not None:
        return end.ended, end.reason if end.rank == 0 else f"rank {end.rank}: {end.reason}"
    start: Mapping[str, Any] = next(reversed(provenance.get("starts", [])), {})
    if start:
        since = datetime.fromisoformat(start["started_at"]).timestamp()
        if (stalled := describe_stall(run_dir, since=since)) is not None:
            return "failed", stalled
    if submission is not None:
        return _how_the_job_ended(submission, said)
    if not start:
        return "pending", "not started"
    if start.get("host") != platform.node():
        return "unknown", f"it was started on {start.get('host')}, and its last step is {_minutes(run_dir)} min ago"
    step = run_dir.latest_step()
    where = "the start" if step is None else f"step {step}"
    return "killed", f"it ended without a message {_minutes(run_dir)} min ago; the same command goes on from {where}"


def _how_the_job_ended(submission: Submission, said: str) -> tuple[State, str]:
    """Return how the job ended of which no rank has said why: it was cancelled, or a rank was killed.

    said: its state, if Slurm knows it; else "".
    """
    log = submission.log
    if said.startswith("CANCELLED"):
        return "stopped", "cancelled"
    if not log.is_file():
        return "failed", f"no log: it was cancelled while it waited, or the nodes cannot write to {log.parent}"
    slurm = f" (Slurm says {said})" if said else ""
    return "failed", f"a rank died without a message, such as one that was killed{slurm}; see the end of {log}"


def _minutes(run_dir: RunDir) -> int:
    """Return the minutes since the last step was logged, or since the start."""
    beats = [path.stat().st_mtime for path in (run_dir.metrics, run_dir.provenance) if path.is_file()]
    return int((time.time() - max(beats, default=time.time())) / 60)


def runs_in(paths: Sequence[Path]) -> list[RunDir]:
    """Return the run at each path, or the runs in it by name. Raises `UserError` if a path holds none."""
    found = [RunDir(path) for path in runs_of(paths)]
    for run_dir in found:
        if not run_dir.config.is_file():
            raise UserError(f"{run_dir.path} holds no run; pass a --run-dir or --study-dir of launch/slurm.py")
    return found


def table(statuses: Iterable[tuple[str, RunStatus]]) -> str:
    """Return a table with a line for each run. A step is shown as "done/all", or "done/?" if all is not known."""
    rows = [["run", "state", "step", "loss", "reason"]]
    for name, status in statuses:
        step = "" if status.step is None else f"{status.step}/{'?' if status.num_steps is None else status.num_steps}"
        loss = "" if status.loss is None else f"{status.loss:.4f}"
        rows.append([name, status.state, step, loss, " ".join(status.reason.split())[:_MAX_REASON]])
    return "\n".join(in_columns(rows))


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
