from __future__ import annotations

import json
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL, Sample
from data_pipeline.loading.decode import decode
from data_pipeline.overlays.noise import Noise
from data_pipeline.overlays.shapes import Shapes
from data_pipeline.remote.fetch import RemoteConfig
from data_pipeline.storage.index import NUMBERS_NAME, SAMPLES_NAME, labels_name
from data_pipeline.storage.locations import MANIFEST_NAME, TARS_NAME
from data_pipeline.storage.manifest import OVERLAY_NAME, load_manifest
from data_pipeline.storage.store import SampleStore
from data_pipeline.storage.write import encode
from tests.data_pipeline.random_shards import CLASSES, random_samples, write_dataset
from tests.data_pipeline.stored_samples import decode_sample, find_problems
from tests.tiny_data import NUM_POINTS, change_file, write_tiny_dataset, write_tiny_sounds


def assert_same(actual: Sample, expected: Sample) -> None:
    assert (actual.index, actual.labels) == (expected.index, expected.labels)
    np.testing.assert_array_equal(actual.content, expected.content)
    np.testing.assert_array_equal(actual.mask, expected.mask)


def build(directory: Path, samples: list[Sample], *, num_samples_per_shard: int = 10) -> Path:
    sizes = [
        min(num_samples_per_shard, len(samples) - start) for start in range(0, len(samples), num_samples_per_shard)
    ]
    write_dataset(directory, sizes, samples=samples)
    return directory


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
    assert (store.overlay, store.location, store.max_shards) == (None, tmp_path, None)
    store.prefetch([2, 0])
    for sample in samples:
        assert_same(decode_sample(store, sample.index), sample)
        (content,) = store.read(np.array([sample.index])).files["content"]
        assert bytes(content) == encode(sample, CLASSES)["png"]
    for index in (23, -24):
        with pytest.raises(IndexError):
            decode_sample(store, index)
    for index in (23, -1):
        with pytest.raises(IndexError):
            decode(store, np.array([0, index]))


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


@pytest.mark.parametrize("member", ["00000012.png", "00000012.mask.png"])
def test_a_sample_that_does_not_decode_is_told_in_its_place(tmp_path: Path, member: str) -> None:
    samples = random_samples(23)
    damage(build(tmp_path, samples) / "shard-00001.tar", member)
    store = SampleStore(tmp_path)
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
    with pytest.raises(UserError, match=r"sample 00000012 in shard-00001\.tar cannot be read \(.*not a whole PNG"):
        decode_sample(store, 12)


def test_a_sample_under_another_index_is_not_given_out(tmp_path: Path) -> None:
    """Rows of the index that were exchanged: the tar's own headers are the last witness."""
    build(tmp_path, random_samples(3))
    rows_NM = np.fromfile(tmp_path / SAMPLES_NAME, dtype="<i8").reshape(3, 2)
    for columns in (slice(0, 2), slice(1, 2)):  # whole samples; masks alone, beside the pictures of others
        wrong_NM = rows_NM.copy()
        wrong_NM[:, columns] = np.roll(rows_NM[:, columns], 1, axis=0)
        change_file(tmp_path, SAMPLES_NAME, wrong_NM.tobytes())
        store = SampleStore(tmp_path)
        assert len(decode(store, np.arange(3)).bad) == 3
        with pytest.raises(UserError, match="otherwise"):
            decode_sample(store, 0)


@pytest.mark.parametrize("name", [SAMPLES_NAME, NUMBERS_NAME, TARS_NAME, labels_name("base")])
def test_an_index_that_is_not_the_one_of_the_manifest_is_named(tmp_path: Path, name: str) -> None:
    write_dataset(tmp_path, [2, 2])
    path = tmp_path / name
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(content)
        with pytest.raises(UserError, match=name):
            SampleStore(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=name):
        SampleStore(tmp_path)


def test_a_large_file_of_an_index_is_known_by_its_size_until_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10^9 samples have 4 GB of labels, and the first batch does not wait for their hash."""
    write_dataset(tmp_path, [2, 2])
    path = tmp_path / labels_name("base")
    path.write_bytes(bytes(path.stat().st_size))
    monkeypatch.setattr("data_pipeline.storage.store._MAX_HASHED_BYTES", 15)
    assert SampleStore(tmp_path).labels(np.arange(4))["base"].tolist() == [0] * 4
    assert any(problem.startswith(path.name) for problem in find_problems(tmp_path))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_samples": -64}, "num_samples"),
        ({"std": [0.5, 0.5, -1]}, "std"),
        ({"format_version": 6}, "format version"),
        ({"unheard_of": 0}, "unknown key"),
    ],
)
def test_a_manifest_with_a_wrong_value_is_one_sentence(tmp_path: Path, changed: dict[str, object], said: str) -> None:
    build(tmp_path, random_samples(20))
    path = tmp_path / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(UserError, match=said) as caught:
        SampleStore(tmp_path)
    assert str(caught.value).isprintable()


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


def test_threads_may_read_a_store_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.storage.store._MAX_OPEN_SHARDS", 2)
    store = SampleStore(build(tmp_path, random_samples(48), num_samples_per_shard=4))

    def num_unreadable(seed: int) -> int:
        return len(store.read(np.random.default_rng(seed).permutation(48)[:20]).unreadable)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(num_unreadable, range(150))) == [0] * 150


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
    assert store.max_shards == 3
    assert not list(cache.rglob("*.tar"))
    store.prefetch([4])
    deadline = time.monotonic() + 10
    while not list(cache.rglob("tar-00000004.tar")):
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
    for path in cache.rglob("tar-*"):
        path.unlink()
    assert_same(decode_sample(store, 1), samples[1])  # still mapped
    assert_same(decode_sample(store, 10), samples[10])
    assert not any("(deleted)" in name for name in mapped_files() if str(cache) in name)
    assert_same(decode_sample(store, 2), samples[2])
