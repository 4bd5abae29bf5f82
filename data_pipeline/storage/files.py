"""Read files that a stranger may have made: only regular files, only up to a size, and tars only into their folder."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from data_pipeline.core.errors import UserError


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes; symbolic links are followed.

    Raises `OSError` if `path` is not a regular file: a pipe would wait for its writer, and a device may have no end.
    """
    _check_regular(path.stat().st_mode, path)
    # O_NONBLOCK: if a pipe has replaced the file since, do not wait for its writer.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    try:
        _check_regular(os.fstat(file.fileno()).st_mode, path)
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a file. Raises `OSError` if it is not regular or holds more than `max_bytes`."""
    with open_regular(path) as file:
        # Asks for the present size, because `read` allocates as much as it is asked for. One more byte shows growth.
        num_bytes = os.fstat(file.fileno()).st_size
        content = file.read(min(num_bytes, max_bytes) + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", str(path))
    return content


def regular_size(path: Path) -> int | None:
    """Return the size of a regular file in bytes; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


@contextmanager
def map_regular(path: Path) -> Iterator[memoryview]:
    """Map a regular file into memory for reading. Raises `OSError` if `path` is not a regular file.

    A part of the view that outlives the block keeps the file mapped until it is freed.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield memoryview(b"")
            return
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        data = memoryview(mapped)
        try:
            yield data
        finally:
            with suppress(BufferError):  # a part is still in use, for example in the frames of an error
                data.release()
                mapped.close()


def unpack_tar(tar: tarfile.TarFile, directory: Path, members: Iterable[tarfile.TarInfo] | None = None) -> None:
    """Write the files of a tar, or only `members`, below `directory`.

    Raises `UserError` if a member is neither a file nor a directory, or would be written elsewhere.
    """
    chosen = list(tar if members is None else members)
    for member in chosen:
        path = PurePosixPath(member.name)
        if not (member.isfile() or member.isdir()) or path.is_absolute() or ".." in path.parts:
            raise UserError(f"the tar has a member {member.name!r} that is a link, or is written outside {directory}")
    # Python 3.11 before 3.11.4, such as Debian 12's, has no filters; newer ones want to be told one.
    tar.extraction_filter = getattr(tarfile, "data_filter", None)
    tar.extractall(directory, members=chosen)


def _check_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
