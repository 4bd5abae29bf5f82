from __future__ import annotations

import hashlib
import io
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.core.sample import Sample
from data_pipeline.storage.shards import (
    EncodedSample,
    encode,
    index_content,
    index_path,
    index_shard,
    load_index,
    write_shard,
    write_shards,
)
from data_pipeline.storage.tar_headers import is_member_at, read_contents
from tests.data_pipeline.random_shards import random_samples, write_dataset, write_manifest

NUM_SAMPLES = 23
MEMBERS = ("json", "mask.png", "png")


def build(directory: Path, samples: list[Sample], *, num_samples_per_shard: int = 10) -> list[Path]:
    entries = write_shards(map(encode, samples), directory, num_samples_per_shard=num_samples_per_shard)
    write_manifest(directory, entries)
    return [directory / entry.name for entry in entries]


def random_sound(index: int, dtype: type[np.generic]) -> Sample:
    points = np.random.default_rng(index).integers(-(2**15), 2**15, 100 + index)
    return Sample(index, (points / 2**15 if dtype is np.float32 else points).astype(dtype), None, {"base": 3})


def write_tar(path: Path, members: list[tuple[str, bytes]], *, tar_format: int = tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mtime = 1.25 if tar_format == tarfile.PAX_FORMAT else 1  # a fraction takes a header of its own
            tar.addfile(info, io.BytesIO(content))


def some_members(num_samples: int) -> list[tuple[str, bytes]]:
    rng = np.random.default_rng(num_samples)
    return [
        (f"{index:08d}.{extension}", rng.bytes(int(rng.integers(0, 1500))))
        for index in range(num_samples)
        for extension in MEMBERS
    ]


def contents(path: Path, rows: np.ndarray, *, first: int = 0) -> dict[str, bytes]:
    """What the rows of an index say that the members are."""
    data = path.read_bytes()
    return {
        f"{first + number:08d}.{extension}": data[row[2 * column] : row[2 * column] + row[2 * column + 1]]
        for number, row in enumerate(rows.tolist())
        for column, extension in enumerate(MEMBERS)
        if row[2 * column] >= 0
    }


def test_plain_webdataset_reads_the_same_samples(tmp_path: Path) -> None:
    samples = random_samples(NUM_SAMPLES)
    paths = build(tmp_path, samples)
    assert [path.name for path in paths] == ["shard-00000.tar", "shard-00001.tar", "shard-00002.tar"]
    peer = webdataset.WebDataset([str(path) for path in paths], shardshuffle=False).decode("pil")
    for read, sample in zip(peer, samples, strict=True):
        assert read["__key__"] == sample.key
        assert read["json"] == {
            "index": sample.index,
            "label_base": sample.labels["base"],
            "label_overlay": sample.labels["overlay"],
        }
        np.testing.assert_array_equal(np.asarray(read["png"]), sample.content)
        np.testing.assert_array_equal(np.asarray(read["mask.png"].convert("L")), sample.mask)


@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_plain_webdataset_and_soundfile_read_the_same_sounds(tmp_path: Path, dtype: type[np.generic]) -> None:
    samples = [random_sound(index, dtype) for index in range(5)]
    encoded = (encode(sample, sample_rate=8_000) for sample in samples)
    [entry] = write_shards(encoded, tmp_path, num_samples_per_shard=10)
    peer = webdataset.WebDataset([str(tmp_path / entry.name)], shardshuffle=False)
    for read, sample in zip(peer, samples, strict=True):
        assert read.keys() - {"__key__", "__url__", "__local_path__"} == {"json", "wav"}
        points, sample_rate = soundfile.read(io.BytesIO(read["wav"]), dtype=dtype.__name__)
        assert sample_rate == 8_000
        np.testing.assert_array_equal(points, sample.content)


def test_a_picture_on_which_nothing_is_drawn_has_no_mask() -> None:
    sample = random_samples(1)[0]
    assert list(encode(sample).members) == ["json", "mask.png", "png"]
    assert list(encode(Sample(0, sample.content, None, {"base": 1})).members) == ["json", "png"]


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


def test_shards_written_one_by_one_are_the_same(tmp_path: Path) -> None:
    samples = random_samples(NUM_SAMPLES)
    together = build(tmp_path / "together", samples)
    for number, path in enumerate(together):
        alone = tmp_path / path.name
        entry = write_shard(map(encode, samples[10 * number : 10 * number + 10]), alone)
        assert (entry.name, entry.num_samples) == (path.name, min(10, NUM_SAMPLES - 10 * number))
        assert alone.read_bytes() == path.read_bytes()
        assert index_path(alone).read_bytes() == index_path(path).read_bytes()


def test_nothing_in_a_tar_tells_who_wrote_it(tmp_path: Path) -> None:
    [path] = build(tmp_path, random_samples(2))
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {(0, 0, 0, "", "", 0o444)}


def test_index_of_the_writer_equals_a_pass_over_the_tar(tmp_path: Path) -> None:
    first = 0
    for path in build(tmp_path, random_samples(NUM_SAMPLES)):
        content = index_path(path).read_bytes()
        due = range(first, first + len(content) // (16 * len(MEMBERS)))
        assert index_content(index_shard(path, members=MEMBERS, due=due)) == content
        first = due.stop
    assert first == NUM_SAMPLES


@pytest.mark.parametrize("order", [[1, 2, 3], [0, 1, 3], [0, 2, 1], [0, 1, 1]])
@pytest.mark.parametrize("num_samples_per_shard", [1, 2, 10])
def test_samples_out_of_order_are_refused(tmp_path: Path, order: list[int], num_samples_per_shard: int) -> None:
    samples = random_samples(4)
    with pytest.raises(ValueError, match="index order"):
        write_shards((encode(samples[index]) for index in order), tmp_path, num_samples_per_shard=num_samples_per_shard)


def test_samples_of_different_members_are_refused(tmp_path: Path) -> None:
    drawn, plain = random_samples(2)
    samples = [drawn, Sample(plain.index, plain.content, None, {"base": 1})]
    with pytest.raises(ValueError, match=r"sample 00000001 has the members \['json', 'png'\], not"):
        write_shard(map(encode, samples), tmp_path / "shard-00000.tar")
    with pytest.raises(ValueError, match="at least one sample"):
        write_shard([], tmp_path / "shard-00000.tar")


def test_samples_are_written_as_they_come(tmp_path: Path) -> None:
    shard_was_begun: list[bool] = []

    def samples() -> Iterator[EncodedSample]:
        for sample in random_samples(3):
            shard_was_begun.append((tmp_path / "shard-00000.tar").exists())
            yield encode(sample)

    write_shards(samples(), tmp_path, num_samples_per_shard=5)
    assert shard_was_begun == [False, True, True]


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("shuffled", [False, True])
def test_members_are_found_wherever_they_lie(tmp_path: Path, tar_format: int, shuffled: bool) -> None:
    path = tmp_path / "any.tar"
    members = some_members(12)
    if shuffled:
        members = [members[number] for number in np.random.default_rng(0).permutation(len(members))]
    write_tar(path, members, tar_format=tar_format)
    assert contents(path, index_shard(path, members=MEMBERS, due=range(12))) == dict(members)
    within = {name: content for name, content in members if 3 <= int(name[:8]) < 7}
    assert contents(path, index_shard(path, members=MEMBERS, due=range(3, 7)), first=3) == within


def test_tars_of_any_kind_are_indexed(tmp_path: Path) -> None:
    """Long names, folders, times in fractions of a second: what other writers put in a tar."""
    path = tmp_path / "any.tar"
    members = some_members(3)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in [("x" * 300, b"long"), *members, ("00000001.txt", b"other"), ("00000009.png", b"other")]:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1.25
            tar.addfile(info, io.BytesIO(content))
    assert contents(path, index_shard(path, members=MEMBERS, due=range(3))) == dict(members)


@pytest.mark.parametrize("missing", MEMBERS)
def test_a_member_that_is_missing_is_marked(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "shard-00000.tar"
    members = [(name, content) for name, content in some_members(3) if name != f"00000001.{missing}"]
    write_tar(path, members)
    rows = index_shard(path, members=MEMBERS, due=range(3))
    assert contents(path, rows) == dict(members)
    column = 2 * MEMBERS.index(missing)
    assert rows[1, column : column + 2].tolist() == [-1, -1]


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0, 1), pax=st.booleans())
def test_a_tar_that_is_cut_short_gives_what_is_before_the_cut(
    tmp_path_factory: pytest.TempPathFactory, share: float, pax: bool
) -> None:
    path = tmp_path_factory.mktemp("cut") / "shard-00000.tar"
    members = some_members(4)
    write_tar(path, members, tar_format=tarfile.PAX_FORMAT if pax else tarfile.USTAR_FORMAT)
    with tarfile.open(path) as tar:
        ends = {member.name: member.offset_data + member.size for member in tar}
    size = int(share * path.stat().st_size)
    os.truncate(path, size)
    found = contents(path, index_shard(path, members=MEMBERS, due=range(4)))
    assert found == {name: content for name, content in members if ends[name] <= size}


@pytest.mark.parametrize("content", [b"", b"x" * 10240, b"\0" * 10240, b"short"])
def test_a_file_that_is_no_tar_holds_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "shard-00000.tar"
    path.write_bytes(content)
    assert (index_shard(path, members=MEMBERS, due=range(3)) == -1).all()


def test_a_damaged_header_ends_the_index(tmp_path: Path) -> None:
    [path] = build(tmp_path, random_samples(6))
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        start = tar.getmember("00000003.png").offset
    data[start] ^= 1  # the name
    path.chmod(0o644)
    path.write_bytes(data)
    rows = index_shard(path, members=MEMBERS, due=range(6))
    assert (rows == -1).any(axis=1).tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize(
    "spoil",
    [
        "missing",
        "other dataset",
        "truncated",
        "garbage",
        "empty",
        "other members",
        "too far",
        "of a part",
        "of an array file",
    ],
)
def test_an_index_that_does_not_fit_is_rebuilt(tmp_path: Path, spoil: str) -> None:
    samples = random_samples(NUM_SAMPLES)
    [entry] = write_shards(map(encode, samples), tmp_path / "data", num_samples_per_shard=100)
    path = tmp_path / "data" / entry.name
    index = index_path(path)
    right = index.read_bytes()
    assert hashlib.sha256(right).hexdigest() == entry.index_sha256
    rows = np.frombuffer(right, dtype="<i8").reshape(NUM_SAMPLES, 2 * len(MEMBERS))
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
        case "other members":
            index.write_bytes(index_content(rows[:, :4]))
        case "too far":
            index.write_bytes(index_content(rows + path.stat().st_size))
        case "of a part":
            index.write_bytes(index_content(rows[:-1]))
        case "of an array file":
            np.save(index, rows)
            index.with_name(f"{index.name}.npy").replace(index)
    found, _ = load_index(path, entry, members=MEMBERS, due=range(NUM_SAMPLES))
    np.testing.assert_array_equal(found, rows)
    assert index.read_bytes() == right


@pytest.mark.parametrize(
    ("column", "value"),
    [(0, -1), (1, -1), (0, 2**63 - 1), (1, 2**63 - 1), (0, 2**63 - 512), (1, 2**62), (0, 10**12), (3, 10**6)],
)
def test_an_index_that_the_manifest_names_is_used_only_if_it_lies_within_the_tar(
    tmp_path: Path, column: int, value: int
) -> None:
    """In int64 an offset and a size that are both large add up to little."""
    [entry] = write_shards(map(encode, random_samples(6)), tmp_path, num_samples_per_shard=100)
    path = tmp_path / entry.name
    right = index_shard(path, members=MEMBERS, due=range(6))
    wrong = right.copy()
    wrong[2, column] = value
    content = index_content(wrong)
    index_path(path).write_bytes(content)
    named = entry.model_copy(update={"index_sha256": hashlib.sha256(content).hexdigest()})
    np.testing.assert_array_equal(load_index(path, named, members=MEMBERS, due=range(6))[0], right)
    assert index_path(path).read_bytes() == content


def test_members_of_many_bytes_that_lie_over_each_other_are_no_index(tmp_path: Path) -> None:
    [entry] = write_shards(map(encode, random_samples(6)), tmp_path, num_samples_per_shard=100)
    path = tmp_path / entry.name
    right = index_shard(path, members=MEMBERS, due=range(6))
    wrong = right.copy()
    wrong[:, 0], wrong[:, 1] = 512, entry.num_bytes // 2
    content = index_content(wrong)
    index_path(path).write_bytes(content)
    named = entry.model_copy(update={"index_sha256": hashlib.sha256(content).hexdigest()})
    np.testing.assert_array_equal(load_index(path, named, members=MEMBERS, due=range(6))[0], right)


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_header_before_a_member_names_it(tmp_path: Path, tar_format: int) -> None:
    path = tmp_path / "any.tar"
    members = some_members(4)
    write_tar(path, members, tar_format=tar_format)
    data = memoryview(path.read_bytes())
    for member in read_contents(data).members:
        name = member.name.encode()
        assert is_member_at(data, name=name, offset=member.offset, size=member.size)
        assert not is_member_at(data, name=name, offset=member.offset, size=member.size + 1)
        assert not is_member_at(data, name=name[:-1], offset=member.offset, size=member.size)
        for offset in (0, 100, member.offset + 512, len(data), len(data) + 512):
            assert not is_member_at(data, name=name, offset=offset, size=member.size)


def test_the_index_of_a_shard_of_another_size_is_not_used_nor_kept(tmp_path: Path) -> None:
    [entry] = write_shards(map(encode, random_samples(6)), tmp_path, num_samples_per_shard=100)
    path = tmp_path / entry.name
    before = index_path(path).read_bytes()
    path.chmod(0o644)
    write_tar(path, some_members(6))
    rows, is_in_file = load_index(path, entry, members=MEMBERS, due=range(6))
    assert not is_in_file
    assert contents(path, rows) == dict(some_members(6))
    assert index_path(path).read_bytes() == before


def test_a_shard_of_another_writer_is_indexed(tmp_path: Path) -> None:
    samples = write_dataset(tmp_path, [5])
    path = tmp_path / "shard-00000.tar"
    rows = index_shard(path, members=MEMBERS, due=range(5))
    assert contents(path, rows) == {
        f"{sample.key}.{name}": content for sample in samples for name, content in encode(sample).members.items()
    }
    assert not index_path(path).exists()
