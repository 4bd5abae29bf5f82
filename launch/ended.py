"""RUN_DIR/ended.json: why the last start of a run ended before its last step.

If a rank fails, the others lose the connection to it and fail too. So only an error that is not such a consequence is
written, and only the first one. If all ranks of a start have merely lost another rank, there is no file: a rank died
without a word, for example by `kill -9` or because the machine had no memory left. The next start removes the file.
"""

from __future__ import annotations

from typing import Literal

from data_pipeline.core.schema import Schema
from trainer.run_dir import RunDir, read_object


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
