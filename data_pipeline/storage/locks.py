"""A lock that keeps two processes from writing the same file or directory."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from data_pipeline.core.errors import UserError

LOCK_NAME: Final = ".lock"  # of a directory


@contextmanager
def locked(path: Path, *, waits: bool = False) -> Iterator[None]:
    """Hold the lock of a file, which is made, while the block runs; it is free again when the process ends.

    Locks nothing on a file system without locks. If another process holds the lock, waits or raises `UserError`.
    """
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing {path.parent}; wait for it, or choose another --out") from None
        except OSError:  # there are no locks
            pass
        try:
            yield
        finally:
            with suppress(OSError):  # as above
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a process forked since has the file open too
