"""A reader of an object store that ends with half of a cache goes on with the same batches."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import boto3
import pytest

from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.remote.fetch import RemoteConfig
from tests.object_store import served_bucket
from tests.tiny_data import write_tiny_dataset

NUM_STEPS = 15  # of 8 samples, so two and a half epochs of 48


def lines(location: str, cache_dir: Path | str, gigabytes: float, *, start_step: int = 0) -> Iterator[str]:
    """Yield step, indices and a hash of the inputs of each batch."""
    remote = RemoteConfig(cache_dir=str(cache_dir), cache_gigabytes=gigabytes, file_seconds=20)
    stream = Stream(
        location,
        read=ReadConfig(num_workers=0, placement="stream", shuffle_shards=2, remote=remote),
        global_batch_size=8,
        seed=4,
        rank=0,
        world_size=1,
        start_step=start_step,
        end_step=NUM_STEPS,
    )
    for batch in stream:
        content = hashlib.sha256(batch.inputs_a.numpy().tobytes()).hexdigest()[:16]
        yield " ".join(map(str, [batch.step, *batch.index_B.tolist(), content]))


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with served_bucket("reader") as name:
        yield name


@pytest.mark.slow
def test_a_reader_that_ended_goes_on_with_the_same_batches(bucket: str, tmp_path: Path) -> None:
    client = boto3.client("s3")
    directory = tmp_path / "built"
    write_tiny_dataset(directory, num_samples=48, num_samples_per_shard=8, overlay="online")
    for path in directory.iterdir():
        client.upload_file(str(path), bucket, path.name)
    location = f"s3://{bucket}"
    largest = max(path.stat().st_size for path in directory.glob("*.tar"))
    gigabytes = 4.9 * largest / 1e9  # four shards and their indexes of six
    whole = list(lines(location, tmp_path / "other", gigabytes))
    assert [int(line.split()[0]) for line in whole] == list(range(NUM_STEPS))

    cache, found = tmp_path / "cache", list[str]()
    for num_lines in (2, 6):  # in the first epoch, and in the second
        found += islice(lines(location, cache, gigabytes, start_step=len(found)), num_lines)
        for thread in threading.enumerate():
            if "_fetch_ahead" in thread.name:  # it would still evict copies; a reader's threads end with its process
                thread.join()
        for copy in sorted(cache.rglob("*.tar"))[:1]:  # as a crash of the machine may leave it
            copy.chmod(0o644)
            copy.write_bytes(copy.read_bytes()[: copy.stat().st_size // 2])
    found += lines(location, cache, gigabytes, start_step=len(found))
    assert found == whole
