"""Cache the files of remote datasets, which come from http(s) or from a command that prints a file.

`RemoteShards.path` returns the path of a checked copy on this machine, so a remote shard is read like a local one.

Guarantees: a reader never gets part of a file, nor a file that is not the one in the manifest, and never waits forever.

Copies lie in `ROOT/dataset-HASH/`. HASH is computed from the content of the dataset, so the cache cannot serve stale
files. All processes of a machine share the cache.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_pipeline.core.environment import with_home
from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Gigabytes, Line, Schema, Seconds
from data_pipeline.remote.fetch import OBJECT_STORES, Expected, Limits, fetch, json_problem
from data_pipeline.storage.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    OVERLAY_NAME,
    SHARD_TABLE_NAME,
    SOURCE_DIGESTS_NAME,
    Manifest,
    is_plain_name,
    parse_manifest,
)
from data_pipeline.storage.shard_list import ListedShards, ShardList, ShardTable
from data_pipeline.storage.shards import index_num_bytes, index_path, index_row_bytes

logger = logging.getLogger(__name__)

_SCHEMES: Final = ("http", "https", "pipe", *OBJECT_STORES)
_SPOOL_GIGABYTES: Final = 4.0  # limit without a cache_dir: /tmp is small, and in memory on some machines
_SPOOL_LOCK_SECONDS: Final = 60.0
_DISK_REFUSES: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOLCK)
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RemoteConfig(Schema):
    """The settings for fetching and caching a remote dataset. A local dataset ignores them.

    Attributes:
        cache_dir: the directory that keeps copies for later runs. Without it, copies lie in the directory for temporary
            files, and the last process that reads the dataset removes them when it ends.
        cache_gigabytes: the largest size of the cache, in 10**9 bytes; the least recently used files are evicted. None
            means no limit with a `cache_dir`, and 4 without.
        stall_seconds: an attempt that receives no byte for this time is given up.
        file_seconds: the time for all attempts at one file together.
        num_attempts: the number of attempts at a file that get a wrong answer or only a part of one, with pauses of
            0.5, 1, 2, ... up to 8 seconds between them. A web server that breaks down or is busy (5xx, 429) is waited
            for until `file_seconds`, with such pauses or those that it asks for (Retry-After).
        read_back_from: the file from which the location was read; None if the user typed it. Not a setting:
            `trainer.config.read_config` sets it, whatever the file says, for `refuse_untyped_command`.
    """

    cache_dir: Line | None = None
    cache_gigabytes: Gigabytes | None = None
    stall_seconds: Seconds = 30.0
    file_seconds: Seconds = 600.0
    num_attempts: Annotated[int, Field(ge=1, le=1_000)] = 5
    read_back_from: Line | None = Field(default=None, exclude=True)


def is_remote(location: str | Path) -> bool:
    """Return whether `location` is remote; a `Path` is always a local directory.

    Examples:
        >>> is_remote("https://host/cifar"), is_remote("pipe:cat /archive/{name}"), is_remote("data/cifar")
        (True, True, False)
    """
    return isinstance(location, str) and re.match(r"pipe:|[a-z][a-z0-9+.-]*://", location) is not None


def is_command(location: str) -> bool:
    """Return whether reading from `location` runs a shell command.

    Examples:
        >>> is_command("pipe:cat /archive/{name}"), is_command("https://host/cifar")
        (True, False)
    """
    return is_remote(location) and location.startswith("pipe:")


def refuse_untyped_command(location: str, config: RemoteConfig) -> None:
    """Raise `UserError` if `location` is a command from a file, because a stranger may have written the file."""
    if is_command(location) and config.read_back_from is not None:
        raise UserError(
            f"{config.read_back_from} names the location {location!r}, a command that this machine would run; pass "
            "--allow-pipe if you trust the writer of that file"
        )


def file_url(location: str, name: str) -> str:
    """Return the URL of one file of a dataset: the file name replaces `{name}` in `location`, or is appended.

    Raises `UserError` if `location` is not remote, or if `name` is not a plain file name, because it becomes part of a
    path and of a shell command.

    Examples:
        >>> file_url("http://host/cifar/", "manifest.json")
        'http://host/cifar/manifest.json'
        >>> file_url("pipe:aws s3 cp s3://bucket/{name} -", "shard-00000.tar")
        'pipe:aws s3 cp s3://bucket/shard-00000.tar -'
    """
    scheme, _, rest = location.partition(":")
    if scheme not in _SCHEMES or not rest.strip("/ "):
        raise UserError(
            f"{location} is not a location of a dataset; give a directory, http(s)://HOST/DIR, s3://BUCKET/DIR, "
            "or pipe:COMMAND with {name} where the file name goes"
        )
    if not is_plain_name(name):
        raise UserError(f"{location} cannot have a file {name!r}, which is not a plain file name; rename it there")
    if "{name}" in location:
        return location.replace("{name}", name)
    if scheme == "pipe" or "?" in location:
        raise UserError(f"{location} lacks {{name}}; put it where the name of a file goes")
    return f"{location.rstrip('/')}/{name}"


def fetch_manifest(location: str, *, config: RemoteConfig) -> Manifest:
    """Fetch the manifest of a remote dataset. Raises `UserError` if it cannot be fetched or is not valid."""
    expected = Expected(problem=json_problem, max_bytes=MAX_MANIFEST_BYTES)
    with fetched(location, MANIFEST_NAME, expected=expected, config=config, must_answer=True) as file:
        return parse_manifest(file.read(), where=file_url(location, MANIFEST_NAME))


@contextmanager
def fetched(
    location: str, name: str, *, expected: Expected, config: RemoteConfig, must_answer: bool = False
) -> Iterator[BinaryIO]:
    """Fetch one file of a remote dataset, without the cache, into a temporary file that is open inside the block.

    Raises `UserError` if the file cannot be fetched or is not as `expected`. With `must_answer`, raises it at the first
    attempt if the host cannot be found or reached.
    """
    with tempfile.TemporaryFile() as file:
        fetch(
            file_url(location, name), file, expected=expected, limits=replace(_limits(config), must_answer=must_answer)
        )
        file.seek(0)
        yield file


def _limits(config: RemoteConfig, stop: threading.Event | None = None) -> Limits:
    return Limits(
        stall_seconds=config.stall_seconds,
        num_attempts=config.num_attempts,
        deadline=time.monotonic() + config.file_seconds,
        stop=stop or threading.Event(),
    )


@dataclass(frozen=True)
class RemoteFile:
    """A file of a remote dataset: where it is, and what is known of it.

    Attributes:
        index_url, index: the index that may lie beside a shard; None if there is none.
    """

    url: str
    expected: Expected
    index_url: str = ""
    index: Expected | None = None

    @property
    def is_shard(self) -> bool:
        """Return whether the file counts for the size of the cache, which may then evict it."""
        return self.expected.num_bytes is not None

    @property
    def num_bytes(self) -> int:
        """Return the size of a shard with its index."""
        return sum(each.num_bytes or 0 for each in (self.expected, self.index) if each is not None)


class FileCache:
    """The files of one remote dataset as local paths; each file is fetched when it is first used.

    May be forked and pickled. All processes of a machine share the copies, and only one process fetches a file.

    Args:
        location: of the dataset, for messages.
        find: returns the file whose copy gets a plain name; None if there is none.
        shard_bytes_S: (S,) int64, the size of each shard with its index.
        sha256: of what identifies the dataset.

    Raises `UserError` if the disk has no room for the cache.
    """

    def __init__(
        self,
        location: str,
        find: Callable[[str], RemoteFile | None],
        *,
        shard_bytes_S: NDArray[np.int64],
        sha256: str,
        config: RemoteConfig,
    ) -> None:
        self.location = location
        self._config, self._find, self._shard_bytes_S = config, find, shard_bytes_S
        dataset = sha256[:16]
        gigabytes = config.cache_gigabytes
        if config.cache_dir is not None:
            self._root = with_home(config.cache_dir).absolute()
        else:
            self._root = Path(tempfile.gettempdir(), f"feature-dropout-{os.getuid()}-{dataset}")
            gigabytes = gigabytes or _SPOOL_GIGABYTES
        self._is_spool = config.cache_dir is None
        self._limit = None if gigabytes is None else int(gigabytes * 1e9)
        self._directory = self._root / f"dataset-{dataset}"
        self._may_have_index = True
        self._prefetcher: _Prefetcher | None = None
        self._make_directories()
        self._check_room()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prefetcher": None}

    @cached_property
    def max_shards(self) -> int | None:
        """Return the number of the largest shards that the cache can hold at once; None if it can hold all shards."""
        totals_S = np.cumsum(np.sort(self._shard_bytes_S)[::-1])
        if self._limit is None or not totals_S.size or totals_S[-1] <= self._limit:
            return None
        return int(np.searchsorted(totals_S, self._limit, side="right"))

    def path(self, name: str, *, stop: threading.Event | None = None) -> Path:
        """Return the local path of a shard, of the file of an online overlay, or of the source digests.

        Fetches the file if it is not cached, and with a shard its index if the location has one. Another process may
        evict the file at any time. A mapped or open file stays readable; if the path is gone, call this again.

        Raises `UserError` if the file cannot be fetched in time, if the disk is full, or when `stop` is set.
        """
        if (file := self._find(name)) is None:
            raise ValueError(f"the dataset at {self.location} has no file {name!r}")
        path, expected = self._directory / name, file.expected
        while True:
            if not _is_cached(path, expected):
                self._fetch(name, file, limits=_limits(self._config, stop))
            now = time.time_ns()
            try:
                os.utime(path, ns=(now, now))
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                # Another user's file in a shared cache, or a disk that is mounted read-only.
            return path

    def prefetch(self, names: Iterable[str]) -> None:
        """Fetch these files in the background, in this order; drop the files of an earlier call that still wait.

        Never raises; a later `path` meets the same problem and raises. Fetching evicts the least recently used files,
        so these files and the files in use should together be at most `max_shards`.
        """
        if self._prefetcher is None or self._prefetcher.process_id != os.getpid():  # a thread does not survive a fork
            self._prefetcher = _Prefetcher(self)
        self._prefetcher.replace(names)

    def _check_room(self) -> None:
        """Raise `UserError` if the cache or its disk is too small, before training starts."""
        if self.max_shards == 0:
            largest = int(self._shard_bytes_S.max())
            raise UserError(
                f"the largest shard of {self.location} takes {largest / 1e9:.3g} GB, but the cache may hold only "
                f"{(self._limit or 0) / 1e9:.3g} GB; raise data.remote.cache_gigabytes"
            )
        with self._disk_errors_as_user_errors():
            free = shutil.disk_usage(self._root).free
        files = _files(self._root)
        missing = int(self._shard_bytes_S.sum())
        missing -= sum(file.num_bytes for file in files if file.path.parent == self._directory)
        if self._limit is not None:
            missing = min(missing, self._limit - sum(file.num_bytes for file in files))
        if missing > free:
            raise UserError(
                f"the cache {self._root} needs {missing / 1e9:.3g} GB more for {self.location}, but its disk has "
                f"{free / 1e9:.3g} GB free; free some, set data.remote.cache_dir to another disk or lower "
                "data.remote.cache_gigabytes"
            )

    def _make_directories(self) -> None:
        with self._disk_errors_as_user_errors():
            if self._is_spool:
                _hold_spool(self._root)
            self._directory.mkdir(parents=True, exist_ok=True)

    def _fetch(self, name: str, wanted: RemoteFile, *, limits: Limits) -> None:
        """Fetch one file, or wait for the process that is fetching it."""
        self._make_directories()
        path = self._directory / name
        partial = path.with_name(f".{name}.partial")
        with self._disk_errors_as_user_errors(), _locked(partial, deadline=limits.deadline) as file:
            if _is_cached(path, wanted.expected):
                return
            path.unlink(missing_ok=True)  # its size has changed since it was fetched
            start = time.monotonic()
            if self._limit is not None and wanted.is_shard:
                self._make_room(file, num_bytes=wanted.num_bytes, limits=limits)
            fetch(wanted.url, file, expected=wanted.expected, limits=limits)
            if wanted.index is not None:
                self._fetch_index(index_path(path), wanted.index_url, wanted.index, limits=limits)
            if not self._is_spool:
                # A later run checks only the size, so the file must be whole even after a power cut.
                os.fsync(file.fileno())
            self._publish(partial, path, limits=limits)
            megabytes, seconds = os.fstat(file.fileno()).st_size / 1e6, time.monotonic() - start
            logger.info("fetched %s of %s: %.1f MB in %.1f s", name, self.location, megabytes, seconds)

    def _fetch_index(self, path: Path, url: str, expected: Expected, *, limits: Limits) -> None:
        """Fetch the index beside a shard, in one attempt. If this fails, the reader rebuilds the index."""
        if not self._may_have_index:
            return
        partial = path.with_name(f".{path.name}.partial")
        with _locked(partial, deadline=limits.deadline) as file:
            try:
                fetch(url, file, expected=expected, limits=replace(limits, num_attempts=1, waits=False))
            except UserError as error:
                self._may_have_index = False
                logger.info("the shards of %s are indexed here: %s", self.location, error)
            else:
                self._publish(partial, path, limits=limits)

    def _publish(self, partial: Path, path: Path, *, limits: Limits) -> None:
        """Rename a whole file to `path`, but not while a process counts files: it could miss the file."""
        with self._lock_for_counting(limits) if self._limit is not None else nullcontext():
            partial.replace(path)

    def _lock_for_counting(self, limits: Limits) -> AbstractContextManager[object]:
        return _locked(self._root / ".room.lock", deadline=limits.deadline)

    def _make_room(self, file: BinaryIO, *, num_bytes: int, limits: Limits) -> None:
        """Evict the least recently used files until `num_bytes` fit under the limit, and reserve them for `file`.

        Gives `file` that size at once, so that other processes count it. Files that are being fetched are not evicted;
        if they leave no room, waits until they are whole.
        """
        assert self._limit is not None
        os.ftruncate(file.fileno(), 0)
        while True:
            with self._lock_for_counting(limits):
                groups: dict[Path, list[_File]] = {}
                for kept in _files(self._root):
                    groups.setdefault(kept.group, []).append(kept)
                excess = sum(kept.num_bytes for group in groups.values() for kept in group) + num_bytes - self._limit
                for group in sorted(groups.values(), key=lambda group: max(kept.used_ns for kept in group)):
                    for kept in group if excess > 0 else ():
                        excess -= kept.num_bytes * _evict(kept.path)
                if excess <= 0:
                    os.ftruncate(file.fileno(), num_bytes)
                    return
            if time.monotonic() >= limits.deadline or limits.stop.wait(0.05):
                raise UserError(
                    f"the cache {self._root} had no room for {num_bytes / 1e9:.3g} GB within data.remote.file_seconds, "
                    "because other processes fetch into it; raise data.remote.cache_gigabytes"
                )

    @contextmanager
    def _disk_errors_as_user_errors(self) -> Iterator[None]:
        """Raise `UserError` for an error of the cache's disk that the user can mend."""
        try:
            yield
        except OSError as error:
            if error.errno in _DISK_FULL:
                raise UserError(
                    f"the disk of the cache {self._root} is full ({error.strerror}) while it takes files of "
                    f"{self.location}; free some, set data.remote.cache_dir to another disk or lower "
                    "data.remote.cache_gigabytes"
                ) from None
            if error.errno in _DISK_REFUSES:
                raise UserError(
                    f"{self._root} cannot be the cache of {self.location} ({error.strerror}: {error.filename}); set "
                    "data.remote.cache_dir to a directory that you may write to"
                ) from None
            raise


