"""The cache of a remote dataset: a reader gets what lies there, fetched once, within the limits of time and room."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.core.errors import UserError
from data_pipeline.loading.decode import decode
from data_pipeline.remote.cache import FileCache
from data_pipeline.remote.fetch import RemoteConfig, RemoteFile
from data_pipeline.storage.locks import locked
from data_pipeline.storage.store import SampleStore
from tests.data_pipeline.remote.http_server import FaultyServer, serve
from tests.tiny_data import write_tiny_dataset

SHARD_BYTES = 10_240
SHARDS = [f"shard-{number}.tar" for number in range(6)]
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FaultyServer]:
    """A server of six shards of one size."""
    (origin := tmp_path / "origin").mkdir()
    for seed, name in enumerate(SHARDS):
        (origin / name).write_bytes(np.random.default_rng(seed).bytes(SHARD_BYTES))
    with serve(origin) as server:
        yield server


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files go that have no cache_dir."""
    (directory := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


class ShardCache(FileCache):
    """A cache of the shards of a server, by their names."""

    def __init__(self, server: FaultyServer, *, sha256: str, config: RemoteConfig) -> None:
        super().__init__(server.url, sha256=sha256, config=config)
        self._server = server

    def _shard(self, name: str) -> tuple[str, RemoteFile]:
        sha256 = hashlib.sha256((self._server.directory / name).read_bytes()).hexdigest()
        return name, RemoteFile(f"{self._server.url}/{name}", SHARD_BYTES, sha256)

    def shard(self, name: str) -> Path:
        return self.path(*self._shard(name))

    def prefetch_shards(self, names: Iterable[str]) -> None:
        self.prefetch(map(self._shard, names))


def cache_of(
    server: FaultyServer, root: Path | None, *, num_shards: float | None = None, sha256: str = "0" * 64, **limits: Any
) -> ShardCache:
    """A cache that holds so many shards."""
    gigabytes = None if num_shards is None else num_shards * SHARD_BYTES / 1e9
    settings = {"stall_seconds": 5.0, "file_seconds": 20.0, "num_attempts": 2, **limits}
    cache_dir = None if root is None else str(root)
    config = RemoteConfig(cache_dir=cache_dir, cache_gigabytes=gigabytes, **settings)
    return ShardCache(server, sha256=sha256, config=config)


def cached_names(root: Path) -> set[str]:
    return {path.name for path in root.glob("dataset-*/*.tar")}


def in_process(function: Callable[[], object]) -> Any:
    """Start `function` in another process; its exit status is 0 if it returns."""
    process = FORK.Process(target=function)
    process.start()
    return process


def until(condition: Callable[[], bool], *, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_samples_are_those_of_the_local_dataset(tmp_path: Path) -> None:
    dataset = write_tiny_dataset(tmp_path / "tiny", num_samples=24, num_samples_per_shard=4)
    local = SampleStore(dataset)
    order = np.random.default_rng(0).permutation(len(local))
    here = decode(local, order)
    with serve(dataset) as server:
        for location in (server.url, f"file://{dataset}"):
            remote = SampleStore(location, remote=RemoteConfig(cache_dir=str(tmp_path / location.partition(":")[0])))
            there = decode(remote, order)
            assert there.pictures_BCHW is not None
            assert here.pictures_BCHW is not None
            assert (there.pictures_BCHW == here.pictures_BCHW).all()
            assert (there.labels["base"] == here.labels["base"]).all()
            assert not there.bad


def test_a_shard_that_stays_damaged_is_never_given_out(server: FaultyServer, tmp_path: Path) -> None:
    server.faults[SHARDS[1]], server.for_ever = ["corrupt"], True
    with pytest.raises(UserError, match=f"{SHARDS[1]}.*sha256"):
        cache_of(server, tmp_path / "cache").shard(SHARDS[1])
    assert not cached_names(tmp_path / "cache")


def test_a_cache_serves_later_runs(server: FaultyServer, tmp_path: Path) -> None:
    for _ in range(2):
        cache = cache_of(server, tmp_path / "cache")
        paths = [cache.shard(name) for name in SHARDS]
    assert sorted(server.requests) == SHARDS
    paths[0].write_bytes(paths[0].read_bytes()[:-512])  # a disk that lost the end of a file
    assert cache.shard(SHARDS[0]).read_bytes() == (server.directory / SHARDS[0]).read_bytes()


def test_processes_at_once_fetch_each_shard_once(server: FaultyServer, tmp_path: Path) -> None:
    def read(shift: int) -> None:
        cache = cache_of(server, tmp_path / "cache")
        for name in SHARDS[shift:] + SHARDS[:shift]:
            assert cache.shard(name).read_bytes() == (server.directory / name).read_bytes()

    processes = [in_process(partial(read, shift)) for shift in (0, 0, 1, 3)]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert sorted(server.requests) == SHARDS


def test_a_fetch_that_was_killed_is_taken_over(server: FaultyServer, tmp_path: Path) -> None:
    server.faults[SHARDS[0]] = ["stall"]
    cache = cache_of(server, tmp_path / "cache")
    killed = in_process(lambda: cache.shard(SHARDS[0]))
    assert until(lambda: SHARDS[0] in server.requests)
    waiting = in_process(lambda: cache.shard(SHARDS[0]))
    time.sleep(0.2)
    assert waiting.is_alive()
    os.kill(killed.pid, signal.SIGKILL)
    waiting.join(10)
    assert waiting.exitcode == 0
    assert cache.shard(SHARDS[0]).read_bytes() == (server.directory / SHARDS[0]).read_bytes()
    assert server.requests.count(SHARDS[0]) == 2


def test_a_process_forked_in_the_middle_of_a_fetch_keeps_no_lock(tmp_path: Path) -> None:
    """As the workers of a DataLoader may be, while a thread fetches ahead."""
    leave = FORK.Event()
    with locked(tmp_path / "lock", waits=True):
        forked = in_process(lambda: leave.wait(20))
    with locked(tmp_path / "lock", waits=True):
        assert not leave.is_set()
        leave.set()
    forked.join()


def test_the_shards_used_longest_ago_go_first(server: FaultyServer, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    cache = cache_of(server, root, num_shards=3.2)
    assert cache.max_files(np.full(len(SHARDS), SHARD_BYTES)) == 3
    for name in SHARDS[:3]:
        cache.shard(name)
    mapped = np.memmap(cache.shard(SHARDS[1]), mode="r")
    for name in (SHARDS[2], SHARDS[0], SHARDS[3]):
        cache.shard(name)
    assert cached_names(root) == {SHARDS[0], SHARDS[2], SHARDS[3]}
    assert mapped.tobytes() == (server.directory / SHARDS[1]).read_bytes()
    assert cache.shard(SHARDS[1]).read_bytes() == (server.directory / SHARDS[1]).read_bytes()
    assert server.requests.count(SHARDS[1]) == 2


def test_the_limit_is_of_all_datasets_and_of_nothing_else(server: FaultyServer, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    first, second = (cache_of(server, root, num_shards=2.2, sha256=digit * 64) for digit in "12")
    first.shard(SHARDS[0])
    (mine := root / "dataset-of-mine").mkdir()
    (mine / "thesis.tar").write_bytes(bytes(10**6))
    (fetched := first.shard(SHARDS[0]).with_name(f".{SHARDS[4]}.partial")).write_bytes(bytes(10**6))  # by another
    second.shard(SHARDS[0])
    second.shard(SHARDS[1])
    assert len(list(root.glob("dataset-[12]*/*.tar"))) == 2
    assert (mine / "thesis.tar").exists()
    assert fetched.exists()


def test_a_cache_that_cannot_hold_a_shard_is_told_before_training(server: FaultyServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cache_gigabytes"):
        cache_of(server, tmp_path / "cache", num_shards=0.9).max_files(np.full(2, SHARD_BYTES))


def test_without_a_cache_dir_copies_are_the_users_own(server: FaultyServer, temporary: Path) -> None:
    path = cache_of(server, None).shard(SHARDS[0])
    assert path.is_relative_to(temporary)
    assert (path.parents[1].stat().st_mode & 0o777) == 0o700


def test_shards_come_in_the_background(server: FaultyServer, tmp_path: Path) -> None:
    cache = cache_of(server, tmp_path / "cache")
    cache.prefetch_shards(SHARDS[:3])
    assert until(lambda: cached_names(tmp_path / "cache") == set(SHARDS[:3]))
    cache.prefetch_shards(SHARDS[3:4])
    cache.shard(SHARDS[3])
    assert server.requests == SHARDS[:4]

    def fork() -> None:  # which has not the thread of the process that forked it
        cache.prefetch_shards([SHARDS[5]])
        assert until(lambda: SHARDS[5] in cached_names(tmp_path / "cache"))

    process = in_process(fork)
    process.join(20)
    assert process.exitcode == 0


@pytest.mark.slow
def test_a_later_call_replaces_what_still_waits(server: FaultyServer, tmp_path: Path) -> None:
    server.faults[SHARDS[0]] = ["stall"]
    cache = cache_of(server, tmp_path / "cache", stall_seconds=0.6, num_attempts=10)
    cache.prefetch_shards(SHARDS[:3])
    assert until(lambda: SHARDS[0] in server.requests)
    cache.prefetch_shards([SHARDS[4]])
    assert until(lambda: cached_names(tmp_path / "cache") == {SHARDS[0], SHARDS[4]})
    time.sleep(0.2)
    assert SHARDS[1] not in server.requests


def test_trouble_ahead_is_not_raised_and_told_by_path(
    server: FaultyServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.faults[SHARDS[0]], server.for_ever = [404], True
    cache = cache_of(server, tmp_path / "cache")
    cache.prefetch_shards(SHARDS[:2])
    assert until(lambda: cached_names(tmp_path / "cache") == {SHARDS[1]})
    assert "could not prefetch" in caplog.text
    with pytest.raises(UserError, match="FileNotFound"):
        cache.shard(SHARDS[0])
