"""Reading files that strangers may have made: regular files only, and never more than a bound."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes; symbolic links are followed.

    Raises `OSError` if `path` leads to no regular file. A pipe would wait for its writer, and a device may have no end.
    """
    _check_regular(path.stat().st_mode, path)
    # O_NONBLOCK: whoever replaces the file by a pipe right now must not make this wait.
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
        # As many bytes as there are now, and one to see that it grew: `read` takes memory for all that it is asked for.
        num_bytes = os.fstat(file.fileno()).st_size
        content = file.read(min(num_bytes, max_bytes) + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", str(path))
    return content


def _check_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
