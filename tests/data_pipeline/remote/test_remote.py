"""Remote datasets: what a reader gets is what lies there, fetched once, within the limits of time and room."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np
import pytest
import webdataset

from data_pipeline.core.errors import UserError
from data_pipeline.loading.decode import decode
from data_pipeline.remote.cache import RemoteConfig, RemoteShards, _locked, file_url, is_remote
from data_pipeline.storage.manifest import MANIFEST_NAME, OVERLAY_NAME, load_manifest
from data_pipeline.storage.shards import index_path
from data_pipeline.storage.store import SampleStore
from tests.data_pipeline.remote.http_server import FaultyServer, closed_port, serve
from tests.data_pipeline.remote.test_fetch import running
from tests.tiny_data import write_tiny_dataset

NUM_SHARDS = 6
INDEX_BYTES = 4 * 3 * 16  # of a shard: two int64 for each of three members of four samples
SHARDS = [f"shard-{number:05d}.tar" for number in range(NUM_SHARDS)]
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("origin") / "tiny"
    return write_tiny_dataset(directory, num_samples=4 * NUM_SHARDS, num_samples_per_shard=4)


@pytest.fixture
def server(dataset: Path) -> Iterator[FaultyServer]:
    with serve(dataset) as server:
        yield server


@pytest.fixture(autouse=True)
def spools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files go that have no cache: not into the machine's own directory, whatever a test does."""
    directory = tmp_path / "spools"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def cached(cache: Path, *, num_shards: float | None = None, dataset: Path | None = None, **limits: Any) -> RemoteConfig:
    """A config with a cache that holds so many of the largest shards of `dataset`."""
    gigabytes = None
    if num_shards is not None:
        assert dataset is not None
        gigabytes = num_shards * max(room_of(dataset, name) for name in SHARDS) / 1e9
    settings = {"stall_seconds": 5.0, "file_seconds": 20.0, "num_attempts": 2, **limits}
    return RemoteConfig(cache_dir=str(cache), cache_gigabytes=gigabytes, **settings)


def room_of(dataset: Path, name: str) -> int:
    """Bytes that the cache counts for a shard."""
    return (dataset / name).stat().st_size + INDEX_BYTES


def cached_names(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("dataset-*/*.tar")}


def in_process(function: Callable[[], object]) -> Any:
    """Start `function` in another process; its exit status is 0 where it returns."""
    process = FORK.Process(target=function)
    process.start()
    return process


def until(condition: Callable[[], bool], *, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


# Where a dataset may lie


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("http://host/dir", True),
        ("https://host/dir", True),
        ("pipe:cat /archive/{name}", True),
        ("s3://bucket/dir", True),
        ("data/cifar", False),
        ("/data/cifar", False),
        ("C:/data", False),
        (Path("http://host/dir"), False),
    ],
)
def test_what_is_remote(location: str | Path, expected: bool) -> None:
    assert is_remote(location) is expected


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("http://host/dir", "http://host/dir/a.tar"),
        ("http://host/dir/", "http://host/dir/a.tar"),
        ("https://host/dir/{name}?token=1", "https://host/dir/a.tar?token=1"),
        ("pipe:cat {name} | awk '{print}'", "pipe:cat a.tar | awk '{print}'"),
    ],
)
def test_urls(location: str, url: str) -> None:
    assert file_url(location, "a.tar") == url


@pytest.mark.parametrize(
    "name", ["../a.tar", "a/b.tar", "/a", ".hidden", "a;touch b", "$(touch b)", "a b", "", "-rf", "a\n"]
)
def test_a_manifest_cannot_name_a_path_or_a_command(name: str) -> None:
    with pytest.raises(UserError, match="not a plain file name"):
        file_url("pipe:cat {name}", name)


