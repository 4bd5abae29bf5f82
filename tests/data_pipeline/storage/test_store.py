from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import pickle
import re
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL, Sample
from data_pipeline.loading.decode import decode
from data_pipeline.overlays.noise import Noise
from data_pipeline.overlays.shapes import Shapes
from data_pipeline.remote.cache import RemoteConfig
from data_pipeline.storage.manifest import MANIFEST_NAME, OVERLAY_NAME, load_manifest
from data_pipeline.storage.shards import encode, index_content, index_path, index_shard, write_shards
from data_pipeline.storage.store import SampleStore
from tests.data_pipeline.random_shards import random_samples, write_dataset, write_manifest
from tests.data_pipeline.stored_samples import decode_sample
from tests.tiny_data import NUM_POINTS, write_tiny_dataset, write_tiny_sounds


def assert_same(actual: Sample, expected: Sample) -> None:
    assert (actual.index, actual.labels) == (expected.index, expected.labels)
    np.testing.assert_array_equal(actual.content, expected.content)
    np.testing.assert_array_equal(actual.mask, expected.mask)


def build(directory: Path, samples: list[Sample], *, num_samples_per_shard: int = 10) -> Path:
    write_manifest(
        directory, write_shards(map(encode, samples), directory, num_samples_per_shard=num_samples_per_shard)
    )
    return directory


def name_index(directory: Path, rows: np.ndarray) -> None:
    """Make `rows` the index of the first shard, beside it and in the manifest."""
    manifest = load_manifest(directory)
    content = index_content(rows)
    index_path(directory / manifest.shards[0].name).write_bytes(content)
    entry = manifest.shards[0].model_copy(update={"index_sha256": hashlib.sha256(content).hexdigest()})
    write_manifest(directory, [entry, *manifest.shards[1:]])


def damage(shard: Path, member: str, *, flip: int = 60) -> None:
    """Change one byte of a member, in the file itself."""
    with tarfile.open(shard) as tar:
        position = tar.getmember(member).offset_data + flip
    shard.chmod(0o644)
    with shard.open("r+b") as file:
        file.seek(position)
        [byte] = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0xFF]))


def test_written_samples_come_back(tmp_path: Path) -> None:
    samples = random_samples(23)
    store = SampleStore(build(tmp_path, samples))
    assert len(store) == 23
    assert store.shard_ends.tolist() == [10, 20, 23]
    assert (store.known_bad, store.overlay, store.location, store.max_shards) == ((), None, tmp_path, None)
    store.prefetch([2, 0])
    for sample in samples:
        assert_same(decode_sample(store, sample.index), sample)
        assert store.encoded(sample.index) == encode(sample)
    for index in (23, -24):
        with pytest.raises(IndexError):
            decode_sample(store, index)
    for index in (23, -1):
        with pytest.raises(IndexError):
            store.encoded(index)
        with pytest.raises(IndexError):
            decode(store, np.array([0, index]))


def test_tars_that_plain_webdataset_wrote_are_read(tmp_path: Path) -> None:
    samples = write_dataset(tmp_path, [3, 1, 7])
    store = SampleStore(str(tmp_path))
    assert all(index_path(tmp_path / f"shard-0000{shard}.tar").is_file() for shard in range(3))
    for sample in samples:
        assert_same(decode_sample(store, sample.index), sample)


def test_a_batch_is_in_the_order_asked_for(tmp_path: Path) -> None:
    samples = random_samples(23)
    store = SampleStore(build(tmp_path, samples))
    wanted = [22, 0, 10, 10, 9, 3]
    stored = decode(store, np.array(wanted))
    assert stored.points_X is None
    assert stored.pictures_BCHW is not None
    assert stored.masks_BHW is not None
    assert stored.pictures_BCHW.is_contiguous()
    assert stored.index_B.tolist() == wanted
    assert stored.labels["base"].tolist() == [samples[index].labels["base"] for index in wanted]
    assert stored.labels["overlay"].tolist() == [samples[index].labels["overlay"] for index in wanted]
    pictures_BHWC = stored.pictures_BCHW.permute(0, 2, 3, 1).numpy()
    np.testing.assert_array_equal(pictures_BHWC, np.stack([samples[index].content for index in wanted]))
    for mask_HW, index in zip(stored.masks_BHW.numpy(), wanted, strict=True):
        np.testing.assert_array_equal(mask_HW, samples[index].mask)
    none = decode(store, np.array([], dtype=np.int64))
    assert none.pictures_BCHW is not None
    assert none.pictures_BCHW.shape == (0, 3, 8, 8)


