"""Cache the files of remote datasets, which lie behind http(s) or behind a command that prints a file.

Given a location and a file name, it returns the path of a checked copy on this machine. So a remote shard is read
like a local one.

Guarantees: a reader never gets part of a file or a file that is not the one in the manifest, and never waits for ever.

Copies lie in `ROOT/dataset-HASH/`; HASH is of the content of the dataset, so the cache cannot serve stale files. All
processes of a machine share it.
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
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

from pydantic import Field

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Gigabytes, Line, Schema, Seconds
from data_pipeline.remote.fetch import Expected, Limits, fetch
from data_pipeline.storage.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    OVERLAY_NAME,
    SOURCE_DIGESTS_NAME,
    Manifest,
    ShardEntry,
    is_plain_name,
    parse_manifest,
)
from data_pipeline.storage.shards import index_num_bytes, index_path

logger = logging.getLogger(__name__)

_SCHEMES: Final = ("http", "https", "pipe")
_SPOOL_GIGABYTES: Final = 4.0  # without a cache_dir: /tmp is small, and in memory on some machines
_SPOOL_LOCK_SECONDS: Final = 60.0
_DISK_REFUSES: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOLCK)
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RemoteConfig(Schema):
    """How the files of a remote dataset are fetched and kept. A local dataset ignores it.

    Attributes:
        cache_dir: where copies are kept for later runs. Without it they lie in the directory for temporary files, and
            the last process that reads the dataset removes them when it ends.
        cache_gigabytes: the largest size of the cache, in 10**9 bytes; the least recently used files are evicted. None
            means no limit with a `cache_dir`, and 4 without.
        stall_seconds: an attempt that brings no byte for this time is given up.
        file_seconds: the time for a file, all attempts together.
        num_attempts: how often a file is tried, with pauses of 0.5, 1, 2, ... up to 8 seconds between.
        read_back_from: the file that the location was read from; None if it was typed. `refuse_untyped_command` uses
            it. It is no setting: `trainer.config.read_config` sets it, whatever the file says.
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
    """Return whether reading from `location` runs a command of a shell.

    Examples:
        >>> is_command("pipe:cat /archive/{name}"), is_command("https://host/cifar")
        (True, False)
    """
    return is_remote(location) and location.startswith("pipe:")


def refuse_untyped_command(location: str, config: RemoteConfig) -> None:
    """Raise `UserError` if `location` is a command that was read from a file: a stranger may have written the file."""
    if is_command(location) and config.read_back_from is not None:
        raise UserError(
            f"{config.read_back_from} names the location {location!r}, a command that this machine would run; pass "
            "--allow-pipe if you trust whoever wrote that file"
        )


