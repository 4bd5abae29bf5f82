from __future__ import annotations

import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import webdataset

from data_pipeline.errors import UserError
from data_pipeline.sample import Sample
from data_pipeline.shards import EncodedSample, SampleStore, encode, index_path, index_shard, write_shards
from tests.data_pipeline.random_shards import random_samples, write_dataset, write_manifest

NUM_SAMPLES = 23


def build(directory: Path, samples: list[Sample], *, num_samples_per_shard: int = 10) -> list[Path]:
    entries = write_shards(map(encode, samples), directory, num_samples_per_shard=num_samples_per_shard)
    write_manifest(directory, entries)
    return [directory / entry.name for entry in entries]


def assert_same(actual: Sample, expected: Sample) -> None:
    assert (actual.index, actual.label_base, actual.label_overlay) == (
        expected.index,
        expected.label_base,
        expected.label_overlay,
    )
    np.testing.assert_array_equal(actual.image, expected.image)
    np.testing.assert_array_equal(actual.mask, expected.mask)


def test_written_samples_come_back(tmp_path: Path) -> None:
    samples = random_samples(NUM_SAMPLES)
    build(tmp_path, samples)
    store = SampleStore(tmp_path)
    assert len(store) == NUM_SAMPLES
    for sample in samples:
        assert_same(store[sample.index], sample)
        assert store.encoded(sample.index) == encode(sample)
    with pytest.raises(IndexError):
        store[NUM_SAMPLES]


def test_plain_webdataset_reads_the_same_samples(tmp_path: Path) -> None:
    samples = random_samples(NUM_SAMPLES)
    paths = build(tmp_path, samples)
    assert [path.name for path in paths] == ["shard-00000.tar", "shard-00001.tar", "shard-00002.tar"]
    peer = webdataset.WebDataset([str(path) for path in paths], shardshuffle=False).decode("pil")
    for read, sample in zip(peer, samples, strict=True):
        assert read["__key__"] == sample.key
        assert read["json"] == {
            "index": sample.index,
            "label_base": sample.label_base,
            "label_overlay": sample.label_overlay,
        }
        np.testing.assert_array_equal(np.asarray(read["png"]), sample.image)
        np.testing.assert_array_equal(np.asarray(read["mask.png"].convert("L")), sample.mask)


def test_store_reads_tars_that_plain_webdataset_wrote(tmp_path: Path) -> None:
    samples = write_dataset(tmp_path, [3, 1, 7])
    store = SampleStore(tmp_path)
    for sample in samples:
        assert_same(store[sample.index], sample)


def test_two_writes_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = random_samples(NUM_SAMPLES)
    first = build(tmp_path / "first", samples)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 86400)
    monkeypatch.setenv("USER", "somebody_else")
    second = build(tmp_path / "second", samples)
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert index_path(one).read_bytes() == index_path(other).read_bytes()
    assert (tmp_path / "first/manifest.json").read_text() == (tmp_path / "second/manifest.json").read_text()


def test_nothing_in_a_tar_tells_who_wrote_it(tmp_path: Path) -> None:
    [path] = build(tmp_path, random_samples(2))
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {(0, 0, 0, "", "", 0o444)}


def test_index_of_the_writer_equals_a_pass_over_the_tar(tmp_path: Path) -> None:
    for path in build(tmp_path, random_samples(NUM_SAMPLES)):
        with np.load(index_path(path)) as saved:
            np.testing.assert_array_equal(saved["rows"], index_shard(path))


