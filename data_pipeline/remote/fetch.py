"""Fetch one file by fsspec: from http(s), s3, gs, az, hf, sftp, or any other scheme that it knows.

Guarantees: a fetched file has the expected size and hash. Times are limited by the libraries of the stores: `fetch`
sets the limits of http(s), and that of a whole file for every store that fsspec reads asynchronously, such as s3.

fsspec works in a process that was forked, such as a worker of a DataLoader. obstore, which is faster, waits forever
there if the parent process has used it.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import fsspec
from pydantic import Field

from data_pipeline.core.errors import UserError, without_secrets
from data_pipeline.core.schema import Gigabytes, Line, Schema, Seconds

logger = logging.getLogger(__name__)

_LONGEST_PAUSE: Final = 16.0  # seconds between two attempts
_BUSY_STATUS: Final = (408, 425, 429)  # of an answer of http; a later attempt may get the file


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
        stall_seconds: over http(s), an attempt that receives no byte for this time is given up. The packages of other
            stores have limits of their own.
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

    Raises `UserError` with the reason of the last attempt: at once if another attempt would fail too, such as for a
    file that is not there, else when a limit is reached.
    """
    deadline = time.monotonic() + config.file_seconds
    for attempt in itertools.count(1):
        try:
            _attempt(file, path, stall_seconds=config.stall_seconds, seconds=deadline - time.monotonic())
            return
        except Exception as error:  # each kind of store has errors of its own
            pause = min(0.5 * 2.0 ** min(attempt - 1, 9), _LONGEST_PAUSE)
            reason = without_secrets(f"{type(error).__name__}: {error}")  # a server may have redirected to a signed URL
            if attempt >= config.num_attempts or _is_final(error) or time.monotonic() + pause >= deadline:
                raise UserError(
                    f"{file.url} could not be fetched: {reason} (attempt {attempt}); check the location and the server "
                    "that holds it, or raise data.remote.stall_seconds or file_seconds"
                ) from None
            logger.warning("%s: %s; attempt %d failed, the next one begins in %.3g s", file.url, reason, attempt, pause)
            time.sleep(pause)


def _is_final(error: Exception) -> bool:
    """Return whether another attempt would fail too: access is denied, or nothing or another file is there."""
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500 and status not in _BUSY_STATUS:
        return True
    kinds = (PermissionError, FileNotFoundError, ImportError, ValueError)
    return isinstance(error, kinds) or "Credentials" in type(error).__name__


def _attempt(file: RemoteFile, path: Path, *, stall_seconds: float, seconds: float) -> None:
    import aiohttp  # here, because ranks with local data never need it

    options: dict[str, Any] = {}
    if file.url.startswith("http"):
        # By trust_env it uses the passwords in ~/.netrc, and the proxies that variables of the environment name.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=stall_seconds, sock_read=stall_seconds)
        options = {"client_kwargs": {"timeout": timeout, "trust_env": True}}
    store, name = fsspec.url_to_fs(file.url, **options)
    store.get_file(name, str(path), **({"timeout": seconds} if store.async_impl else {}))
    num_bytes = path.stat().st_size
    if file.num_bytes not in (None, num_bytes):
        raise EOFError(f"it has {num_bytes} bytes, not {file.num_bytes}")
    if file.sha256 is not None:
        with path.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != file.sha256:
                raise ValueError("it is not the file that the manifest names by sha256")
