"""A lock that keeps two processes from writing into one directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from data_pipeline.core.errors import UserError

LOCK_NAME: Final = ".lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make a directory, and keep it locked while the block runs; the lock is free again when the process ends.

    Locks nothing on a file system without locks. Raises `UserError` if the directory cannot be written, or if another
    process holds the lock.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)  # a lock on NFS needs writing
    except OSError as error:
        raise UserError(f"{directory} cannot be written ({error.strerror}); choose another --out") from None
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another process is writing {directory}; wait for it, or choose another --out"
                ) from None
        yield
    finally:
        os.close(descriptor)