def test_pictures_without_anything_drawn_have_no_mask(tmp_path: Path) -> None:
    store = SampleStore(write_tiny_dataset(tmp_path / "plain", num_samples=5, overlay="none"))
    stored = decode(store, np.arange(5))
    assert stored.masks_BHW is None
    assert stored.labels.keys() == decode_sample(store, 3).labels.keys() == {"base"}
    assert decode_sample(store, 3).mask is None


@pytest.mark.parametrize(("overlay", "dtype"), [("none", torch.int16), ("baked", torch.float32)])
def test_sounds_come_in_their_own_lengths(
    tmp_path: Path, overlay: Literal["none", "baked"], dtype: torch.dtype
) -> None:
    store = SampleStore(write_tiny_sounds(tmp_path / "sounds", num_samples=20, overlay=overlay))
    stored = decode(store, np.array([19, 2, 7]))
    assert (stored.pictures_BCHW, stored.masks_BHW) == (None, None)
    lengths = []
    for clip, index in zip(map(stored.sound, range(3)), [19, 2, 7], strict=True):
        assert clip.dtype == dtype
        lengths.append(len(clip))
        np.testing.assert_array_equal(clip.numpy(), decode_sample(store, index).content)
        before = clip.clone()
        clip.zero_()  # a clip is the caller's own: the shard stays as it is
        np.testing.assert_array_equal(decode_sample(SampleStore(store.location), index).content, before.numpy())
    assert (set(lengths) == {NUM_POINTS}) == (overlay == "baked")


def test_an_online_overlay_comes_with_the_store_and_is_not_drawn(tmp_path: Path) -> None:
    store = SampleStore(write_tiny_dataset(tmp_path / "online", num_samples=5, overlay="online"))
    assert isinstance(store.overlay, Shapes)
    assert (decode_sample(store, 2).mask, decode_sample(store, 2).labels["overlay"]) == (None, NO_LABEL)
    assert load_manifest(tmp_path / "online").is_online
    noise = Noise.of([torch.rand(9_000)] * 3, num_points=NUM_POINTS, volume=0.05, crop="first_or_last")
    sounds = SampleStore(write_tiny_sounds(tmp_path / "sounds", num_samples=5, overlay=noise))
    assert isinstance(sounds.overlay, Noise)
    (tmp_path / "online" / OVERLAY_NAME).unlink()
    with pytest.raises(UserError, match=OVERLAY_NAME):
        SampleStore(tmp_path / "online")


def blank(tensor: Tensor | None, place: int) -> bool:
    return tensor is not None and not tensor[place].any()


@pytest.mark.parametrize(
    ("member", "flip", "reason"),
    [
        ("00000012.png", 60, r"not a whole PNG"),
        ("00000012.mask.png", 60, r"not a whole PNG"),
        ("00000012.json", 0, r"00000012\.json does not decode"),
        ("00000012.json", 10, r"00000012\.json says that it is sample|does not decode"),
    ],
)
def test_a_sample_that_does_not_decode_is_told_in_its_place(
    tmp_path: Path, member: str, flip: int, reason: str
) -> None:
    samples = random_samples(23)
    damage(build(tmp_path, samples) / "shard-00001.tar", member, flip=flip)
    store = SampleStore(tmp_path)
    assert store.known_bad == ()
    for wanted in ([12, 3, 22], [3, 12, 22], [12]):
        stored = decode(store, np.array(wanted))
        place = wanted.index(12)
        [(bad_place, bad)] = stored.bad.items()
        assert (bad_place, bad.index, bad.shard) == (place, 12, "shard-00001.tar")
        assert stored.labels["base"][place] == stored.labels["overlay"][place] == NO_LABEL
        assert blank(stored.pictures_BCHW, place)
        assert blank(stored.masks_BHW, place)
        assert stored.pictures_BCHW is not None
        for number, index in enumerate(wanted):
            if number != place:
                np.testing.assert_array_equal(
                    stored.pictures_BCHW[number].permute(1, 2, 0).numpy(), samples[index].content
                )
                assert stored.labels["base"][number] == samples[index].labels["base"]
    with pytest.raises(UserError, match=rf"sample 00000012 in shard-00001\.tar cannot be read \(.*{reason}"):
        decode_sample(store, 12)