def test_a_manifest_with_such_a_name_is_refused(dataset: Path, tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    text = (dataset / MANIFEST_NAME).read_text().replace(SHARDS[0], "x;touch owned")
    (origin / MANIFEST_NAME).write_text(text)
    with pytest.raises(UserError, match=r'is "x;touch owned"; it must be a plain file name that ends in \.tar'):
        RemoteShards(f"pipe:cat {origin}/{{name}}", config=cached(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("pipe:cat /archive/manifest.json", "lacks {name}; put it where"),
        ("http://host/dir?token=1", "lacks {name}; put it where"),
        ("pipe:", "is not a location of a dataset"),
        ("http://", "is not a location of a dataset"),
        ("ftp://bucket/dir", "pipe:COMMAND with {name}"),
        ("file:///data", "give a directory"),
        ("pipe:no-such-command {name}", "no-such-command"),
        ("http://no-such-host.invalid/dir", "no host of that name"),
    ],
)
def test_a_location_that_cannot_work_is_told_at_once(location: str, said: str, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        RemoteShards(location, config=RemoteConfig(cache_dir=str(tmp_path)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 3.0


def test_a_server_without_the_dataset_is_told_at_once(server: FaultyServer, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(UserError, match="404"):
        RemoteShards(f"{server.url}/elsewhere", config=RemoteConfig(cache_dir=str(tmp_path)))
    with pytest.raises(UserError, match="Connection refused"):
        RemoteShards(f"http://127.0.0.1:{closed_port()}", config=RemoteConfig(cache_dir=str(tmp_path)))
    assert time.monotonic() - start < 3.0


# What comes


@pytest.mark.parametrize("scheme", ["http", "pipe"])
def test_samples_are_those_of_the_local_dataset(
    scheme: str, dataset: Path, server: FaultyServer, tmp_path: Path
) -> None:
    location = server.url if scheme == "http" else f"pipe:cat {dataset}/{{name}}"
    remote = SampleStore(location, remote=cached(tmp_path / "cache"))
    local = SampleStore(dataset)
    order = np.random.default_rng(0).permutation(len(local))
    there, here = decode(remote, order), decode(local, order)
    assert there.pictures_BCHW is not None
    assert here.pictures_BCHW is not None
    assert (there.pictures_BCHW == here.pictures_BCHW).all()
    assert (there.labels["base"] == here.labels["base"]).all()
    assert not there.bad
    peer = webdataset.WebDataset([file_url(location, name) for name in SHARDS], shardshuffle=False)
    for index, sample in enumerate(peer):
        members = remote.encoded(index).members
        assert members == {name: sample[name] for name in members}
    assert index + 1 == len(remote)


def test_the_index_comes_with_its_shard(dataset: Path, server: FaultyServer, tmp_path: Path) -> None:
    shards = RemoteShards(server.url, config=cached(tmp_path))
    path = shards.path(SHARDS[2])
    assert path.read_bytes() == (dataset / SHARDS[2]).read_bytes()
    assert index_path(path).read_bytes() == index_path(dataset / SHARDS[2]).read_bytes()
    assert server.requests == [MANIFEST_NAME, SHARDS[2], index_path(Path(SHARDS[2])).name]


def test_a_location_without_indices_is_asked_for_one_once(dataset: Path, server: FaultyServer, tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    shutil.copytree(dataset, origin, ignore=shutil.ignore_patterns("*.index"))
    server.directory = origin
    store = SampleStore(server.url, remote=cached(tmp_path / "cache"))
    assert not decode(store, np.arange(len(store))).bad
    assert len([name for name in server.requests if name.endswith(".index")]) == 1


def test_a_damaged_index_is_made_anew(server: FaultyServer, tmp_path: Path) -> None:
    for fault in ("truncate", "corrupt"):
        server.faults[index_path(Path(SHARDS[0])).name] = [fault]
        store = SampleStore(server.url, remote=cached(tmp_path / fault))
        assert not decode(store, np.arange(4)).bad


def test_an_index_is_not_waited_for(server: FaultyServer, tmp_path: Path) -> None:
    server.faults[index_path(Path(SHARDS[0])).name], server.for_ever = [503], True
    start = time.monotonic()
    store = SampleStore(server.url, remote=cached(tmp_path))
    assert not decode(store, np.arange(4)).bad
    assert time.monotonic() - start < 5.0
    assert server.requests.count(index_path(Path(SHARDS[0])).name) == 1


def test_the_assets_of_an_online_overlay_come(tmp_path: Path) -> None:
    origin = write_tiny_dataset(tmp_path / "origin", num_samples=4, overlay="online")
    shards = RemoteShards(f"pipe:cat {origin}/{{name}}", config=cached(tmp_path / "cache"))
    assert shards.path(OVERLAY_NAME).read_bytes() == (origin / OVERLAY_NAME).read_bytes()
    (origin / OVERLAY_NAME).write_bytes(b"other")
    again = RemoteShards(f"pipe:cat {origin}/{{name}}", config=cached(tmp_path / "other", num_attempts=1))
    with pytest.raises(UserError, match="not the file that the manifest names"):
        again.path(OVERLAY_NAME)


def test_a_file_that_the_dataset_has_not_is_our_mistake(dataset: Path, tmp_path: Path) -> None:
    shards = RemoteShards(f"pipe:cat {dataset}/{{name}}", config=cached(tmp_path))
    for name in ("shard-99999.tar", OVERLAY_NAME, "../manifest.json"):
        with pytest.raises(ValueError, match="has no file"):
            shards.path(name)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["drop", "truncate", "corrupt"])
def test_a_shard_that_comes_damaged_is_fetched_again(
    fault: Any, dataset: Path, server: FaultyServer, tmp_path: Path
) -> None:
    server.faults[SHARDS[1]] = [fault]
    path = RemoteShards(server.url, config=cached(tmp_path)).path(SHARDS[1])
    assert path.read_bytes() == (dataset / SHARDS[1]).read_bytes()
    assert server.requests.count(SHARDS[1]) == 2


@pytest.mark.slow
def test_a_manifest_that_comes_damaged_is_fetched_again(dataset: Path, server: FaultyServer, tmp_path: Path) -> None:
    for fault in ("drop", "truncate"):
        server.faults[MANIFEST_NAME] = [fault]
        # The request that asks whether the server answers meets the fault, too, and is not deterred.
        assert RemoteShards(server.url, config=cached(tmp_path)).manifest == load_manifest(dataset)
    (other := tmp_path / "origin").mkdir()
    (other / MANIFEST_NAME).write_text("<html>Please log in</html>")
    with pytest.raises(UserError, match=r"bytes is not whole JSON \(2 attempts"):
        RemoteShards(f"pipe:cat {other}/{{name}}", config=cached(tmp_path))
    (other / MANIFEST_NAME).write_text('{"format_version": 1}')
    with pytest.raises(UserError, match="format version"):
        RemoteShards(f"pipe:cat {other}/{{name}}", config=cached(tmp_path))


def test_a_shard_that_stays_damaged_is_never_given_out(server: FaultyServer, tmp_path: Path) -> None:
    server.faults[SHARDS[1]], server.for_ever = ["corrupt"], True
    shards = RemoteShards(server.url, config=cached(tmp_path))
    with pytest.raises(UserError, match=f"{SHARDS[1]} could not be fetched: .*not the file that the manifest names"):
        shards.path(SHARDS[1])
    assert not [path for path in tmp_path.rglob("*") if SHARDS[1] in path.name]


def test_a_dataset_that_was_replaced_is_seen(dataset: Path, tmp_path: Path) -> None:
    """Never stale at opening, and never half old and half new behind the back of one that is open."""
    origin = tmp_path / "origin"
    shutil.copytree(dataset, origin)
    location, config = f"pipe:cat {origin}/{{name}}", cached(tmp_path / "cache", num_attempts=1)
    before = RemoteShards(location, config=config)
    before.path(SHARDS[0])
    shutil.rmtree(origin)
    write_tiny_dataset(origin, num_samples=4 * NUM_SHARDS, num_samples_per_shard=4, seed=1)
    after = RemoteShards(location, config=config)
    assert after.manifest == load_manifest(origin)
    assert after.path(SHARDS[0]).read_bytes() == (origin / SHARDS[0]).read_bytes()
    assert before.path(SHARDS[0]).read_bytes() == (dataset / SHARDS[0]).read_bytes()
    with pytest.raises(UserError, match=r"not the file that the manifest names|longer than|it ended after"):
        before.path(SHARDS[1])


# The cache


def test_a_cache_serves_later_runs(dataset: Path, server: FaultyServer, tmp_path: Path) -> None:
    for _ in range(2):
        shards = RemoteShards(server.url, config=cached(tmp_path))
        for name in SHARDS:
            shards.path(name)
    assert [server.requests.count(name) for name in SHARDS] == [1] * NUM_SHARDS
    path = shards.path(SHARDS[0])
    path.write_bytes(path.read_bytes()[:-512])  # a disk that lost the end of a file
    assert shards.path(SHARDS[0]).read_bytes() == (dataset / SHARDS[0]).read_bytes()
    pipe = RemoteShards(f"pipe:false {{name}} || cat {dataset}/{MANIFEST_NAME}", config=cached(tmp_path))
    assert pipe.path(SHARDS[1]) == shards.path(SHARDS[1])  # the same dataset, whatever it was fetched through


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_whole_cache_that_cannot_be_written_is_read(
    dataset: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is mounted for reading, or in a cache of another user."""
    shards = RemoteShards(f"pipe:cat {dataset}/{{name}}", config=cached(tmp_path))
    path = shards.path(SHARDS[0])

    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "utime", refused)
    assert shards.path(SHARDS[0]) == path


def test_processes_at_once_fetch_each_shard_once(server: FaultyServer, tmp_path: Path) -> None:
    def read(shift: int) -> None:
        shards = RemoteShards(server.url, config=cached(tmp_path))
        for name in SHARDS[shift:] + SHARDS[:shift]:
            assert (
                hashlib.sha256(shards.path(name).read_bytes()).hexdigest()
                == shards.manifest.shards[SHARDS.index(name)].sha256
            )

    processes = [in_process(lambda shift=shift: read(shift)) for shift in (0, 0, 1, 3)]  # type: ignore[misc]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert sorted(server.requests.count(name) for name in SHARDS) == [1] * NUM_SHARDS
    assert not list(tmp_path.rglob("*.partial"))


def test_a_fetch_that_was_killed_is_taken_over(dataset: Path, server: FaultyServer, tmp_path: Path) -> None:
    server.faults[SHARDS[0]] = ["stall"]
    shards = RemoteShards(server.url, config=cached(tmp_path))
    killed = in_process(lambda: shards.path(SHARDS[0]))
    assert until(lambda: SHARDS[0] in server.requests)
    waiting = in_process(lambda: shards.path(SHARDS[0]))
    time.sleep(0.2)
    assert waiting.is_alive()
    os.kill(killed.pid, signal.SIGKILL)
    waiting.join(10)
    assert waiting.exitcode == 0
    assert shards.path(SHARDS[0]).read_bytes() == (dataset / SHARDS[0]).read_bytes()
    assert server.requests.count(SHARDS[0]) == 2
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.slow
def test_waiting_for_another_process_has_an_end(server: FaultyServer, tmp_path: Path) -> None:
    """The other one is stopped, so that none of its own limits is kept."""
    server.faults[SHARDS[0]] = ["stall"]
    shards = RemoteShards(server.url, config=cached(tmp_path, file_seconds=3.0))
    frozen = in_process(lambda: shards.path(SHARDS[0]))
    assert until(lambda: SHARDS[0] in server.requests)
    os.kill(frozen.pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(UserError, match="another process held the lock of"):
        shards.path(SHARDS[0])
    assert 2.0 < time.monotonic() - start < 8.0
    os.kill(frozen.pid, signal.SIGKILL)
    frozen.join()


def test_a_process_forked_in_the_middle_of_a_fetch_keeps_no_lock(tmp_path: Path) -> None:
    """As the workers of a DataLoader may be, while a thread fetches ahead."""
    leave = FORK.Event()
    with _locked(tmp_path / "lock", deadline=time.monotonic()):
        forked = in_process(lambda: leave.wait(20))
    with _locked(tmp_path / "lock", deadline=time.monotonic()):
        leave.set()
    forked.join()


def test_a_lock_is_on_the_file_that_is_there_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process renames the partial file between our opening and our locking of it."""
    partial, flock = tmp_path / ".a.partial", fcntl.flock

    def renamed_before(file: BinaryIO, operation: int) -> None:
        if not (tmp_path / "a").exists():
            partial.rename(tmp_path / "a")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", renamed_before)
    with _locked(partial, deadline=time.monotonic() + 5.0) as file:
        file.write(b"mine")
        file.flush()
        assert partial.read_bytes() == b"mine"
    assert (tmp_path / "a").read_bytes() == b""
    assert not partial.exists()


def test_a_pickled_copy_asks_for_nothing(server: FaultyServer, tmp_path: Path) -> None:
    shards = RemoteShards(server.url, config=cached(tmp_path))
    shards.prefetch([SHARDS[0]])
    copy = pickle.loads(pickle.dumps(shards))
    assert copy.manifest == shards.manifest
    assert server.requests.count(MANIFEST_NAME) == 1
    assert copy.path(SHARDS[1]) == shards.path(SHARDS[1])


# The limit of the cache


def test_the_shards_used_longest_ago_go_first(dataset: Path, server: FaultyServer, tmp_path: Path) -> None:
    shards = RemoteShards(server.url, config=cached(tmp_path, num_shards=3.2, dataset=dataset))
    assert shards.max_shards == 3
    for name in SHARDS[:3]:
        shards.path(name)
    shards.path(SHARDS[0])
    shards.path(SHARDS[3])
    assert cached_names(tmp_path) == {SHARDS[0], SHARDS[2], SHARDS[3]}
    shards.path(SHARDS[4])
    assert cached_names(tmp_path) == {SHARDS[0], SHARDS[3], SHARDS[4]}
    assert {path.name for path in tmp_path.rglob("*.index")} == {
        index_path(Path(name)).name for name in cached_names(tmp_path)
    }
    assert shards.path(SHARDS[1]).read_bytes() == (dataset / SHARDS[1]).read_bytes()
    assert server.requests.count(SHARDS[1]) == 2


def test_max_shards_counts_the_largest(dataset: Path, tmp_path: Path) -> None:
    location = f"pipe:cat {dataset}/{{name}}"
    sizes = sorted((room_of(dataset, name) for name in SHARDS), reverse=True)
    for count in range(1, NUM_SHARDS + 1):
        exact = RemoteConfig(cache_dir=str(tmp_path), cache_gigabytes=(sum(sizes[:count]) + 0.5) / 1e9)
        assert RemoteShards(location, config=exact).max_shards == (None if count == NUM_SHARDS else count)
    assert RemoteShards(location, config=RemoteConfig(cache_dir=str(tmp_path))).max_shards is None
    assert RemoteShards(location, config=RemoteConfig()).max_shards is None
    with pytest.raises(UserError, match=r"largest shard of .* raise data.remote.cache_gigabytes"):
        RemoteShards(location, config=RemoteConfig(cache_dir=str(tmp_path), cache_gigabytes=(sizes[0] - 1) / 1e9))


def test_the_limit_holds_at_every_moment(dataset: Path, tmp_path: Path) -> None:
    """Four processes that want other shards all the time share a cache for two and a half."""
    config = cached(tmp_path, num_shards=2.5, dataset=dataset)
    location = f"pipe:cat {dataset}/{{name}}"

    def read(seed: int) -> None:
        shards = RemoteShards(location, config=config)
        for number in np.random.default_rng(seed).integers(NUM_SHARDS, size=12):
            shards.path(SHARDS[number])

    processes = [in_process(lambda seed=seed: read(seed)) for seed in range(4)]  # type: ignore[misc]
    most = 0
    while any(process.is_alive() for process in processes):
        sizes = {}  # by inode: a file may be renamed between two looks
        with (tmp_path / ".room.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # nothing is evicted or begun meanwhile
            for path in tmp_path.glob("dataset-*/*"):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    sizes[status.st_ino] = status.st_size
        most = max(most, sum(sizes.values()))
        time.sleep(0.001)
    assert [process.exitcode for process in processes] == [0] * 4
    assert config.cache_gigabytes is not None
    # A shard is begun with the room for its index, which is not there yet when the shard is whole.
    assert 0 < most <= config.cache_gigabytes * 1e9 + 4 * INDEX_BYTES


@pytest.mark.slow
def test_a_shard_in_flight_has_its_room(dataset: Path, tmp_path: Path) -> None:
    """Another process waits for the cache's one place until the shard that is slow to come is whole and may go."""
    slow = f"pipe:case {{name}} in {SHARDS[0]}) sleep 1;; esac; cat {dataset}/{{name}}"
    shards = RemoteShards(slow, config=cached(tmp_path, num_shards=1.2, dataset=dataset))
    first = in_process(lambda: shards.path(SHARDS[0]))
    assert until(lambda: any(path.stat().st_size for path in tmp_path.rglob("*.partial")))
    shards.path(SHARDS[1])
    assert cached_names(tmp_path) == {SHARDS[1]}
    first.join(10)
    assert first.exitcode == 0


@pytest.mark.slow
def test_no_file_gets_its_name_while_another_process_counts(dataset: Path, tmp_path: Path) -> None:
    """A process that lists the new name before the renaming and the old name after it would miss the file."""
    size = (dataset / SHARDS[0]).stat().st_size
    slow = f"pipe:case {{name}} in {SHARDS[0]}) sleep 1;; esac; cat {dataset}/{{name}}"
    shards = RemoteShards(slow, config=cached(tmp_path, num_shards=2.5, dataset=dataset))
    fetching = in_process(lambda: shards.path(SHARDS[0]))
    assert until(lambda: any(path.stat().st_size for path in tmp_path.rglob(f".{SHARDS[0]}.partial")))
    with (tmp_path / ".room.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert until(lambda: any(path.stat().st_size == size for path in tmp_path.rglob(f".{SHARDS[0]}.partial")))
        time.sleep(0.3)
        assert cached_names(tmp_path) == set()
    fetching.join(10)
    assert fetching.exitcode == 0
    assert cached_names(tmp_path) == {SHARDS[0]}


def test_the_limit_is_of_all_datasets_and_of_nothing_else(dataset: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    other = write_tiny_dataset(tmp_path / "other", num_samples=4 * NUM_SHARDS, num_samples_per_shard=4, seed=7)
    config = cached(cache, num_shards=2.2, dataset=dataset)
    first = RemoteShards(f"pipe:cat {dataset}/{{name}}", config=config)
    first.path(SHARDS[0])
    mine = cache / "dataset-of-mine"
    mine.mkdir()
    (mine / "thesis.tar").write_bytes(bytes(10**6))
    (cache / "notes.tar").write_bytes(bytes(10**6))
    second = RemoteShards(f"pipe:cat {other}/{{name}}", config=config)
    second.path(SHARDS[0])
    second.path(SHARDS[1])
    assert not (first.path(SHARDS[0]).samefile(second.path(SHARDS[0])))
    assert len(list(cache.glob("dataset-*/shard*.tar"))) == 2
    assert (mine / "thesis.tar").exists()
    assert (cache / "notes.tar").exists()


def test_what_a_killed_fetch_left_counts_and_goes(dataset: Path, tmp_path: Path) -> None:
    shards = RemoteShards(f"pipe:cat {dataset}/{{name}}", config=cached(tmp_path, num_shards=2.2, dataset=dataset))
    left = shards.path(SHARDS[0]).with_name(f".{SHARDS[5]}.partial")
    left.write_bytes(bytes(2 * room_of(dataset, SHARDS[5])))
    shards.path(SHARDS[1])
    assert not left.exists()


def test_an_evicted_shard_stays_readable_where_it_is_mapped(dataset: Path, tmp_path: Path) -> None:
    config = cached(tmp_path, num_shards=1.2, dataset=dataset)
    shards = RemoteShards(f"pipe:cat {dataset}/{{name}}", config=config)
    mapped = np.memmap(shards.path(SHARDS[0]), mode="r")
    shards.path(SHARDS[1])
    assert cached_names(tmp_path) == {SHARDS[1]}
    assert mapped.tobytes() == (dataset / SHARDS[0]).read_bytes()


def test_a_store_reads_through_a_cache_for_one_shard(dataset: Path, tmp_path: Path) -> None:
    config = cached(tmp_path, num_shards=1.2, dataset=dataset)
    remote = SampleStore(f"pipe:cat {dataset}/{{name}}", remote=config)
    local = SampleStore(dataset)
    assert remote.max_shards == 1
    for index in np.random.default_rng(0).permutation(len(local))[:10].tolist():
        assert remote.encoded(index) == local.encoded(index)


# The disk


def test_a_cache_that_cannot_hold_what_it_is_to_hold_is_told_before_training(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(room_of(dataset, name) for name in SHARDS)

    def free(_: object) -> object:
        return shutil._ntuple_diskusage(10**9, 10**9 - free_bytes, free_bytes)

    monkeypatch.setattr(shutil, "disk_usage", free)
    location = f"pipe:cat {dataset}/{{name}}"
    free_bytes = needed
    shards = RemoteShards(location, config=cached(tmp_path))
    free_bytes = needed - 1
    with pytest.raises(
        UserError, match=r"has .* GB free; free some, set data.remote.cache_dir .* lower data.remote.cache_gigabytes"
    ):
        RemoteShards(location, config=cached(tmp_path))
    RemoteShards(location, config=cached(tmp_path, num_shards=2, dataset=dataset))
    shards.path(SHARDS[0])  # one that is here needs no room again
    RemoteShards(location, config=cached(tmp_path))


def test_a_disk_that_fills_is_told(dataset: Path, tmp_path: Path) -> None:
    """A limit on the size of a file stands in for the disk: it needs no privilege, and fails in the same place."""
    shards = RemoteShards(f"pipe:cat {dataset}/{{name}}", config=cached(tmp_path / "cache"))
    shards.path(SHARDS[0])

    def fetch_with_little_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
        with pytest.raises(
            UserError, match=f"the disk of the cache {tmp_path}/cache is full .* set data.remote.cache_dir"
        ):
            shards.path(SHARDS[1])

    process = in_process(fetch_with_little_room)
    process.join(20)
    assert process.exitcode == 0
    assert cached_names(tmp_path / "cache") == {SHARDS[0]}
    assert not list(tmp_path.rglob("*.partial"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one megabyte."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_real_disk_that_fills_is_told_and_used_again(dataset: Path, small_disk: Path) -> None:
    shards = RemoteShards(f"pipe:cat {dataset}/{{name}}", config=cached(small_disk))
    shards.path(SHARDS[0])
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(2**20))
    with pytest.raises(UserError, match=r"is full .No space left on device.*free some"):
        shards.path(SHARDS[1])
    with pytest.raises(UserError, match="GB free; free some"):
        RemoteShards(f"pipe:cat {dataset}/{{name}}", config=cached(small_disk))
    filler.unlink()
    assert shards.path(SHARDS[1]).read_bytes() == (dataset / SHARDS[1]).read_bytes()


def test_a_cache_that_cannot_be_made_is_told(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be the cache of .*; set data.remote.cache_dir"):
        RemoteShards(f"pipe:cat {dataset}/{{name}}", config=cached(tmp_path / "file" / "cache"))


# Without a cache


def test_a_spool_is_of_one_user_and_goes_with_its_last_reader(dataset: Path, spools: Path) -> None:
    location = f"pipe:cat {dataset}/{{name}}"
    entered, leave = FORK.Event(), FORK.Event()

    def read() -> None:
        path = RemoteShards(location, config=RemoteConfig()).path(SHARDS[0])
        assert path.is_relative_to(spools)
        assert (path.parents[1].stat().st_mode & 0o777) == 0o700

    def read_and_stay() -> None:
        read()
        entered.set()
        leave.wait(20)

    staying = in_process(read_and_stay)
    assert entered.wait(20)
    leaving = in_process(read)
    leaving.join(20)
    assert leaving.exitcode == 0
    assert len(list(spools.rglob(SHARDS[0]))) == 1
    leave.set()
    staying.join(20)
    assert staying.exitcode == 0
    assert not list(spools.iterdir())


def test_a_spool_that_somebody_else_laid_out_is_refused(dataset: Path, spools: Path, tmp_path: Path) -> None:
    content = load_manifest(dataset).sha256[:16]
    (tmp_path / "trap").mkdir()
    (spools / f"feature-dropout-{os.getuid()}-{content}").symlink_to(tmp_path / "trap")
    with pytest.raises(UserError, match=r"belongs to another user; set data.remote.cache_dir"):
        RemoteShards(f"pipe:cat {dataset}/{{name}}", config=RemoteConfig())
    assert not list((tmp_path / "trap").iterdir())


# Ahead of time


def test_shards_come_in_the_background(server: FaultyServer, tmp_path: Path) -> None:
    shards = RemoteShards(server.url, config=cached(tmp_path))
    shards.prefetch(SHARDS[:3])
    assert until(lambda: cached_names(tmp_path) == set(SHARDS[:3]))
    shards.prefetch(SHARDS[3:4])
    shards.path(SHARDS[3])
    assert [name for name in server.requests if name in SHARDS] == SHARDS[:4]


@pytest.mark.slow
def test_a_later_call_replaces_what_still_waits(server: FaultyServer, tmp_path: Path) -> None:
    server.faults[SHARDS[0]] = ["stall"]
    shards = RemoteShards(server.url, config=cached(tmp_path, stall_seconds=0.6, num_attempts=10))
    shards.prefetch(SHARDS[:3])
    assert until(lambda: SHARDS[0] in server.requests)
    shards.prefetch([SHARDS[4]])
    assert until(lambda: cached_names(tmp_path) == {SHARDS[0], SHARDS[4]})
    time.sleep(0.2)
    assert SHARDS[1] not in server.requests


def test_trouble_ahead_is_not_raised_and_told_by_path(
    server: FaultyServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.faults[SHARDS[0]], server.for_ever = [404], True
    shards = RemoteShards(server.url, config=cached(tmp_path))
    shards.prefetch(SHARDS[:2])
    assert until(lambda: cached_names(tmp_path) == {SHARDS[1]})
    assert "could not prefetch" in caplog.text
    with pytest.raises(UserError, match="404"):
        shards.path(SHARDS[0])


@pytest.mark.slow
def test_a_forked_process_fetches_ahead_by_itself(server: FaultyServer, tmp_path: Path) -> None:
    """The thread of the process that forked it is busy, and is not in the new one."""
    server.faults[SHARDS[0]] = ["stall"]
    shards = RemoteShards(server.url, config=cached(tmp_path, stall_seconds=1.0, num_attempts=10))
    shards.prefetch([SHARDS[0]])
    assert until(lambda: SHARDS[0] in server.requests)

    def fork() -> None:
        shards.prefetch([SHARDS[1]])
        assert until(lambda: SHARDS[1] in cached_names(tmp_path))

    process = in_process(fork)
    process.join(20)
    assert process.exitcode == 0
    assert until(lambda: SHARDS[0] in cached_names(tmp_path))


@pytest.mark.process
@pytest.mark.parametrize("kind", ["process", "worker"])
@pytest.mark.parametrize("transport", ["http", "pipe"])
def test_a_process_that_ends_leaves_no_fetch_behind(
    transport: str, kind: str, server: FaultyServer, tmp_path: Path
) -> None:
    """Neither a command nor a thread that waits for a server."""
    server.faults[SHARDS[0]] = ["stall"]
    marker = f"86400.{uuid4().int % 10**12}"
    location = server.url
    if transport == "pipe":
        location = f"pipe:case {{name}} in {SHARDS[0]}) sleep {marker};; esac; cat {server.directory}/{{name}}"

    def is_fetching() -> bool:
        return bool(running(f"sleep {marker}") if transport == "pipe" else list(tmp_path.rglob("*.partial")))

    start = time.monotonic()
    if kind == "worker":
        shards = RemoteShards(location, config=cached(tmp_path, stall_seconds=60.0))

        def work() -> None:
            shards.prefetch(SHARDS[:1])
            assert until(is_fetching)

        process = in_process(work)
        process.join(20)
        assert process.exitcode == 0
    else:
        code = (
            "import sys; from data_pipeline.remote.cache import RemoteConfig, RemoteShards\n"
            "shards = RemoteShards(sys.argv[1], config=RemoteConfig(cache_dir=sys.argv[2], stall_seconds=60.0))\n"
            f"shards.prefetch(['{SHARDS[0]}']); sys.stdin.read()\n"
        )
        command = [sys.executable, "-c", code, location, str(tmp_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
            try:
                assert until(is_fetching, seconds=30.0)
                child.communicate(timeout=30)  # closes its input, at which it ends
            finally:
                child.kill()
        assert child.returncode == 0
    assert time.monotonic() - start < 40.0
    assert until(lambda: not running(marker))
    assert not list(tmp_path.rglob("*.partial"))