class RemoteShards(FileCache):
    """The files of a remote dataset that `build` wrote.

    Attributes:
        location: the location as given.
        manifest: the manifest, which the constructor fetches unless it is given.
        shards: the shards by number; none for an index of tars.

    Raises `UserError` if the location is not valid, if it is a command from a file (see `refuse_untyped_command`), if
    the manifest or the table of the shards cannot be fetched, or if the disk has no room for the cache.
    """

    def __init__(self, location: str, *, config: RemoteConfig, manifest: Manifest | None = None) -> None:
        refuse_untyped_command(location, config)
        if re.search(r"\.tar\b", location) is not None and not is_command(location):
            raise UserError(
                f"{location} names tars; index them with `python -m data_pipeline index '{location}' --out DIR`, and "
                "name that DIR in place of them"
            )
        self.manifest = manifest or fetch_manifest(location, config=config)
        file_url(location, MANIFEST_NAME)  # the location may be wrong
        self.shards: ShardList = ListedShards(self.manifest.shards)
        sha256 = self.manifest.sha256
        if self.manifest.shard_table is not None:
            find = partial(_find_file, location, self.manifest, self.shards)
            files = FileCache(location, find, shard_bytes_S=self.shards.num_bytes, sha256=sha256, config=config)
            self.shards = ShardTable(files.path(SHARD_TABLE_NAME), self.manifest)
        index_bytes_S = index_row_bytes(self.manifest.members) * np.diff(self.shards.ends, prepend=0)
        super().__init__(
            location,
            partial(_find_file, location, self.manifest, self.shards),
            shard_bytes_S=self.shards.num_bytes + index_bytes_S,
            sha256=sha256,
            config=config,
        )


