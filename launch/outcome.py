"""Write and read how training ended, in small JSON files that the ranks write themselves.

A rank of a submitted job leaves LOGS/JOB_RANK_outcome.json. A run that was started by python or torchrun leaves
RUN_DIR/ended.json, written by its first rank, and RUN_DIR/ended_rank_K.json, written by rank K if an error of its own
ended it. The next start removes both. Invariant: reading a file of a run directory runs no code, follows no link out of
that directory and never blocks, even if a stranger wrote the directory.

If a rank fails, the others lose the connection to it and fail too. The times of the errors do not show which came
first, because the clocks of nodes differ, and because a rank notes its end after its connections are closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Schema, difference
from data_pipeline.storage.files import open_regular
from trainer.config import RunConfig, read_run_config
from trainer.run_dir import RunDir, is_held, write_json

_SAME_CAUSE_SECONDS = 300.0  # errors of several ranks within this time belong to one start; clocks differ by less
# The errors of a rank that has lost another one: by gloo, by torch.distributed, by NCCL in the last line of an error.
_LOST_ANOTHER = re.compile(
    r"(?:RuntimeError: (?!DataLoader worker)|Dist\w*Error: |(?!UserError: ).*\b[Cc]onnection (?:closed|reset)\b)"
)
_MAX_REASON = 4_000  # characters, because an exception may quote a whole tensor
_MAX_BYTES = 64_000

Ended = Literal["finished", "stopped", "failed"]


class RankOutcome(Schema):
    """The end of a rank: how it ended, when (seconds since 1970), and why, in one line."""

    ended: Ended
    at: float
    reason: str = ""


def outcome_path(logs: Path, *, job_id: str, rank: int) -> Path:
    """Return the path of the outcome of a rank of a job."""
    return logs / f"{job_id}_{rank}_outcome.json"


def write_outcome(path: Path, ended: Ended, reason: str = "") -> None:
    """Write how a rank has ended now.

    Ignores a failure to write, because the error that it would report matters more. Makes no directory: if it is gone,
    the run directory was moved.
    """
    if path.parent.is_dir():
        with contextlib.suppress(OSError):
            write_json(path, RankOutcome(ended=ended, at=time.time(), reason=reason[:_MAX_REASON]).model_dump())


def read_outcome(path: Path, *, inside: Path) -> RankOutcome | None:
    """Return the outcome at `path`, which must lie in `inside`; None if there is none or it is damaged."""
    text = read_end(path, inside=inside, max_bytes=_MAX_BYTES)
    if text is None:
        return None
    try:
        return RankOutcome.parse(json.loads(text), where=str(path))
    except (ValueError, RecursionError):  # no JSON, no outcome, or nested without end
        return None


def outcomes_of_job(logs: Path, *, job_id: str, inside: Path) -> Mapping[int, RankOutcome]:
    """Return the outcomes of a job by rank, for those ranks that left a readable one."""
    name = re.compile(rf"{re.escape(job_id)}_(\d{{1,7}})_outcome\.json")
    found = {}
    for path in logs.iterdir() if logs.is_dir() else ():
        match = name.fullmatch(path.name)
        if match is not None and (outcome := read_outcome(path, inside=inside)) is not None:
            found[int(match[1])] = outcome
    return found


def last_line(error: BaseException) -> str:
    """Return the last line that Python prints for an exception, without the name of its module.

    Examples:
        >>> last_line(ValueError("the loss is nan"))
        'ValueError: the loss is nan'
    """
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.splitlines()[-1].strip().removeprefix(f"{type(error).__module__}.")


def cause(outcomes: Mapping[int, RankOutcome]) -> tuple[int, RankOutcome] | None:
    """Return the error or stop that most likely caused the others, after the lowest rank that has it; None if none.

    It is the earliest that is not the loss of another rank, or else the earliest. Errors that are much older than the
    newest do not count.
    """
    errors = {rank: outcome for rank, outcome in sorted(outcomes.items()) if outcome.ended != "finished"}
    if not errors:
        return None
    newest = max(error.at for error in errors.values())
    recent = [error for error in errors.values() if newest - error.at <= _SAME_CAUSE_SECONDS]
    own = [error for error in recent if not _LOST_ANOTHER.match(error.reason)]
    first = min(own or recent, key=lambda error: error.at)
    return next(rank for rank, error in errors.items() if error.reason == first.reason), first


def note_end(run_dir: RunDir, config: RunConfig, ended: Ended, reason: str = "", *, rank: int = 0) -> None:
    """Write RUN_DIR/ended.json, or ended_rank_K.json for another rank, for a run that was started without a job.

    Writes nothing if the directory belongs to another config. Rank 0 writes nothing if another process trains there. In
    these cases this process was refused, and the run itself has not ended.
    """
    is_own = run_dir.config.is_file() and not difference(read_run_config(run_dir), config)
    if is_own and not (rank == 0 and is_held(run_dir)):  # rank 0 of the same run may hold it while another rank ends
        write_outcome(run_dir.ended(rank), ended, reason)


def how_it_ended(run_dir: RunDir, *, since: float) -> tuple[int, RankOutcome] | None:
    """Return how the last start of a run without a job ended early, and which rank says so; None if no rank does.

    `since` is when it started, by the clock of rank 0. The error of another rank comes before that of rank 0, which is
    mostly its consequence, unless rank 0 was stopped, has a `UserError` of its own, or has the same error.
    """
    found = {rank: read_outcome(path, inside=run_dir.path) for rank, path in run_dir.ends().items()}
    ends = {rank: end for rank, end in found.items() if end is not None and end.ended != "finished"}
    first = ends.pop(0, None)
    if first is not None and first.at < since:
        first = None
    oldest = (since if first is None else first.at) - _SAME_CAUSE_SECONDS
    others = {rank: end for rank, end in ends.items() if end.at >= oldest}
    if first is not None:
        is_its_own = first.ended == "stopped" or first.reason.startswith(f"{UserError.__name__}: ")
        if is_its_own or first.reason in {end.reason for end in others.values()}:
            return 0, first
    return cause(others) or (None if first is None else (0, first))


def read_end(path: Path, *, inside: Path, max_bytes: int) -> str | None:
    """Return the last `max_bytes` of a regular file; None if there is none, or if a link leads out of `inside`."""
    if not is_inside(path, inside):
        return None
    try:
        with open_regular(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            return os.pread(file.fileno(), max_bytes, max(0, num_bytes - max_bytes)).decode(errors="replace")
    except OSError:
        return None


def is_inside(path: Path, directory: Path) -> bool:
    """Tell whether `path` lies in `directory` once all links are followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory))