def file_url(location: str, name: str) -> str:
    """Return the URL of one file of a dataset: the file name replaces `{name}` in `location`, or is appended.

    Raises `UserError` if `location` is not remote, or if `name` is not a plain file name: it becomes part of a path and
    of a shell command.

    Examples:
        >>> file_url("http://host/cifar/", "manifest.json")
        'http://host/cifar/manifest.json'
        >>> file_url("pipe:aws s3 cp s3://bucket/{name} -", "shard-00000.tar")
        'pipe:aws s3 cp s3://bucket/shard-00000.tar -'
    """
    scheme, _, rest = location.partition(":")
    if scheme not in _SCHEMES or not rest.strip("/ "):
        raise UserError(
            f"{location} is not a location of a dataset; give a directory, http(s)://HOST/DIR, "
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
    """Fetch the manifest of a remote dataset; raise `UserError` if it cannot be fetched or is not valid."""
    expected = Expected(is_json=True, max_bytes=MAX_MANIFEST_BYTES)
    with fetched(location, MANIFEST_NAME, expected=expected, config=config, must_answer=True) as file:
        return parse_manifest(file.read(), where=file_url(location, MANIFEST_NAME))


@contextmanager
def fetched(
    location: str, name: str, *, expected: Expected, config: RemoteConfig, must_answer: bool = False
) -> Iterator[BinaryIO]:
    """Fetch one file of a remote dataset, without the cache, into a temporary file that is open while the block runs.

    Raises `UserError` if it cannot be fetched, or is not as `expected`; with `must_answer` at once if its host cannot
    be found or reached.
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


class RemoteShards:
    """The files of one remote dataset as local paths; each is fetched when it is first used.

    May be forked and pickled. All processes of a machine share the copies, and one of them fetches each file.

    Attributes:
        location: as given.
        manifest: fetched by the constructor.

    Raises `UserError` if the location is not valid, if it is a command that was read from a file, if its manifest
    cannot be fetched, or if the disk has no room for the cache.
    """

    def __init__(self, location: str, *, config: RemoteConfig) -> None:
        refuse_untyped_command(location, config)
        self.location = location
        self._config = config
        self.manifest: Manifest = fetch_manifest(location, config=config)
        self._shards = {entry.name: entry for entry in self.manifest.shards}
        dataset = self.manifest.sha256[:16]
        gigabytes = config.cache_gigabytes
        if config.cache_dir is not None:
            self._root = Path(config.cache_dir).expanduser().absolute()
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
        """Return how many shards the cache can hold at once, counting the largest ones; None if it can hold all."""
        sizes = sorted(self._num_bytes(name) for name in self._shards)
        if self._limit is None or sum(sizes) <= self._limit:
            return None
        count, total = 0, sizes.pop()
        while total <= self._limit:
            count, total = count + 1, total + sizes.pop()
        return count

    def path(self, name: str, *, stop: threading.Event | None = None) -> Path:
        """Return the local path of a shard, of the assets of an online overlay or of the source digests.

        Fetches the file if it is not cached; a shard comes with its index if the location has one. Another process may
        evict the file: a mapped or open file stays readable, and a caller that finds the path gone calls this again.

        Raises `UserError` if the file cannot be fetched in time, if the disk is full, or when `stop` is set.
        """
        expected = self._expected(name)
        path = self._directory / name
        while True:
            if not _is_here(path, expected):
                self._fetch(name, expected, limits=_limits(self._config, stop))
            now = time.time_ns()
            try:
                os.utime(path, ns=(now, now))
            except FileNotFoundError:
                continue
            except PermissionError:
                pass  # another user's file in a shared cache
            return path

    def prefetch(self, names: Iterable[str]) -> None:
        """Fetch these files in the background, in this order; files that still wait from an earlier call are dropped.

        Never raises: `path` meets the same problem and raises. Fetching evicts the least recently used files, so
        `max_shards` should cover these files and those in use.
        """
        if self._prefetcher is None or self._prefetcher.process_id != os.getpid():  # a thread does not survive a fork
            self._prefetcher = _Prefetcher(self)
        self._prefetcher.replace(names)

    def _expected(self, name: str) -> Expected:
        if (entry := self._shards.get(name)) is not None:
            return Expected(num_bytes=entry.num_bytes, sha256=entry.sha256)
        if name == OVERLAY_NAME and self.manifest.overlay is not None and self.manifest.is_online:
            return Expected(sha256=self.manifest.overlay.sha256)
        if name == SOURCE_DIGESTS_NAME and self.manifest.source_digests_sha256 is not None:
            return Expected(sha256=self.manifest.source_digests_sha256)
        raise ValueError(f"the dataset at {self.location} has no file {name!r}")

    def _num_bytes(self, name: str) -> int:
        """Return the size of a shard and its index."""
        entry = self._shards[name]
        return entry.num_bytes + index_num_bytes(entry, self.manifest.members)

    def _check_room(self) -> None:
        """Raise `UserError` if the cache or its disk is too small; called before training starts."""
        if self.max_shards == 0:
            largest = max(self._num_bytes(name) for name in self._shards)
            raise UserError(
                f"the largest shard of {self.location} takes {largest / 1e9:.3g} GB and the cache may hold "
                f"{(self._limit or 0) / 1e9:.3g}; raise data.remote.cache_gigabytes"
            )
        with self._mending():
            free = shutil.disk_usage(self._root).free
        files = _files(self._root)
        missing = sum(map(self._num_bytes, self._shards))
        missing -= sum(file.num_bytes for file in files if file.path.parent == self._directory)
        if self._limit is not None:
            missing = min(missing, self._limit - sum(file.num_bytes for file in files))
        if missing > free:
            raise UserError(
                f"{self._root} is to hold {missing / 1e9:.3g} GB more of {self.location} and its disk has "
                f"{free / 1e9:.3g} GB free; free some, set data.remote.cache_dir to another disk or lower "
                "data.remote.cache_gigabytes"
            )

    def _make_directories(self) -> None:
        with self._mending():
            if self._is_spool:
                _hold_spool(self._root)
            self._directory.mkdir(parents=True, exist_ok=True)

    def _fetch(self, name: str, expected: Expected, *, limits: Limits) -> None:
        """Fetch one file. If another process is fetching it, wait for that instead."""
        self._make_directories()
        path = self._directory / name
        partial = path.with_name(f".{name}.partial")
        with self._mending(), _locked(partial, deadline=limits.deadline) as file:
            if _is_here(path, expected):
                return
            path.unlink(missing_ok=True)  # it has another size than when it was fetched
            start = time.monotonic()
            if self._limit is not None and name in self._shards:
                self._make_room(file, num_bytes=self._num_bytes(name), limits=limits)
            fetch(file_url(self.location, name), file, expected=expected, limits=limits)
            if (entry := self._shards.get(name)) is not None:
                self._fetch_index(index_path(path), entry, limits=limits)
            if not self._is_spool:
                os.fsync(
                    file.fileno()
                )  # a kept file must be whole after a power cut too: only its size is checked again
            self._name(partial, path, limits=limits)
            megabytes, seconds = os.fstat(file.fileno()).st_size / 1e6, time.monotonic() - start
            logger.info("fetched %s of %s: %.1f MB in %.1f s", name, self.location, megabytes, seconds)

    def _fetch_index(self, path: Path, entry: ShardEntry, *, limits: Limits) -> None:
        """Fetch the index beside a shard. This may fail: the reader rebuilds it then."""
        if not self._may_have_index:
            return
        partial = path.with_name(f".{path.name}.partial")
        url = file_url(self.location, path.name)
        with _locked(partial, deadline=limits.deadline) as file:
            try:
                num_bytes = index_num_bytes(entry, self.manifest.members)
                expected = Expected(num_bytes=num_bytes, sha256=entry.index_sha256)
                fetch(url, file, expected=expected, limits=replace(limits, num_attempts=1))
            except UserError as error:
                self._may_have_index = False
                logger.info("the shards of %s are indexed here: %s", self.location, error)
            else:
                self._name(partial, path, limits=limits)

    def _name(self, partial: Path, path: Path, *, limits: Limits) -> None:
        """Rename a whole file to `path`, but not while a process counts files: it could miss both names."""
        with self._counting(limits) if self._limit is not None else nullcontext():
            partial.replace(path)

    def _counting(self, limits: Limits) -> AbstractContextManager[object]:
        return _locked(self._root / ".room.lock", deadline=limits.deadline)

    def _make_room(self, file: BinaryIO, *, num_bytes: int, limits: Limits) -> None:
        """Evict the least recently used files until `num_bytes` fit under the limit, and reserve them for `file`.

        `file` gets that size at once, so that other processes count it. Files that are being fetched stay; if they
        leave no room, this waits until they are whole and can be evicted.
        """
        assert self._limit is not None
        os.ftruncate(file.fileno(), 0)
        while True:
            with self._counting(limits):
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
                    f"the cache {self._root} found no room for {num_bytes / 1e9:.3g} GB in the time that a file has, "
                    "since other processes fetch into it; raise data.remote.cache_gigabytes"
                )

    @contextmanager
    def _mending(self) -> Iterator[None]:
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


class _Prefetcher:
    """A thread that fetches the files it was last given, and ends after the last one."""

    def __init__(self, shards: RemoteShards) -> None:
        self.process_id = os.getpid()
        self._shards = shards
        self._names: deque[str] = deque()
        self._lock = threading.Lock()
        self._is_running = False
        self._at_exit: Finalize | None = None

    def replace(self, names: Iterable[str]) -> None:
        with self._lock:
            self._names = deque(names)
            if not self._names or self._is_running:
                return
            self._is_running = True
            stop = threading.Event()
            thread = threading.Thread(target=self._run, args=(stop,), name="prefetch", daemon=True)
            if self._at_exit is not None:
                self._at_exit.cancel()
            # Unlike atexit, this runs in the workers of a DataLoader too. No command may outlive its reader.
            self._at_exit = Finalize(self, _end, args=(stop, thread), exitpriority=10)
            thread.start()

    def _run(self, stop: threading.Event) -> None:
        while True:
            with self._lock:
                if not self._names or stop.is_set():
                    self._is_running = False
                    return
                name = self._names.popleft()
            try:
                self._shards.path(name, stop=stop)
            except (UserError, OSError) as error:
                logger.info("not fetched ahead: %s", error)


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(10.0)


@dataclass(frozen=True)
class _File:
    """A file of the cache. A shard and its index are one group, and are evicted together."""

    path: Path
    num_bytes: int
    used_ns: int

    @property
    def group(self) -> Path:
        return self.path if self.path.name.startswith(".") else self.path.with_name(self.path.name.partition(".")[0])


def _files(root: Path) -> list[_File]:
    """Return the files of the cache. Other files in its directory are not counted, and never removed."""
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
    """Remove a file of the cache, but no partial file that a process is writing. Return whether it is gone."""
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


def _is_here(path: Path, expected: Expected) -> bool:
    """Return whether a file is cached. It got its name when it was whole; its size shows damage since then."""
    try:
        return expected.num_bytes in (None, path.stat().st_size)
    except FileNotFoundError:
        return False


@contextmanager
def _locked(path: Path, *, deadline: float) -> Iterator[BinaryIO]:
    """Open `path` under an exclusive lock, which ends with the process. Creates the file if it is missing.

    Removes a partial file that the caller has not renamed. Raises `UserError` after `deadline`.
    """
    file = _open_locked(path, fcntl.LOCK_EX, deadline=deadline)
    try:
        yield file
    finally:
        if path.name.endswith(".partial") and _is_file(file, path):
            path.unlink()
        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a process forked meanwhile has the file too
        file.close()


def _open_locked(path: Path, kind: int, *, deadline: float) -> BinaryIO:
    pause = 0.001
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            # The previous holder may have renamed or removed the file that was opened here.
            if _is_file(file, path):
                return file
        except BlockingIOError:
            pass
        file.close()
        if time.monotonic() >= deadline:
            raise UserError(
                f"another process held the lock of {path} until the time was up; see what it does, or "
                "raise data.remote.file_seconds"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _is_file(file: BinaryIO, path: Path) -> bool:
    """Return whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


_held_spools: dict[Path, BinaryIO] = {}  # of this process and of processes that it forks


def _hold_spool(root: Path) -> None:
    """Make the spool, the cache among the temporary files. The last process that uses it removes it at its end."""
    if root in _held_spools:
        return
    deadline = time.monotonic() + _SPOOL_LOCK_SECONDS
    while True:
        root.mkdir(mode=0o700, exist_ok=True)
        if root.is_symlink() or root.stat().st_uid != os.getuid():
            raise UserError(f"{root} belongs to another user; set data.remote.cache_dir")  # /tmp is open to all users
        with suppress(FileNotFoundError):  # another process was just removing it
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
