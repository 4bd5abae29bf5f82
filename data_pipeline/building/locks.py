"""A lock that keeps two processes from writing into one directory."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from contextlib import suppress


def take_lock(descriptor: int, *, when_held: Callable[[], None]) -> None:
    """Lock an open file or directory until it is closed, which happens at the latest when the process ends.

    If another process holds the lock, calls `when_held`, which may raise, and then waits. Does nothing on a file system
    without locks.
    """
    with suppress(OSError):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            when_held()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