@pytest.mark.parametrize("spoil", ["missing", "other dataset", "truncated", "garbage", "empty"])
def test_an_index_that_does_not_fit_is_rebuilt(tmp_path: Path, spoil: str) -> None:
    samples = random_samples(NUM_SAMPLES)
    [path] = build(tmp_path / "data", samples, num_samples_per_shard=100)
    index = index_path(path)
    right = index.read_bytes()
    match spoil:
        case "missing":
            index.unlink()
        case "other dataset":
            [other] = build(tmp_path / "other", random_samples(NUM_SAMPLES + 1), num_samples_per_shard=100)
            index.write_bytes(index_path(other).read_bytes())
        case "truncated":
            index.write_bytes(right[: len(right) // 2])
        case "garbage":
            index.write_bytes(b"not an index")
        case "empty":
            index.write_bytes(b"")
    assert_same(SampleStore(tmp_path / "data")[17], samples[17])
    assert index.read_bytes() == right


def test_an_index_that_cannot_be_saved_stays_in_memory(tmp_path: Path) -> None:
    samples = write_dataset(tmp_path, [5])
    index_path(tmp_path / "shard-00000.tar").mkdir()  # nothing can be written there, not even by root
    before = sorted(tmp_path.iterdir())
    assert_same(SampleStore(tmp_path)[4], samples[4])
    assert sorted(tmp_path.iterdir()) == before


def test_shards_hold_no_file_open(tmp_path: Path) -> None:
    write_dataset(tmp_path, [1] * 20)
    SampleStore(tmp_path)  # what the first use of a library opens for good is not counted
    before = len(list(Path("/proc/self/fd").iterdir()))
    store = SampleStore(tmp_path)
    samples = [store[index] for index in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert len(samples) == 20


@pytest.mark.parametrize("order", [[1, 2, 3], [0, 1, 3], [0, 2, 1], [0, 1, 1]])
def test_samples_out_of_order_are_refused(tmp_path: Path, order: list[int]) -> None:
    samples = random_samples(4)
    with pytest.raises(ValueError, match="index order"):
        write_shards((encode(samples[index]) for index in order), tmp_path, num_samples_per_shard=10)


def test_samples_are_written_as_they_come(tmp_path: Path) -> None:
    shard_was_begun: list[bool] = []

    def samples() -> Iterator[EncodedSample]:
        for sample in random_samples(3):
            shard_was_begun.append((tmp_path / "shard-00000.tar").exists())
            yield encode(sample)

    write_shards(samples(), tmp_path, num_samples_per_shard=5)
    assert shard_was_begun == [False, True, True]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_dataset(tmp_path, [2, 2])
    (tmp_path / "shard-00001.tar").unlink()
    with pytest.raises(UserError, match=r"shard-00001\.tar is named in the manifest but missing"):
        SampleStore(tmp_path)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    write_dataset(tmp_path, [2, 2])
    path = tmp_path / "shard-00001.tar"
    size = path.stat().st_size
    os.truncate(path, size - 5000)
    with pytest.raises(UserError, match=rf"shard-00001\.tar has {size - 5000} bytes but the manifest says {size}"):
        SampleStore(tmp_path)


def test_a_file_that_is_no_tar_is_named(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.tar"
    path.write_bytes(b"x" * 10240)
    with pytest.raises(UserError, match=r"shard-00000\.tar is not a whole tar"):
        index_shard(path)


@pytest.mark.parametrize("missing", ["json", "mask.png", "png"])
def test_a_sample_without_a_member_is_named(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "shard-00000.tar"
    with webdataset.TarWriter(str(path), encoder=False) as writer:
        for key in ("00000000", "00000001"):
            sample = {"__key__": key, "json": b"{}", "mask.png": b"m", "png": b"p"}
            if key == "00000001":
                del sample[missing]
            writer.write(sample)
    with pytest.raises(UserError, match=rf"sample 00000001 has no 00000001\.{missing};"):
        index_shard(path)


def test_a_sample_under_another_index_is_not_given_out(tmp_path: Path) -> None:
    """An index whose rows were exchanged passes the sha256, so the sample itself is the last witness."""
    [path] = build(tmp_path, random_samples(3))
    with np.load(index_path(path)) as saved:
        rows, sha256 = saved["rows"], saved["shard_sha256"]
    np.savez(index_path(path), rows=rows[::-1], shard_sha256=sha256)
    with pytest.raises(UserError, match=r"sample 00000000 does not decode \(it says that it is sample 2\)"):
        SampleStore(tmp_path)[0]
