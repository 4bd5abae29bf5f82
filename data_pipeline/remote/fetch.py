"""Fetch one file by fsspec: from http(s), s3, gs, az, hf, sftp, or any other scheme that it knows.

Guarantees: `fetch` returns within its time limits, and the file then has the expected size and hash.

fsspec works in a process that was forked, such as a worker of a DataLoader. obstore, which is faster, waits forever
there if the parent process has used it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import hashlib
import itertools
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import fsspec
from fsspec.asyn import AsyncFileSystem

from data_pipeline.core.errors import UserError

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.2  # between two looks at a download
_LONGEST_PAUSE: Final = 16.0  # seconds between two attempts
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BUSY_STATUS: Final = (408, 425, 429)  # of an answer of http; a later attempt may get the file
# Without this, aiohttp ends each download after five minutes. `_wait` has better limits.
_OPTIONS: Final[dict[str, Any]] = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=None)}}


@dataclass(frozen=True)
class Limits:
    """The limits of a fetch.

    Attributes:
        stall_seconds: an attempt that receives no byte for this time is given up.
        num_attempts: the largest number of attempts.
        deadline: the end of all attempts, in the time of `time.monotonic()`.
    """

    stall_seconds: float
    num_attempts: int
    deadline: float


@dataclass(frozen=True)
class Expected:
    """The size and the sha256 of a file before it is fetched; None if they are not known."""

    num_bytes: int | None = None
    sha256: str | None = None


class _AttemptError(Exception):
    """An attempt was given up, or delivered a part of the file."""


class _OtherFileError(_AttemptError):
    """An attempt delivered a file of the right size with another sha256."""


def fetch(url: str, path: Path, *, expected: Expected, limits: Limits) -> None:
    """Write the content at `url` to a file; try again after a pause if an attempt fails.

    Raises `UserError` with the reason of the last attempt: at once if another attempt would fail too, such as for a
    file that is not there, else when `limits` are reached. Raises `OSError` if the file cannot be written.
    """
    for attempt in itertools.count(1):
        try:
            _attempt(url, path, expected=expected, limits=limits)
            break
        except Exception as error:  # each kind of store has errors of its own
            if isinstance(error, OSError) and (error.errno in _DISK_FULL or error.filename == str(path)):
                raise
            pause = min(0.5 * 2.0 ** min(attempt - 1, 9), _LONGEST_PAUSE)
            is_last = attempt == limits.num_attempts or time.monotonic() + pause >= limits.deadline
            reason = str(error) if isinstance(error, _AttemptError) else f"{type(error).__name__}: {error}"
            if is_last or _is_final(error) or (isinstance(error, _OtherFileError) and attempt > 1):
                raise UserError(
                    f"{url} could not be fetched: {reason} (attempt {attempt}); check the location and the server that "
                    "holds it"
                ) from None
            logger.warning("%s: %s; attempt %d failed, the next one begins in %.3g s", url, reason, attempt, pause)
            time.sleep(pause)


def _is_final(error: Exception) -> bool:
    """Return whether another attempt would fail too: nothing is there, or access is denied."""
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500 and status not in _BUSY_STATUS:
        return True
    if isinstance(error, FileNotFoundError | PermissionError | ImportError | ValueError):
        return True
    return "Credentials" in type(error).__name__


def _attempt(url: str, path: Path, *, expected: Expected, limits: Limits) -> None:
    path.unlink(missing_ok=True)  # an attempt that was given up may still write to it
    download = _start(url, path)
    try:
        _wait(download, path, limits)
    finally:
        download.cancel()
    num_bytes = path.stat().st_size
    if expected.num_bytes not in (None, num_bytes):
        raise _AttemptError(f"it has {num_bytes} bytes, not {expected.num_bytes}")
    if expected.sha256 is not None:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                raise _OtherFileError("it is not the file that the manifest names by sha256")


def _start(url: str, path: Path) -> concurrent.futures.Future[None]:
    """Start to download a file in another thread: in that of fsspec if it can, which can cancel a download."""
    store, name = fsspec.url_to_fs(url, **(_OPTIONS if url.startswith("http") else {}))
    if isinstance(store, AsyncFileSystem):
        return asyncio.run_coroutine_threadsafe(store._get_file(name, str(path)), store.loop)
    download: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            store.get_file(name, str(path))
        except Exception as error:
            download.set_exception(error)
        else:
            download.set_result(None)

    download.set_running_or_notify_cancel()
    threading.Thread(target=run, name="fetch", daemon=True).start()
    return download


def _wait(download: concurrent.futures.Future[None], path: Path, limits: Limits) -> None:
    """Wait for a download; raise what it raises, or `_AttemptError` if it stalls or takes too long."""
    seen, last_byte = None, time.monotonic()
    while not concurrent.futures.wait([download], _POLL_SECONDS).done:
        now = time.monotonic()
        status = path.stat() if path.exists() else None
        written = None if status is None else (status.st_size, status.st_mtime_ns)
        if written != seen:
            seen, last_byte = written, now
        if now >= limits.deadline:
            raise _AttemptError("it did not come in the time for one file (data.remote.file_seconds)")
        if now >= last_byte + limits.stall_seconds:
            num_bytes = 0 if status is None else status.st_size
            raise _AttemptError(
                f"after {num_bytes} bytes, none came for {limits.stall_seconds:g} s (data.remote.stall_seconds)"
            )
    download.result()