def _find_file(location: str, manifest: Manifest, shards: ShardList, name: str) -> RemoteFile | None:
    """Return a file beside the manifest of a remote dataset; None if it has no file of that name."""
    if (number := shards.number(name)) is not None:
        entry, index = shards[number], index_path(Path(name)).name
        return RemoteFile(
            url=file_url(location, name),
            expected=Expected(num_bytes=entry.num_bytes, sha256=entry.sha256),
            index_url=file_url(location, index),
            index=Expected(num_bytes=index_num_bytes(entry, manifest.members), sha256=entry.index_sha256),
        )
    hashes = {SOURCE_DIGESTS_NAME: manifest.source_digests_sha256}
    if manifest.overlay is not None and manifest.is_online:
        hashes[OVERLAY_NAME] = manifest.overlay.sha256
    if manifest.shard_table is not None:
        hashes[SHARD_TABLE_NAME] = manifest.shard_table.sha256
    if (sha256 := hashes.get(name)) is None:
        return None
    return RemoteFile(file_url(location, name), Expected(sha256=sha256))


class _Prefetcher:
    """A thread that fetches the files of the last `replace`, and ends after the last file."""

    def __init__(self, shards: FileCache) -> None:
        self.process_id = os.getpid()
        self._shards = shards
        self._names: Iterator[str] = iter(())
        self._lock = threading.Lock()
        self._is_running = False
        self._at_exit: Finalize | None = None

    def replace(self, names: Iterable[str]) -> None:
        with self._lock:
            self._names = iter(names)
            if self._is_running:
                return
            self._is_running = True
            stop = threading.Event()
            thread = threading.Thread(target=self._run, args=(stop,), name="prefetch", daemon=True)
            if self._at_exit is not None:
                self._at_exit.cancel()
            # Unlike atexit, this also runs in the workers of a DataLoader. A command must end with its reader.
            self._at_exit = Finalize(self, _end, args=(stop, thread), exitpriority=10)
            thread.start()

    def _run(self, stop: threading.Event) -> None:
        while True:
            with self._lock:
                name = None if stop.is_set() else next(self._names, None)
                if name is None:
                    self._is_running = False
                    return
            try:
                self._shards.path(name, stop=stop)
            except (UserError, OSError) as error:
                logger.info("could not prefetch %s: %s", name, error)


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(10.0)


