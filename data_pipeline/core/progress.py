"""Show the progress of a long job: a bar on a terminal, a plain line every few seconds in a log."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any, ClassVar, Self, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 10.0


class _Stderr:
    """The stderr that drops what it cannot write: a terminal that has closed is no reason to end a job."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def _bar_on_stderr() -> RichProgress:
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(file=cast(IO[str], _Stderr())),
        redirect_stdout=sys.stdout.isatty(),  # what goes to a file or a pipe stays out of the terminal
    )


class Progress:
    """A count up to `total` on stderr. `advance` may set a short note such as the loss, which stays until the next.

    Prints nothing if `enabled` is False, as on every rank but the first. One that begins while another runs is a second
    line below it.
    """

    _shown: ClassVar[RichProgress | None] = None  # on the terminal, which takes one at a time

    def __init__(self, title: str, *, total: int, start: int = 0, enabled: bool = True) -> None:
        self._stop_reporting = threading.Event()
        self._reporter: threading.Thread | None = None
        self._title, self._total, self._done, self._first = title, total, start, start
        self._points: list[tuple[float, int]] = []  # when how much was done: at the first advance, and at each line
        self._started = self._last_line = self._last_advance = time.monotonic()
        self._enabled = enabled
        self._note = ""
        self._bar: RichProgress | None = None
        self._is_inner = Progress._shown is not None
        if enabled and sys.stderr.isatty():
            self._bar = Progress._shown or _bar_on_stderr()
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
            left = (self._total - self._done) / max(self._rate(now), 1e-9)
            ending = f", {left:.0f} s left" if self._done < self._total else f" in {now - self._started:.0f} s"
            tail = f", {self._note}" if self._note else ""
            self._print(f"{ending}{tail}")
            self._points.append((now, self._done))
        elif not self._points:
            self._points.append((now, self._done))

    def _rate(self, now: float) -> float:
        """Return the speed of the last half of the time, without the first advance, which may hold a compilation."""
        if not self._points:
            return (self._done - self._first) / max(now - self._started, 1e-9)
        middle = (self._points[0][0] + now) / 2
        began, done = [point for point in self._points if point[0] <= middle][-1]
        return (self._done - done) / max(now - began, 1e-9)

    def show_while_waiting(self, status: Callable[[], str]) -> None:
        """From now on, print `status()` when nothing has advanced for ten seconds.

        Another thread calls `status`, until the progress ends. Only the first call of this method has an effect.
        """
        if self._enabled and self._reporter is None:
            self._reporter = threading.Thread(target=self._report, args=(status,), name="progress", daemon=True)
            self._reporter.start()

    def _report(self, status: Callable[[], str]) -> None:
        while not self._stop_reporting.wait(
            max(0.05, self._last_sign_of_life() + SECONDS_BETWEEN_LINES - time.monotonic())
        ):
            if time.monotonic() - self._last_sign_of_life() < SECONDS_BETWEEN_LINES:
                continue
            self._last_line = time.monotonic()
            if self._bar is not None:
                self._bar.update(self._task, note=status())
            else:
                self._print(f", {status()}")

    def _last_sign_of_life(self) -> float:
        """Return the time of the last line or advance."""
        return max(self._last_line, self._last_advance)

    def _print(self, what: str) -> None:
        with contextlib.suppress(OSError):  # a closed stderr is no reason to end the job
            print(f"{self._title}: {self._done}/{self._total}{what}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self._bar is not None and not self._is_inner:
            Progress._shown = self._bar
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop_reporting.set()
        if self._reporter is not None:
            self._reporter.join()
        if self._bar is not None and self._is_inner:
            self._bar.remove_task(self._task)
        elif self._bar is not None:
            Progress._shown = None
            self._bar.stop()
