"""Tars in an object store or on a web server, which are fetched whole, again if damaged, and refused if replaced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import numpy as np
import pytest

from data_pipeline.building.index_tars import make_index
from data_pipeline.core.errors import UserError
from data_pipeline.loading.decode import decode
from data_pipeline.remote.fetch import RemoteConfig
from data_pipeline.storage.index import has_remote_tars
from data_pipeline.storage.manifest import Fields
from data_pipeline.storage.store import SampleStore
from tests.data_pipeline.remote.http_server import FaultyServer, serve
from tests.object_store import served_bucket
from tests.tars import numbers_in, simple


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """An S3-compatible server on the loopback address, with an empty bucket. Its URL is in AWS_ENDPOINT_URL."""
    with served_bucket("pictures") as name:
        yield f"s3://{name}"


def upload(directory: Path, bucket: str, prefix: str) -> str:
    client = boto3.client("s3")
    for path in sorted(directory.glob("*.tar")):
        client.upload_file(str(path), bucket.removeprefix("s3://"), f"{prefix}/{path.name}")
    return f"{bucket}/{prefix}"


def test_tars_in_an_object_store_are_indexed_and_read_through_the_cache(bucket: str, tmp_path: Path) -> None:
    where = upload(simple(tmp_path / "tars", [5, 6, 7]), bucket, "read")
    make_index(f"{where}/train-{{0000..0002}}.tar", tmp_path / "index", fields=Fields(), size=32)
    remote = RemoteConfig(cache_dir=str(tmp_path / "cache"))
    store = SampleStore(tmp_path / "index", remote=remote)
    assert store.is_remote
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").rglob("*.tar"))
    assert numbers_in(store) == list(range(18))
    assert len(list((tmp_path / "cache").rglob("*.tar"))) == 3
    assert has_remote_tars(tmp_path / "index")
    assert (tmp_path / "index" / "tars.sha256").stat().st_size == 3 * 32


def test_a_remote_tar_that_was_replaced_is_refused(bucket: str, tmp_path: Path) -> None:
    tars = simple(tmp_path / "tars", [5])
    where = upload(tars, bucket, "replaced")
    make_index(f"{where}/train-0000.tar", tmp_path / "index", fields=Fields(), size=32)
    path = tars / "train-0000.tar"
    content = bytearray(path.read_bytes())
    content[3_600] ^= 1
    path.write_bytes(content)
    upload(tars, bucket, "replaced")
    store = SampleStore(tmp_path / "index", remote=RemoteConfig(cache_dir=str(tmp_path / "cache"), num_attempts=1))
    with pytest.raises(UserError, match="sha256"):
        decode(store, np.arange(5))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """A web server with two tars of three samples each, of which fetches wait only a moment between attempts."""
    monkeypatch.setattr("data_pipeline.remote.fetch._LONGEST_PAUSE", 0.01)
    with serve(simple(tmp_path / "served", [3, 3])) as server:
        yield server


BOTH = "train-{0000..0001}.tar"


@pytest.mark.parametrize("answer", ["truncate", "page", "nothing", "no file"])
def test_a_remote_tar_that_is_not_whole_is_refused(server: FaultyServer, tmp_path: Path, answer: str) -> None:
    path = server.directory / "train-0001.tar"
    if answer == "truncate":
        server.for_ever = True
    else:
        path.write_bytes({"page": b"<html>please log in</html>" * 40, "nothing": b"", "no file": bytes(10_240)}[answer])
    server.requests.clear()
    server.faults[path.name] = ["truncate"] * (answer == "truncate")
    with pytest.raises(UserError, match=rf"{path.name}.* not a whole tar"):
        make_index(f"{server.url}/{BOTH}", tmp_path / "index", fields=Fields(), size=32)
    assert not (tmp_path / "index" / "manifest.json").exists()
