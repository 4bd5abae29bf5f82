"""Show the progress of a long job: a bar on a terminal, a plain line every few seconds in a log."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts up to `total`; `advance` may carry a short note such as the loss, which stays until the next.

    Writes to stderr. `enabled=False` (every rank but the first) prints nothing.
    """

    def __init__(self, title: str, *, total: int, start: int = 0, enabled: bool = True) -> None:
        self._stop_telling = threading.Event()
        self._teller: threading.Thread | None = None
        self._title, self._total, self._done, self._first = title, total, start, start
        self._started = self._last_line = self._last_advance = time.monotonic()
        self._enabled = enabled
        self._note = ""
        self._bar: RichProgress | None = None
        if enabled and sys.stderr.isatty():
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._task = self._bar.add_task(title, total=total, completed=start, note="")

    def advance(self, num: int = 1, *, note: str = "") -> None:
        self._done += num
        self._last_advance = time.monotonic()
        self._note = note or self._note
        if self._bar is not None:
            self._bar.update(self._task, advance=num, note=self._note)
            return
        now = time.monotonic()
        if self._enabled and (now - self._last_line > SECONDS_BETWEEN_LINES or self._done == self._total):
            self._last_line = now
            rate = (self._done - self._first) / max(now - self._started, 1e-9)
            left = (self._total - self._done) / max(rate, 1e-9)
            ending = f", {left:.0f} s left" if self._done < self._total else f" in {now - self._started:.0f} s"
            tail = f", {self._note}" if self._note else ""
            self._print(f"{ending}{tail}")

    def tell_meanwhile(self, doing: Callable[[], str]) -> None:
        """Also print `doing()` when nothing has advanced for ten seconds, until the block ends.

        Another thread calls `doing`. Only the first call of this method has an effect.
        """
        if self._enabled and self._teller is None:
            self._teller = threading.Thread(target=self._tell, args=(doing,), name="progress", daemon=True)
            self._teller.start()

    def _tell(self, doing: Callable[[], str]) -> None:
        while not self._stop_telling.wait(max(0.05, self._told_at() + SECONDS_BETWEEN_LINES - time.monotonic())):
            if time.monotonic() - self._told_at() < SECONDS_BETWEEN_LINES:
                continue
            self._last_line = time.monotonic()
            if self._bar is not None:
                self._bar.update(self._task, note=doing())
            else:
                self._print(f", {doing()}")

    def _told_at(self) -> float:
        """Return the last time at which a reader could see that the job goes on."""
        return max(self._last_line, self._last_advance)

    def _print(self, what: str) -> None:
        with contextlib.suppress(OSError):  # stderr is closed: no reason to end the job
            print(f"{self._title}: {self._done}/{self._total}{what}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop_telling.set()
        if self._teller is not None:
            self._teller.join()
        if self._bar is not None:
            self._bar.stop()
