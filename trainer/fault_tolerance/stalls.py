"""Name the rank that held up the others, from the files that the watchdogs of all ranks left."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from typing import Final

from trainer.run_dir import RunDir

# Files of the Python frames in which a rank sends to others or waits for them.
_COLLECTIVES: Final = re.compile(r"torch/distributed/|distributed/collectives|deepspeed/comm/")
# Innermost frames of a rank that waits for others: in a collective, a backward pass that sends gradients, or its GPU.
_WAITS: Final = re.compile(rf"{_COLLECTIVES.pattern}|torch/cuda/|_engine_run_backward")
_NUM_FRAMES: Final = 4


@dataclass(frozen=True)
class _Left:
    """The file of one rank: a line that describes it, and its stacks or its last exception, or neither."""

    header: str
    body: str

    @property
    def is_frozen(self) -> bool:
        """Return whether its watchdog ended it."""
        return self.body.startswith("Timeout (")

    @property
    def waits(self) -> bool:
        """Return whether its main thread waited for other ranks."""
        if self.is_frozen:  # the main thread is the last one, with its innermost frame first
            main = self.body.split("\nThread ")[-1]
            frames = [line for line in main.splitlines() if line.startswith("  File ")][:_NUM_FRAMES]
        else:
            frames = [line for line in self.body.splitlines() if line.startswith("  File ")][-_NUM_FRAMES:]
        return any(_WAITS.search(frame) for frame in frames)


def describe_stall(run_dir: RunDir, *, since: float = 0.0) -> str | None:
    """Return a sentence on the ranks that held up the others, from files that were written after `since`.

    Returns None if no rank was frozen or killed, or if the error of a rank explains the end.
    """
    paths = [path for path in sorted(run_dir.stalled.glob("rank_*.txt")) if path.stat().st_mtime >= since]
    left = [_Left(*_split(path.read_text(encoding="utf-8", errors="replace"))) for path in paths]
    answered = [each for each in left if each.body]
    if not answered or any(not each.waits and not each.is_frozen for each in answered):
        return None
    signs = {
        "left no stacks, so it was stopped or killed": [each for each in left if not each.body],
        "gave no sign of life, and did not wait for another rank": [each for each in answered if not each.waits],
        "waited for others or for its GPU": [each for each in answered if each.is_frozen],
    }
    for sign, ranks in signs.items():
        if ranks:
            return f"{'; '.join(each.header for each in ranks[:4])} {sign} (see {run_dir.stalled})"
    return None


def _split(text: str) -> tuple[str, str]:
    header, _, body = text.partition("\n")
    return header.rstrip(), body.strip()


def lost_another(error: BaseException) -> bool:
    """Tell whether an error is the consequence of another rank's end: torch has raised it inside a collective.

    The words of such an error depend on the moment and the backend. An error of this rank itself is raised elsewhere.
    """
    if not isinstance(error, RuntimeError) or error.__traceback__ is None:
        return False
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return _COLLECTIVES.search(innermost.f_code.co_filename) is not None
