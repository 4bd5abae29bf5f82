"""Show the progress of a long job in plain lines on stderr, which fit a log and a terminal."""

from __future__ import annotations

import sys
import time
from typing import Final, Self

SECONDS_BETWEEN_LINES: Final = 10.0


class Progress:
    """A count up to `total` on stderr: a line every ten seconds, and one at the end.

    `advance` may set a short note such as the loss, which stays until the next. Prints nothing if `enabled` is False,
    as on every rank but the first.
    """

    def __init__(self, title: str, *, total: int, start: int = 0, enabled: bool = True) -> None:
        self._title, self._total, self._start, self._done = title, total, start, start
        self._enabled = enabled
        self._note = ""
        self._began = self._last_line = time.monotonic()
        self._timed_from: tuple[float, int] | None = None  # time and count of the first advance, which may compile

    def advance(self, num: int = 1, *, note: str = "") -> None:
        now = time.monotonic()
        self._done += num
        self._note = note or self._note
        if now - self._last_line > SECONDS_BETWEEN_LINES and self._done < self._total:
            self._last_line = now
            began, done = self._timed_from or (self._began, self._start)
            left = (now - began) * (self._total - self._done) / max(self._done - done, 1)
            self._print(f", {left:.0f} s left")
        self._timed_from = self._timed_from or (now, self._done)

    def _print(self, what: str) -> None:
        if self._enabled:
            note = f", {self._note}" if self._note else ""
            print(f"{self._title}: {self._done}/{self._total}{what}{note}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._done > self._start:
            self._print(f" in {time.monotonic() - self._began:.0f} s")
