"""Keep a command alive whose terminal has closed, or which was started without stdout or stderr."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import Any, TextIO


class UncheckedStream:
    """A text stream that drops what it cannot write: a terminal that has closed is no reason to end a job."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def guard_standard_streams() -> None:
    """Give a command an stdin, stdout and stderr that it can use, whatever started it.

    A closed one becomes /dev/null. Otherwise the next file that is opened would get its number, and what a C library
    writes to stderr would land in that file. Errors of a terminal are dropped, because its window may be closed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = _usable(sys.stdout, 1)
    sys.stderr = _usable(sys.stderr, 2)


def _usable(stream: TextIO | None, descriptor: int) -> Any:
    if stream is None:  # Python has found the descriptor closed
        return open(descriptor, "w", encoding="utf-8", closefd=False)
    return UncheckedStream(stream) if stream.isatty() else stream


def reader_of_stdout_has_ended() -> bool:
    """Return whether stdout is a pipe that nothing reads any more, as after `| head -1`."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def drop_stdout() -> None:
    """Send what is left of stdout to /dev/null, so that Python's last flush does not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