def test_a_sound_that_does_not_decode_is_told_in_its_place(tmp_path: Path) -> None:
    write_tiny_sounds(tmp_path / "sounds", num_samples=20)
    damage(tmp_path / "sounds" / "shard-00000.tar", "00000004.wav", flip=0)
    stored = decode(SampleStore(tmp_path / "sounds"), np.array([4, 5]))
    assert [(place, bad.key, bad.shard) for place, bad in stored.bad.items()] == [(0, "00000004", "shard-00000.tar")]
    assert stored.sound(0).tolist() == [0]
    assert stored.sound(0).dtype == torch.int16
    assert stored.labels["base"].tolist()[0] == NO_LABEL
    assert len(stored.sound(1)) > 1


@pytest.mark.parametrize("label", [-1, 10, 1.5, "1", None, 1 << 70])
def test_a_label_that_is_none_of_the_classes_is_told(tmp_path: Path, label: object) -> None:
    samples = random_samples(3)
    labels: Any = {"base": label, "overlay": 0}
    samples[1] = Sample(1, samples[1].content, samples[1].mask, labels)
    stored = decode(SampleStore(build(tmp_path, samples)), np.arange(3))
    assert {place: bad.reason for place, bad in stored.bad.items()} == {
        1: f"label_base is {label!r}, not one of 0 to 9"
    }
    assert stored.labels["base"][0] == samples[0].labels["base"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_dataset(tmp_path, [2, 2])
    (tmp_path / "shard-00001.tar").unlink()
    with pytest.raises(UserError, match=r"shard-00001\.tar is in the manifest, but it is missing"):
        SampleStore(tmp_path)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_truncated_shard_costs_only_the_samples_behind_the_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, indexed: bool
) -> None:
    samples = random_samples(30)
    path = build(tmp_path, samples) / "shard-00001.tar"
    if not indexed:
        index_path(path).unlink()
    with tarfile.open(path) as tar:
        cut = tar.getmember("00000016.png").offset_data + 3
    whole_size = path.stat().st_size
    path.chmod(0o644)
    os.truncate(path, cut)
    with caplog.at_level(logging.WARNING):
        store = SampleStore(tmp_path)
    assert f"{path} has {cut} bytes but the manifest says {whole_size}" in caplog.text
    assert [bad.index for bad in store.known_bad] == [16, 17, 18, 19]
    assert {bad.shard for bad in store.known_bad} == {"shard-00001.tar"}
    assert store.known_bad[0].reason == "the shard holds no whole 00000016.png"
    stored = decode(store, np.arange(30))
    assert tuple(stored.bad.values()) == store.known_bad
    for sample in samples[:16] + samples[20:]:
        assert_same(decode_sample(store, sample.index), sample)
    assert store.encoded(16).members.keys() == {"json", "mask.png"}
    os.truncate(path, 0)
    assert len(decode(SampleStore(tmp_path), np.arange(30)).bad) == 10


def test_members_that_are_missing_or_interleaved_are_told_or_sorted_out(tmp_path: Path) -> None:
    samples = random_samples(4)
    path = build(tmp_path, samples) / "shard-00000.tar"
    with tarfile.open(path) as tar:
        members = [(member, tar.extractfile(member)) for member in tar]
        members = [*members[2::3], *members[0::3], *(pair for pair in members[1::3] if "02" not in pair[0].name)]
        with tarfile.open(tmp_path / "other.tar", "w") as other:
            for member, content in members:
                other.addfile(member, content)
    (tmp_path / "other.tar").replace(path)
    index_path(path).unlink()
    store = SampleStore(tmp_path)
    assert [(bad.index, bad.reason) for bad in store.known_bad] == [(2, "the shard holds no whole 00000002.mask.png")]
    for index in (0, 1, 3):
        assert_same(decode_sample(store, index), samples[index])


def test_a_sample_under_another_index_is_not_given_out(tmp_path: Path) -> None:
    """Rows that were exchanged, and named so in the manifest: the tar's own headers are the last witness."""
    path = build(tmp_path, random_samples(3)) / "shard-00000.tar"
    rows = index_shard(path, members=("json", "mask.png", "png"), due=range(3))
    for columns in (slice(0, 6), slice(4, 6)):  # whole samples; pictures alone, under the labels of others
        wrong = rows.copy()
        wrong[:, columns] = np.roll(rows[:, columns], 1, axis=0)
        name_index(tmp_path, wrong)
        store = SampleStore(tmp_path)
        assert len(decode(store, np.arange(3)).bad) == 3
        with pytest.raises(UserError, match=r"sample 00000000 .* index and the tar disagree about where"):
            decode_sample(store, 0)
        with pytest.raises(
            UserError, match=r"sample 00000000 cannot be read .* index and the tar disagree about where"
        ):
            store.encoded(0)


