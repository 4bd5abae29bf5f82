"""Fetch one file by fsspec: from http(s), s3, gs, az, hf, sftp, or any other scheme that it knows.

Guarantees: `fetch` returns within its time limits, and the file then has the expected size and hash.

fsspec works in a process that was forked, such as a worker of a DataLoader. obstore, which is faster, waits forever
there if the parent process has used it.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import fsspec
from pydantic import Field

from data_pipeline.core.errors import UserError, without_secrets
from data_pipeline.core.schema import Gigabytes, Line, Schema, Seconds

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.2  # between two looks at a download
_LONGEST_PAUSE: Final = 16.0  # seconds between two attempts
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BUSY_STATUS: Final = (408, 425, 429)  # of an answer of http; a later attempt may get the file
_DENIED_STATUS: Final = (401, 403)
_delivered: set[str] = set()  # the servers that have delivered a file to this process, or to its parent before the fork


@dataclass(frozen=True)
class RemoteFile:
    """A remote file: where it is, and its size and sha256, None if they are not known before it is fetched."""

    url: str
    num_bytes: int | None = None
    sha256: str | None = None


class RemoteConfig(Schema):
    """The settings for fetching and caching a remote dataset. A local dataset ignores them.

    Attributes:
        cache_dir: the directory that keeps copies for later runs. Without it, copies lie in the directory for temporary
            files.
        cache_gigabytes: the size of the cache, in 10**9 bytes. When it is full, the least recently used files are
            evicted; files that are being fetched come on top. None means no limit with a `cache_dir`, and 4 without.
        stall_seconds: an attempt that receives no byte for this time is given up.
        file_seconds: the time for all attempts at one file together.
        num_attempts: the number of attempts at a file, with pauses of 0.5, 1, 2, ... up to 16 seconds between them.
    """

    cache_dir: Line | None = None
    cache_gigabytes: Gigabytes | None = None
    stall_seconds: Seconds = 30.0
    file_seconds: Seconds = 600.0
    num_attempts: Annotated[int, Field(ge=1, le=1_000)] = 10


def fetch(file: RemoteFile, path: Path, *, config: RemoteConfig) -> None:
    """Write a remote file to a path; try again after a pause if an attempt fails, within the limits of `config`.

    A server that has delivered a file before and then denies access is asked until the limit of time, each time with
    credentials that are read again, because credentials may expire during a run.

    Raises `UserError` with the reason of the last attempt: at once if another attempt would fail too, such as for a
    file that is not there, else when a limit is reached. Raises `OSError` if the file cannot be written.
    """
    deadline = time.monotonic() + config.file_seconds
    scheme, _, name = file.url.partition("://")
    server = f"{scheme}://{name.partition('/')[0]}"
    for attempt in itertools.count(1):
        try:
            _attempt(file, path, stall_seconds=config.stall_seconds, deadline=deadline)
            _delivered.add(server)
            return
        except Exception as error:  # each kind of store has errors of its own
            if isinstance(error, OSError) and (error.errno in _DISK_FULL or error.filename == str(path)):
                raise
            pause = min(0.5 * 2.0 ** min(attempt - 1, 9), _LONGEST_PAUSE)
            reason = str(error) if isinstance(error, _AttemptError) else f"{type(error).__name__}: {error}"
            reason = without_secrets(reason)  # a server may have redirected to a signed URL
            has_expired = _is_denied(error) and server in _delivered
            is_final = not has_expired and (attempt >= config.num_attempts or _is_denied(error) or _is_final(error))
            if is_final or time.monotonic() + pause >= deadline:
                raise UserError(
                    f"{file.url} could not be fetched: {reason} (attempt {attempt}); check the location and the server "
                    "that holds it"
                ) from None
            logger.warning("%s: %s; attempt %d failed, the next one begins in %.3g s", file.url, reason, attempt, pause)
            time.sleep(pause)
            fsspec.get_filesystem_class(scheme).clear_instance_cache()  # the next one reads its credentials


class _AttemptError(Exception):
    """An attempt was given up, or delivered a part of the file."""


class _OtherFileError(_AttemptError):
    """An attempt delivered a file of the right size with another sha256."""


def _is_denied(error: Exception) -> bool:
    """Return whether the server does not accept the credentials, or there are none."""
    is_denied = isinstance(error, PermissionError) or getattr(error, "status", None) in _DENIED_STATUS
    return is_denied or "Credentials" in type(error).__name__


def _is_final(error: Exception) -> bool:
    """Return whether another attempt would fail too, because nothing or another file is there."""
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500 and status not in _BUSY_STATUS:
        return True
    return isinstance(error, _OtherFileError | FileNotFoundError | ImportError | ValueError)


def _attempt(file: RemoteFile, path: Path, *, stall_seconds: float, deadline: float) -> None:
    path.unlink(missing_ok=True)  # an attempt that was given up may still write to the file of before
    download: Future[None] = Future()
    threading.Thread(target=_download, args=(file.url, path, download), name="fetch", daemon=True).start()
    _wait(download, path, stall_seconds=stall_seconds, deadline=deadline)
    num_bytes = path.stat().st_size
    if file.num_bytes not in (None, num_bytes):
        raise _AttemptError(f"it has {num_bytes} bytes, not {file.num_bytes}")
    if file.sha256 is not None:
        with path.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != file.sha256:
                raise _OtherFileError("it is not the file that the manifest names by sha256")


def _download(url: str, path: Path, download: Future[None]) -> None:
    import aiohttp  # here, because ranks with local data never need it

    # Without this limit, aiohttp ends each download after five minutes. `_wait` has better ones. By trust_env it uses
    # the passwords in ~/.netrc, and the proxies that variables of the environment name.
    client = {"timeout": aiohttp.ClientTimeout(total=None), "trust_env": True}
    try:
        store, name = fsspec.url_to_fs(url, **({"client_kwargs": client} if url.startswith("http") else {}))
        store.get_file(name, str(path))
    except BaseException as error:
        download.set_exception(error)
    else:
        download.set_result(None)


def _wait(download: Future[None], path: Path, *, stall_seconds: float, deadline: float) -> None:
    """Wait for a download; raise what it raises, or `_AttemptError` if it stalls or takes too long."""
    seen, last_byte = None, time.monotonic()
    while not wait([download], _POLL_SECONDS).done:
        now = time.monotonic()
        status = path.stat() if path.exists() else None
        written = None if status is None else (status.st_size, status.st_mtime_ns)
        if written != seen:
            seen, last_byte = written, now
        if now >= deadline:
            raise _AttemptError("it did not come in the time for one file (data.remote.file_seconds)")
        if now >= last_byte + stall_seconds:
            num_bytes = 0 if status is None else status.st_size
            raise _AttemptError(
                f"after {num_bytes} bytes, none came for {stall_seconds:g} s (data.remote.stall_seconds)"
            )
    download.result()
