"""Write and read RUN_DIR/ended.json: why the last start of a run ended before its last step.

If a rank fails, the others lose the connection to it and fail too. So only an error that is not such a consequence is
written, and only the first one. If all ranks of a start have merely lost another rank, there is no file: a rank died
without a word, for example by `kill -9` or because the machine had no memory left. The next start removes the file.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Schema, difference
from trainer.config import RunConfig, read_run_config
from trainer.distributed.environment import lost_another, read_env
from trainer.fault_tolerance.preemption import StoppedError
from trainer.run_dir import RunDir, is_held, read_object

_MAX_REASON = 4_000  # characters, because an exception may quote a whole tensor
_INTERRUPTED: Final = (
    "interrupted by a second Ctrl-C, which saves no checkpoint; start it again with the same command and it goes on "
    "from its newest one"
)


class End(Schema):
    """An early end: how and when (seconds since 1970) it came, of which rank, and why, in one line."""

    ended: Literal["stopped", "failed"]
    at: float
    rank: int
    reason: str


def read_end(run_dir: RunDir) -> End | None:
    """Return how the last start ended early; None if it left no word. Raises `UserError` for a damaged file."""
    if not run_dir.ended.is_file():
        return None
    return End.parse(read_object(run_dir.ended, mend="remove it"), where=str(run_dir.ended))


@contextlib.contextmanager
def noting_its_end(config: RunConfig, path: Path) -> Iterator[None]:
    """If the block ends early, write the reason into the run directory.

    Writes nothing if another process trains there, or if the directory belongs to another config: then this process was
    refused, and the run itself has not ended.
    """
    run_dir, rank = RunDir(path), read_env(os.environ).rank
    was_held = is_held(run_dir)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if not was_held and _belongs_to(run_dir, config):
            _note_end(run_dir, error, rank)
        raise


def _belongs_to(run_dir: RunDir, config: RunConfig) -> bool:
    try:
        return run_dir.config.is_file() and not difference(read_run_config(run_dir), config)
    except UserError:
        return False


def _note_end(run_dir: RunDir, error: BaseException, rank: int) -> None:
    """Write ended.json, unless another rank has done so. Ignores a full disk: the error at hand matters more."""
    if isinstance(error, StoppedError | KeyboardInterrupt):
        ended, reason = "stopped", _INTERRUPTED if isinstance(error, KeyboardInterrupt) else str(error)
    else:
        ended, reason = "failed", last_line(error)[:_MAX_REASON]
    if (ended == "stopped" and rank > 0) or lost_another(error):
        return
    end = End.parse({"ended": ended, "at": time.time(), "rank": rank, "reason": reason}, where="ended.json")
    with contextlib.suppress(OSError), run_dir.ended.open("x", encoding="utf-8") as file:
        file.write(end.model_dump_json())


def last_line(error: BaseException) -> str:
    """Return the last line that Python prints for an exception, without the name of its module.

    Examples:
        >>> last_line(ValueError("the loss is nan"))
        'ValueError: the loss is nan'
    """
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.splitlines()[-1].strip().removeprefix(f"{type(error).__module__}.")
