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
        self._first: tuple[float, int] | None = None  # when the first advance ended, and what was done by then

    def advance(self, num: int = 1, *, note: str = "") -> None:
        now = time.monotonic()
        self._done += num
        self._note = note or self._note
        self._first = self._first or (now, self._done)
        if now - self._last_line > SECONDS_BETWEEN_LINES and self._done < self._total:
            self._last_line = now
            self._print(f", {(self._total - self._done) / max(self._rate(now), 1e-9):.0f} s left")

    def _rate(self, now: float) -> float:
        """Return the speed since the first advance, which may hold a compilation; until then, since the beginning."""
        began, done = self._first or (self._began, self._start)
        if done == self._done:
            began, done = self._began, self._start
        return (self._done - done) / max(now - began, 1e-9)

    def _print(self, what: str) -> None:
        if self._enabled:
            note = f", {self._note}" if self._note else ""
            print(f"{self._title}: {self._done}/{self._total}{what}{note}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._done > self._start:
            self._print(f" in {time.monotonic() - self._began:.0f} s")