@dataclass(frozen=True)
class _File:
    """A file of the cache. A shard and its index are one group, which is evicted together."""

    path: Path
    num_bytes: int
    used_ns: int

    @property
    def group(self) -> Path:
        return self.path if self.path.name.startswith(".") else self.path.with_name(self.path.name.partition(".")[0])


def _files(root: Path) -> list[_File]:
    """Return the files of the cache. Other files in its directory are not returned, so they are never removed."""
    found = []
    for directory in root.glob("dataset-*"):
        if re.fullmatch(r"dataset-[0-9a-f]{16}", directory.name) and directory.is_dir():
            with os.scandir(directory) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found.append(_File(Path(entry.path), status.st_size, status.st_mtime_ns))
    return found


def _evict(path: Path) -> bool:
    """Remove a file of the cache, unless a process is writing it. Return whether it is gone."""
    if not path.name.startswith("."):
        path.unlink(missing_ok=True)
        return True
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    return True


def _is_cached(path: Path, expected: Expected) -> bool:
    """Return whether a file is cached. It was whole when it got its name; its size shows later damage."""
    try:
        return expected.num_bytes in (None, path.stat().st_size)
    except FileNotFoundError:
        return False


@contextmanager
def _locked(path: Path, *, deadline: float) -> Iterator[BinaryIO]:
    """Open `path`, or create it, under an exclusive lock, which is free again when the process ends.

    Removes a partial file that the caller has not renamed. Raises `UserError` after `deadline`.
    """
    file = _open_locked(path, fcntl.LOCK_EX, deadline=deadline)
    try:
        yield file
    finally:
        if path.name.endswith(".partial") and _is_file(file, path):
            path.unlink()
        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a process forked since has the file open too
        file.close()