@pytest.mark.parametrize("location", ["local", "remote"])
def test_an_index_with_rotated_offsets_is_not_believed(
    tmp_path: Path, location: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Offsets that lie within the file, of pictures alone, so that each JSON still names its own sample."""
    samples = random_samples(30)
    path = build(tmp_path / "there", samples) / "shard-00001.tar"
    index = index_path(path)
    right = index.read_bytes()
    rows = np.frombuffer(right, dtype="<i8").reshape(10, 6).copy()
    rows[:, 4:] = np.roll(rows[:, 4:], 1, axis=0)
    index.write_bytes(rows.tobytes())
    caplog.set_level(logging.INFO)
    if location == "local":
        store = SampleStore(tmp_path / "there")
    else:
        config = RemoteConfig(cache_dir=str(tmp_path / "cache"), num_attempts=1)
        store = SampleStore(f"file://{tmp_path}/there", remote=config)
    for sample in samples:
        assert_same(decode_sample(store, sample.index), sample)
    if location == "local":
        assert "is not the index that the manifest names (index_sha256); it is rebuilt" in caplog.text
        assert index.read_bytes() == right
    else:
        assert [path.read_bytes() for path in (tmp_path / "cache").rglob(index.name)] == [right]


def test_a_dataset_of_which_next_to_nothing_is_there_is_refused(tmp_path: Path) -> None:
    path = build(tmp_path, random_samples(30), num_samples_per_shard=30) / "shard-00000.tar"
    num_bytes = path.stat().st_size
    path.chmod(0o644)
    os.truncate(path, 2_000)
    with pytest.raises(UserError, match=rf"holds only 2000 of the {num_bytes} bytes that its manifest lists"):
        SampleStore(tmp_path)
    os.truncate(path, num_bytes)  # a hole
    index_path(path).unlink()
    with pytest.raises(UserError, match="holds only 0 of the 30 samples that its manifest lists"):
        SampleStore(tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_samples": 10**15}, "num_samples is 1000000000000000; it must be at most 1,000,000,000,000"),
        ({"num_samples": -64}, "num_samples is -64; it must be above 0"),
        ({"num_samples": 21}, "num_samples is 21, but its shards add up to 20"),
        ({"num_samples": 1.5}, "num_samples is 1.5; it must be a whole number"),
        ({"input_shape": [3, 0, 8]}, "input_shape[1] is 0; it must be above 0"),
        ({"input_shape": [2, 8, 8]}, "input_shape is (2, 8, 8), but pictures have (1, H, W) or (3, H, W)"),
        ({"input_shape": [8]}, "input_shape is (8,), but pictures have"),
        ({"input_shape": [3, 9_000, 9_000]}, "20 pictures of (3, 9000, 9000) cannot be in"),
        ({"medium": "sound"}, "input_shape is (3, 8, 8), but sounds have (T,)"),
        ({"sample_rate": 8_000}, "sample_rate is 8000 for a dataset of pictures"),
        ({"mean": [0.5]}, "mean has 1 numbers for 3 channels"),
        ({"mean": [0.5, 0.5, 1e9]}, "mean is (0.5, 0.5, 1000000000.0), but for pictures it is from 0 to 1"),
        ({"std": [0.5, 0.5, -1]}, "std[2] is -1; it must be at least 0"),
        ({"std": [0.5, 0.5, float("inf")]}, "std[2] is inf; it must be a finite number"),
        ({"counts_base": [20]}, "counts_base has 1 numbers for 10 classes"),
        ({"counts_base": [21, *[0] * 9]}, "counts_base adds up to 21, but num_samples is 20"),
        ({"counts_overlay": []}, "counts_overlay has 0 numbers for 3 classes"),
        ({"label_names": {"base": ["a"] * 10, "overlay": ["x"]}}, "label_names.base: the class 'a' is named 10 times"),
        ({"label_names": {"base": ["\x1b[2J"], "overlay": []}}, r"holds the character '\x1b', which cannot be printed"),
        ({"overlay": None}, "label_names.overlay is ('x', 'y', 'z'), but overlay is None"),
        ({"overlay": {"kind": "x", "drawn": "online", "sha256": None}}, "overlay.drawn is online, but overlay.sha256"),
        ({"shards": []}, "no shards are named"),
        ({"shards.0.name": "shard-00001.tar"}, "the shard shard-00001.tar is named 2 times"),
        ({"shards.0.name": "../x.tar"}, 'shards[0].name is "../x.tar"; it must be a plain file name that ends in .tar'),
        (
            {"shards.0.name": "/tmp/x.tar"},
            'shards[0].name is "/tmp/x.tar"; it must be a plain file name that ends in .tar',
        ),
        ({"shards.0.name": "manifest.json"}, "it must be a plain file name that ends in .tar"),
        ({"shards.0.num_samples": 2}, "num_samples is 20, but its shards add up to 12"),
        ({"shards.0.num_bytes": 10_000}, "10 samples cannot be in the 10000 bytes of shard-00000.tar"),
        ({"shards.0.num_bytes": 1 << 63}, "shards[0].num_bytes is 9223372036854775808; it must be at most"),
        ({"shards.0.index_sha256": "0"}, 'shards[0].index_sha256 is "0"; it must be a sha256 in 64 hexadecimal digits'),
        ({"\x1b[2J": 0}, r"unknown key "),
    ],
)
def test_a_manifest_that_contradicts_itself_is_one_sentence(
    tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    build(tmp_path / "data", random_samples(20))
    path = tmp_path / "data" / MANIFEST_NAME
    value = json.loads(path.read_text())
    for name, new in changed.items():
        first, *inner = name.split(".")
        if inner:
            value[first][int(inner[0])][inner[1]] = new
        else:
            value[name] = new
    path.write_text(json.dumps(value))
    with pytest.raises(UserError) as caught:
        SampleStore(tmp_path / "data")
    assert said in str(caught.value)
    assert str(caught.value).isprintable()
    assert str(caught.value).startswith(f"{path}: ")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data"]


def test_a_manifest_that_nests_deeply_or_is_large_is_one_sentence(tmp_path: Path) -> None:
    for content, said in (
        (b"[" * 100_000, "recursion limit"),
        (b" " * (1 << 25) + b"{}", "larger than 33554432 bytes"),
    ):
        (tmp_path / MANIFEST_NAME).write_bytes(content)
        with pytest.raises(UserError, match=said):
            load_manifest(tmp_path)


def test_an_index_that_cannot_be_saved_stays_in_memory(tmp_path: Path) -> None:
    samples = write_dataset(tmp_path, [5])
    index_path(tmp_path / "shard-00000.tar").mkdir()  # nothing can be written there, not even by root
    before = sorted(tmp_path.iterdir())
    assert_same(decode_sample(SampleStore(tmp_path), 4), samples[4])
    assert sorted(tmp_path.iterdir()) == before


def test_shards_hold_no_file_open(tmp_path: Path) -> None:
    write_dataset(tmp_path, [1] * 20)
    SampleStore(tmp_path)  # what the first use of a library opens for good is not counted
    before = len(list(Path("/proc/self/fd").iterdir()))
    store = SampleStore(tmp_path)
    samples = [decode_sample(store, index) for index in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert len(samples) == 20


def test_a_store_can_be_sent_to_another_process(tmp_path: Path) -> None:
    samples = random_samples(23)
    store = SampleStore(build(tmp_path, samples))
    assert_same(decode_sample(store, 12), samples[12])
    assert_same(decode_sample(pickle.loads(pickle.dumps(store)), 12), samples[12])


def test_a_thousand_shards_are_opened_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # as these are written
    build(tmp_path, random_samples(1_000), num_samples_per_shard=1)
    start = time.process_time()  # other tests may share the machine
    store = SampleStore(tmp_path)
    decode(store, np.arange(0, 1_000, 100))
    assert time.process_time() - start < 2
    assert len(store.shard_ends) == 1_000


def test_a_store_keeps_the_shards_that_it_has_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may hold only so many mappings, whatever the number of shards; and a shard may be opened again."""
    monkeypatch.setattr("data_pipeline.storage.store._MAX_OPEN_SHARDS", 3)
    samples = random_samples(40)
    store = SampleStore(build(tmp_path, samples, num_samples_per_shard=4))
    for _ in range(2):
        for start in range(0, 40, 8):
            decoded = decode(store, np.arange(start, start + 8))
            assert decoded.index_B.tolist() == list(range(start, start + 8))
            assert not decoded.bad
            assert len({name for name in mapped_files() if name.startswith(str(tmp_path))}) <= 3
        assert_same(decode_sample(store, 5), samples[5])
    whole = decode(store, np.random.default_rng(0).permutation(40))
    assert not whole.bad


@pytest.mark.slow
def test_threads_may_read_a_store_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.storage.store._MAX_OPEN_SHARDS", 2)
    store = SampleStore(build(tmp_path, random_samples(48), num_samples_per_shard=4))

    def num_unreadable(seed: int) -> int:
        return len(store.read(np.random.default_rng(seed).permutation(48)[:20]).unreadable)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(num_unreadable, range(500))) == [0] * 500


