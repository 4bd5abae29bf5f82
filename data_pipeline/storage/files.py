"""Read files that strangers may have made: regular files only, up to a bound."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes; symbolic links are followed.

    Raises `OSError` if `path` leads to no regular file. A pipe would wait for its writer, and a device may have no end.
    """
    _check_regular(path.stat().st_mode, path)
    # O_NONBLOCK: do not wait if the file is replaced by a pipe right now.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    try:
        _check_regular(os.fstat(file.fileno()).st_mode, path)
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a regular file; raises `OSError` if it is none, or holds more than `max_bytes`."""
    with open_regular(path) as file:
        # As many bytes as there are now, and one to see that it grew: `read` allocates all that it is asked for.
        num_bytes = os.fstat(file.fileno()).st_size
        content = file.read(min(num_bytes, max_bytes) + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", str(path))
    return content


@contextmanager
def map_regular(path: Path) -> Iterator[memoryview]:
    """Map a regular file into memory, to read. Raises `OSError` if `path` is not one."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield memoryview(b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            yield data


def _check_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