def _open_locked(path: Path, kind: int, *, deadline: float) -> BinaryIO:
    pause = 0.001
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            # The last holder of the lock may have renamed or removed this file.
            if _is_file(file, path):
                return file
        except BlockingIOError:
            pass
        file.close()
        if time.monotonic() >= deadline:
            raise UserError(
                f"another process held the lock of {path} for too long; see what it does, or raise "
                "data.remote.file_seconds"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _is_file(file: BinaryIO, path: Path) -> bool:
    """Return whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


_held_spools: dict[Path, BinaryIO] = {}  # in this process and in processes that it forks


def _hold_spool(root: Path) -> None:
    """Make the spool, a cache among the temporary files. The last process that uses it removes it when it ends."""
    if root in _held_spools:
        return
    deadline = time.monotonic() + _SPOOL_LOCK_SECONDS
    while True:
        root.mkdir(mode=0o700, exist_ok=True)
        if root.is_symlink() or root.stat().st_uid != os.getuid():
            raise UserError(f"{root} belongs to another user; set data.remote.cache_dir")  # /tmp is open to all users
        with suppress(FileNotFoundError):  # another process has just removed it
            file = _open_locked(root / ".in_use", fcntl.LOCK_SH, deadline=deadline)
            break
    _held_spools[root] = file
    Finalize(None, _leave_spool, args=(root, file), exitpriority=-10)  # after the workers of a DataLoader have ended


def _leave_spool(root: Path, file: BinaryIO) -> None:
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(root, ignore_errors=True)
    file.close()
    _held_spools.pop(root, None)