def mapped_files() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if ".tar" in line}


def test_remote_shards_are_fetched_as_they_are_touched(tmp_path: Path) -> None:
    samples = random_samples(60)
    there = build(tmp_path / "there", samples)
    shard_size = max(path.stat().st_size for path in there.glob("*.tar"))
    cache = tmp_path / "cache"
    config = RemoteConfig(cache_dir=str(cache), cache_gigabytes=3.5 * shard_size / 1e9)
    store = SampleStore(f"file://{there}", remote=config)
    assert store.location == f"file://{there}"
    assert (store.known_bad, store.max_shards) == ((), 3)
    assert not list(cache.rglob("*.tar"))
    store.prefetch([4])
    deadline = time.monotonic() + 10
    while not list(cache.rglob("shard-00004.tar")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for sample in [*samples, *samples[::-1], *samples[::7]]:
        assert_same(decode_sample(store, sample.index), sample)
        mapped = {name for name in mapped_files() if str(cache) in name}
        assert len(mapped) <= 3
        assert 1 <= len(list(cache.rglob("*.tar"))) <= 3
    stored = decode(store, np.arange(60))  # more shards than the cache holds
    assert not stored.bad
    assert stored.labels["base"].tolist() == [sample.labels["base"] for sample in samples]


def test_a_remote_shard_that_another_process_evicted_is_fetched_again(tmp_path: Path) -> None:
    samples = random_samples(30)
    there = build(tmp_path / "there", samples)
    cache = tmp_path / "cache"
    store = SampleStore(f"file://{there}", remote=RemoteConfig(cache_dir=str(cache)))
    assert_same(decode_sample(store, 0), samples[0])
    for path in cache.rglob("shard-*"):
        path.unlink()
    assert_same(decode_sample(store, 1), samples[1])  # still mapped
    assert_same(decode_sample(store, 10), samples[10])
    assert not any("(deleted)" in name for name in mapped_files() if str(cache) in name)
    assert_same(decode_sample(store, 2), samples[2])


def test_a_shard_that_may_not_be_read_is_not_called_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build(tmp_path, random_samples(3)) / "shard-00000.tar"

    def refuse(file: str, **_: object) -> Tensor:
        raise RuntimeError(f"unable to open file <{file}> in read-only mode: Permission denied (13)")

    monkeypatch.setattr(torch, "from_file", refuse)
    with pytest.raises(UserError, match=re.escape(f"{path} cannot be mapped into memory (Permission denied); mend")):
        decode_sample(SampleStore(tmp_path), 0)


def test_a_folder_whose_name_is_not_utf_8_is_not_called_removed(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"data \xff")
    build(directory, random_samples(3))
    with pytest.raises(UserError, match=r"shard-00000\.tar cannot be mapped into memory \(.*utf-8\); mend"):
        decode_sample(SampleStore(directory), 0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("not UTF-8", r"manifest\.json is not valid JSON \(invalid unicode .*\); build the dataset again"),
        ("cannot be read", r"manifest\.json cannot be read \(Input/output error\); make it readable, or choose"),
        ("closed directory", r"manifest\.json cannot be read \(Permission denied\); make it readable, or choose"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_one_sentence(
    kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / MANIFEST_NAME
    if kind == "not UTF-8":
        path.write_bytes(b'{"name": "\xff"}')
    elif kind == "cannot be read":
        path.symlink_to("/proc/self/mem")  # a file whose first byte nobody has
    else:

        def refuse(path: Path) -> bool:  # as anybody but root is refused
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(UserError, match=message):
        load_manifest(tmp_path)
