"""Cache the files of remote datasets on this machine.

`FileCache.path` returns the path of a checked copy, so a remote shard is read like a local one.

Guarantees: a reader never gets part of a file, nor a file that is not the one in the manifest.

Copies lie in `ROOT/dataset-HASH/`. HASH is computed from the content of the dataset, so the cache cannot serve stale
files. All processes of a machine share the cache: one of them fetches a file, and the others wait for it.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.remote.fetch import RemoteConfig, RemoteFile, fetch
from data_pipeline.storage.locations import MANIFEST_NAME, dataset_directory, is_remote, refuse_secrets
from data_pipeline.storage.locks import locked
from data_pipeline.storage.manifest import Manifest, load_manifest, parse_manifest

logger = logging.getLogger(__name__)

_MANIFEST_ATTEMPTS: Final = 3  # so that a mistyped location is told soon
_DEFAULT_GIGABYTES: Final = 4.0  # limit without a cache_dir: /tmp is small, and in memory on some machines


def file_url(location: str, name: str) -> str:
    """Return the URL of one file of a dataset.

    Examples:
        >>> file_url("http://host/cifar/", "manifest.json")
        'http://host/cifar/manifest.json'
    """
    return f"{location.rstrip('/')}/{name}"


def read_manifest(location: str | Path, *, config: RemoteConfig) -> Manifest:
    """Read the manifest of a local or remote dataset.

    Raises `UserError` if it is missing, cannot be fetched or is not valid, and like `refuse_secrets`.
    """
    if not is_remote(location):
        return load_manifest(location)
    refuse_secrets(location)
    location = str(location)
    url = file_url(location, MANIFEST_NAME)
    soon = config.model_copy(update={"num_attempts": min(config.num_attempts, _MANIFEST_ATTEMPTS)})
    with tempfile.TemporaryDirectory(prefix="manifest-") as directory:
        path = Path(directory, MANIFEST_NAME)
        fetch(RemoteFile(url), path, config=soon)
        return parse_manifest(path.read_bytes(), where=url)


def path_beside(location: str | Path, name: str, manifest: Manifest, *, config: RemoteConfig) -> Path:
    """Return the local path of a file beside the manifest of a dataset; fetch it first if the dataset is remote."""
    if not is_remote(location):
        return dataset_directory(location) / name
    location = str(location)
    cache = FileCache(location, sha256=manifest.sha256, config=config)
    return cache.path(name, RemoteFile(file_url(location, name), sha256=manifest.files[name].sha256))


class FileCache:
    """The files of one remote dataset as local paths; each file is fetched when it is first used.

    May be forked and pickled. `location` names the dataset in messages; `sha256` is the hash of its manifest.

    Raises `OSError` if the cache cannot be written.
    """

    def __init__(self, location: str, *, sha256: str, config: RemoteConfig) -> None:
        # Before workers are forked: in one that is forked while a thread imports it, the import would never end.
        import aiohttp  # noqa: F401

        self.location, self._config = location, config
        gigabytes = config.cache_gigabytes
        if config.cache_dir is not None:
            self._root = Path(config.cache_dir).expanduser().absolute()
        else:
            self._root = Path(tempfile.gettempdir(), f"feature-dropout-{os.getuid()}")
            gigabytes = gigabytes or _DEFAULT_GIGABYTES
        self._limit = None if gigabytes is None else int(gigabytes * 1e9)
        self._directory = self._root / f"dataset-{sha256[:16]}"
        self._num_prefetches = 0
        self._root.mkdir(mode=0o700 if config.cache_dir is None else 0o777, parents=True, exist_ok=True)
        self._directory.mkdir(exist_ok=True)

    def max_files(self, num_bytes_S: NDArray[np.int64]) -> int | None:
        """Return how many of the largest files of these sizes the cache can hold at once; None if it can hold all.

        Raises `UserError` if it cannot hold one.
        """
        totals_S = np.cumsum(np.sort(num_bytes_S)[::-1])
        if self._limit is None or totals_S[-1] <= self._limit:
            return None
        if not (num := int(np.searchsorted(totals_S, self._limit, side="right"))):
            raise UserError(
                f"the largest shard of {self.location} takes {totals_S[0] / 1e9:.3g} GB, and the cache may hold "
                f"{self._limit / 1e9:.3g} GB; raise data.remote.cache_gigabytes"
            )
        return num

    def path(self, name: str, file: RemoteFile) -> Path:
        """Return the local path of a file, whose copy gets a name; fetch it if it is not cached.

        Another process may evict the file at any time. A mapped or open file stays readable; if the path is gone, call
        this again.

        Raises `UserError` if the file cannot be fetched in time.
        """
        path = self._directory / name
        while True:
            if not _is_cached(path, file):
                self._fetch(path, file)
            try:
                os.utime(path)  # now the last used
            except FileNotFoundError:
                continue
            except OSError:  # another user's file in a shared cache
                pass
            return path

    def prefetch(self, files: Iterable[tuple[str, RemoteFile]]) -> None:
        """Fetch these files in the background, in this order; drop the files of an earlier call that still wait.

        Never raises; a later `path` meets the same problem and raises. Fetching evicts the least recently used files,
        so these files and the files in use should together be at most `max_files`.
        """
        self._num_prefetches += 1
        threading.Thread(target=self._fetch_ahead, args=(files, self._num_prefetches), daemon=True).start()

    def _fetch_ahead(self, files: Iterable[tuple[str, RemoteFile]], number: int) -> None:
        """Fetch files until a later call of `prefetch` than the one of this number."""
        for name, file in files:
            if number != self._num_prefetches:
                return
            try:
                self.path(name, file)
            except (UserError, OSError) as error:
                logger.info("could not prefetch %s: %s", name, error)

    def _fetch(self, path: Path, file: RemoteFile) -> None:
        """Fetch one file, or wait for the process that is fetching it."""
        partial = path.with_name(f".{path.name}.partial")
        self._directory.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}.lock"), waits=True):
            if _is_cached(path, file):
                return
            start = time.monotonic()
            fetch(file, partial, config=self._config)
            with partial.open("rb") as whole:
                os.fsync(whole.fileno())  # a later run checks only the size, also after a power cut
                num_bytes = os.fstat(whole.fileno()).st_size
            partial.replace(path)
            self._evict()
        seconds = time.monotonic() - start
        logger.info("fetched %s of %s: %.1f MB in %.1f s", path.name, self.location, num_bytes / 1e6, seconds)

    def _evict(self) -> None:
        """Evict the least recently used files until the others fit under the limit."""
        if self._limit is None:
            return
        files = sorted(_files(self._root))
        excess = sum(num_bytes for _, num_bytes, _ in files) - self._limit
        for _, num_bytes, path in files:
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= num_bytes


def _files(root: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield time of last use, size and path of each file of the cache, but locks and what somebody is fetching."""
    for path in root.glob("dataset-*/*"):
        if re.fullmatch(r"dataset-[0-9a-f]{16}", path.parent.name) and path.suffix not in (".lock", ".partial"):
            with suppress(FileNotFoundError):
                status = path.lstat()
                yield status.st_mtime_ns, status.st_size, path


def _is_cached(path: Path, file: RemoteFile) -> bool:
    """Return whether a file is cached. It was whole when it got its name; its size shows later damage."""
    try:
        return file.num_bytes in (None, path.stat().st_size)
    except FileNotFoundError:
        return False
