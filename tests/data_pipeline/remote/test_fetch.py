"""Fetching one file: from servers that fail in every way, within limits of time that hold."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import boto3
import numpy as np
import pytest

from data_pipeline.core.errors import UserError
from data_pipeline.remote.cache import read_manifest
from data_pipeline.remote.fetch import RemoteConfig, RemoteFile, fetch
from data_pipeline.storage.locations import listed_tars
from tests.data_pipeline.remote.http_server import Fault, FaultyServer, closed_port, serve
from tests.object_store import served_bucket

CONTENT = np.random.default_rng(0).bytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FaultyServer]:
    (tmp_path / "file").write_bytes(CONTENT)
    with serve(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with served_bucket("fetched") as name:
        boto3.client("s3").put_object(Bucket=name, Key="folder/file", Body=CONTENT)
        yield f"s3://{name}/folder"


def fetched(url: str, tmp_path: Path, *, stall: float = 10.0, attempts: int = 2, seconds: float = 20) -> bytes:
    path, file = tmp_path / "copy", RemoteFile(url, len(CONTENT), SHA256)
    fetch(file, path, config=RemoteConfig(stall_seconds=stall, file_seconds=seconds, num_attempts=attempts))
    return path.read_bytes()


def test_a_file_comes_whole(server: FaultyServer, tmp_path: Path) -> None:
    (tmp_path / "copy").write_bytes(CONTENT * 2)  # of an earlier attempt
    for url in (f"{server.url}/file", f"file://{server.directory}/file"):
        assert fetched(url, tmp_path) == CONTENT
    server.redirections["elsewhere"] = "file"
    assert fetched(f"{server.url}/elsewhere", tmp_path) == CONTENT


def test_a_process_that_is_forked_after_a_fetch_fetches_too(server: FaultyServer, bucket: str, tmp_path: Path) -> None:
    """As the workers of a DataLoader are, after the training process has fetched the manifest."""
    for url in (f"{server.url}/file", f"{bucket}/file"):
        assert fetched(url, tmp_path) == CONTENT
        if (child := os.fork()) == 0:
            status = 1
            try:
                status = int(fetched(url, tmp_path, seconds=10.0) != CONTENT)
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["drop", "truncate", "stall", "mute", 500, 429])
def test_a_failure_that_passes_is_survived(server: FaultyServer, fault: Fault, tmp_path: Path) -> None:
    server.faults["file"] = [fault]
    stall = 1.0 if fault in ("stall", "mute") else 10.0
    assert fetched(f"{server.url}/file", tmp_path, stall=stall) == CONTENT
    assert server.requests == ["file", "file"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("drop", "150000 of 300000"),
        ("truncate", "150000 bytes, not 300000"),
        ("stall", "Timeout"),
        ("mute", "Timeout"),
    ],
)
def test_a_failure_that_stays_is_told(server: FaultyServer, fault: Fault, said: str, tmp_path: Path) -> None:
    server.faults["file"], server.for_ever = [fault], True
    start = time.monotonic()
    with pytest.raises(UserError, match=f"{server.url}/file .*{said}.*attempt 2"):
        fetched(f"{server.url}/file", tmp_path, stall=0.5)
    assert time.monotonic() - start < 8.0


@pytest.mark.slow
def test_the_limit_of_a_file_holds_over_all_attempts(server: FaultyServer, tmp_path: Path) -> None:
    server.faults["file"], server.for_ever = ["stall", "trickle"], True
    start = time.monotonic()
    with pytest.raises(UserError, match=r"Timeout.*attempt 2.*file_seconds"):
        fetched(f"{server.url}/file", tmp_path, stall=0.5, attempts=100, seconds=2)
    assert 1.8 < time.monotonic() - start < 4


def test_a_password_comes_from_a_file(server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.password = "me:key"
    with pytest.raises(UserError, match="401"):
        fetched(f"{server.url}/file", tmp_path)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password key\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert fetched(f"{server.url}/file", tmp_path) == CONTENT


@pytest.mark.parametrize(
    ("location", "shown"),
    [("http://me:key@host/birds", "http://***@host/birds"), ("az://birds/train?sig=key", "az://birds/train?***")],
)
def test_a_location_with_a_secret_is_refused_and_not_shown(location: str, shown: str) -> None:
    for read in (partial(read_manifest, config=RemoteConfig()), listed_tars):
        with pytest.raises(UserError, match="holds a password or a query") as raised:
            read(location)
        assert str(raised.value).startswith(shown)
        assert "key" not in str(raised.value)


@pytest.mark.parametrize("status", [403, 404])
def test_a_status_that_will_stay_is_not_tried_again(server: FaultyServer, status: int, tmp_path: Path) -> None:
    server.faults["file"], server.for_ever = [status], True
    with pytest.raises(UserError, match=f"{server.url}/file.*attempt 1"):
        fetched(f"{server.url}/file", tmp_path, attempts=5)
    assert server.requests == ["file"]


def test_another_file_in_its_place_is_told_at_once(server: FaultyServer, tmp_path: Path) -> None:
    server.faults["file"] = ["corrupt"]
    with pytest.raises(UserError, match=r"sha256 \(attempt 1\)"):
        fetched(f"{server.url}/file", tmp_path)


def test_a_place_where_nobody_answers_is_told(server: FaultyServer, tmp_path: Path) -> None:
    for url, said in [
        (f"http://127.0.0.1:{closed_port()}/file", "Cannot connect"),
        ("http://no-such-host.invalid/file", "no-such-host"),
        ("ftpx://host/file", "Protocol not known"),
        (f"file://{tmp_path}/none", "FileNotFound"),
    ]:
        with pytest.raises(UserError, match=said):
            fetched(url, tmp_path)
