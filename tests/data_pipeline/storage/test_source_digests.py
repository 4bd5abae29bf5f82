from __future__ import annotations

import hashlib
import math
import shutil
from fractions import Fraction
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from data_pipeline.__main__ import main
from data_pipeline.building.build import build_dataset
from data_pipeline.core.errors import UserError
from data_pipeline.remote.fetch import RemoteConfig
from data_pipeline.sources.splits import in_test_split
from data_pipeline.storage.manifest import SOURCE_DIGESTS_NAME, load_manifest
from data_pipeline.storage.source_digests import content_digest, read_source_digests, shared_sources
from data_pipeline.storage.store import SampleStore
from tests.commands import Call
from tests.data_pipeline.folders import open_folder
from tests.data_pipeline.stored_samples import decode_sample, find_problems

REMOTE = RemoteConfig()


def digests_of(directory: Path) -> np.ndarray:
    digests = read_source_digests(directory, load_manifest(directory), remote=REMOTE)
    assert digests is not None
    return digests


def write_pictures(root: Path, *, num: int, seed: int = 0) -> Path:
    """`num` different pictures of 32 x 32 pixels in each of two classes, as `ROOT/CLASS/*.png`."""
    rng = np.random.default_rng(seed)
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(num):
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(root / name / f"{number:03d}.png")
    return root


# --- the digests of a dataset


def test_a_digest_is_of_the_clean_picture_whatever_is_drawn_on_it(tmp_path: Path) -> None:
    for name, dataset in (("plain", "procedural"), ("drawn", "procedural_letters")):
        build_dataset(dataset, tmp_path / name, limit=30, num_samples_per_shard=10)
    store = SampleStore(tmp_path / "plain")
    expected = [
        int.from_bytes(content_digest(decode_sample(store, index).content)[:8], "little") for index in range(30)
    ]
    assert digests_of(tmp_path / "plain").tolist() == expected
    assert digests_of(tmp_path / "drawn").tolist() == expected


def test_digests_tell_sounds_apart_and_silence_has_none(tmp_path: Path) -> None:
    build_dataset("spoken_noise", tmp_path / "spoken", source="procedural", limit=10)
    assert len(set(digests_of(tmp_path / "spoken").tolist())) == 10
    manifest = build_dataset("noise", tmp_path / "noise", source="procedural", limit=10)
    assert read_source_digests(tmp_path / "noise", manifest, remote=REMOTE) is None
    assert not (tmp_path / "noise" / SOURCE_DIGESTS_NAME).exists()


@pytest.mark.parametrize("data", [b"", bytes(8 * 20), None])
def test_a_damaged_file_of_digests_is_named(data: bytes | None, tmp_path: Path) -> None:
    manifest = build_dataset("procedural", tmp_path / "built", limit=20)
    path = tmp_path / "built" / SOURCE_DIGESTS_NAME
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    [problem] = find_problems(tmp_path / "built")
    assert problem.startswith(f"{SOURCE_DIGESTS_NAME}: ")
    with pytest.raises(UserError, match=SOURCE_DIGESTS_NAME):
        read_source_digests(tmp_path / "built", manifest, remote=REMOTE)


def test_digests_of_a_remote_dataset_are_fetched_and_checked(tmp_path: Path) -> None:
    manifest = build_dataset("procedural", tmp_path / "built", limit=20)
    location = f"file://{tmp_path}/built"
    remote = RemoteConfig(cache_dir=str(tmp_path / "cache"), num_attempts=1)
    fetched = read_source_digests(location, manifest, remote=remote)
    np.testing.assert_array_equal(fetched, digests_of(tmp_path / "built"))
    (tmp_path / "built" / SOURCE_DIGESTS_NAME).write_bytes(bytes(160))
    other = RemoteConfig(cache_dir=str(tmp_path / "other_cache"), num_attempts=1)
    with pytest.raises(UserError, match=SOURCE_DIGESTS_NAME):
        read_source_digests(location, manifest, remote=other)


def test_shared_sources_are_counted_with_two_examples() -> None:
    train, test = np.array([5, 6, 7, 7], dtype=np.uint64), np.array([1, 7, 5, 7], dtype=np.uint64)
    shared = shared_sources(train, test)
    assert (shared.num_test, shared.num_shared, shared.share) == (4, 3, 0.75)
    assert shared.examples == (("00000001", "00000002"), ("00000002", "00000000"))
    assert shared_sources(train, np.array([1], dtype=np.uint64)).num_shared == 0
    assert shared_sources(train, np.array([], dtype=np.uint64)).share == 0


# --- a test split that is cut from a folder


def test_both_splits_of_a_cut_folder_are_all_pictures_once_and_say_how_they_were_cut(tmp_path: Path) -> None:
    root = write_pictures(tmp_path / "root", num=20)
    for split in ("train", "test"):
        build_dataset(
            "folder_shapes", tmp_path / split, root=root, split=split, source_options={"test_share": 0.2}, seed=3
        )
    train, test = (load_manifest(tmp_path / split) for split in ("train", "test"))
    assert (train.labels["base"].counts, test.labels["base"].counts) == ((16, 16), (4, 4))
    assert train.how_made.source == "folder, test share 0.2 (8 of 40 pictures) by seed 3 and rule 3"
    assert test.how_made.source == train.how_made.source
    assert shared_sources(digests_of(tmp_path / "train"), digests_of(tmp_path / "test")).num_shared == 0
    everything = {*digests_of(tmp_path / "train").tolist(), *digests_of(tmp_path / "test").tolist()}
    assert len(everything) == 40


def test_one_command_builds_both_splits_and_draws_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    root, drawn = write_pictures(tmp_path / "root", num=20), Mock(side_effect=in_test_split)
    monkeypatch.setattr("data_pipeline.sources.splits.in_test_split", drawn)
    options = ["--seed", "3", "--workers", "1", "--split", "both"]
    words: list[str | Path] = ["build", "folder_shapes", "--root", root, *options]
    done = call(main, *words, "--source-option", "test_share=0.2", "--out", tmp_path)
    assert done.status == 0, done.stderr
    assert drawn.call_count == 1
    for split in ("train", "test"):
        alone = build_dataset(
            "folder_shapes", tmp_path / "alone", root=root, split=split, source_options={"test_share": 0.2}, seed=3
        )
        assert load_manifest(tmp_path / split) == alone
        shutil.rmtree(tmp_path / "alone")
    assert call(main, *words, "--out", tmp_path / "no").status == 2
    assert not (tmp_path / "no").exists()  # it is not found out after the long build


def test_equal_files_are_on_one_side_also_in_two_classes(tmp_path: Path) -> None:
    root = write_pictures(tmp_path / "root", num=20)
    for number in range(20):
        picture = root / "cat" / f"{number:03d}.png"
        shutil.copy(picture, root / "cat" / f"again-{number:03d}.PNG")
        shutil.copy(picture, root / "dog" / f"also-{number:03d}.png")
    sides = []
    for split in ("train", "test"):
        folder = open_folder(root, split=split, test_share=0.5)
        assert np.bincount(folder.labels["base"].label_N).tolist() == [
            20,
            20,
        ]  # ten pictures twice; the same ten, and ten dogs
        sides.append({folder[number].content.tobytes() for number in range(folder.num_records)})
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 40


def test_the_share_is_cut_to_the_nearest_picture_of_each_class() -> None:
    labels = np.repeat([0, 1, 2], [10, 5, 1])
    digests = [hashlib.sha256(bytes([number])).digest() for number in range(16)]
    chosen = in_test_split(digests, labels, test_share=0.3, seed=0, carry_rounding=False)
    assert np.bincount(labels[chosen], minlength=3).tolist() == [3, 2, 0]
    order = np.random.default_rng(0).permutation(16)
    shuffled = in_test_split(
        [digests[number] for number in order], labels[order], test_share=0.3, seed=0, carry_rounding=False
    )
    np.testing.assert_array_equal(shuffled, chosen[order])


@pytest.mark.parametrize(
    ("sizes", "share"),
    [([1] * 95, 0.2), ([2] * 45, 0.05), ([1, 2, 3] * 15, 0.3), ([45, 45, 5], 0.1), ([200, 1, 1, 1], 0.7), ([3], 0.5)],
)
def test_with_the_rounding_carried_the_share_is_exact_in_all_and_within_one_picture_of_each_class(
    sizes: list[int], share: float
) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    digests = [hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(len(labels))]
    drawn = []
    for seed in range(20):
        chosen = in_test_split(digests, labels, test_share=share, seed=seed, carry_rounding=True)
        exact = Fraction(str(share))
        assert chosen.sum() == math.floor(exact * len(labels) + Fraction(1, 2))
        num_in_class = np.bincount(labels[chosen], minlength=len(sizes)).tolist()
        assert all(abs(num - exact * size) < 1 for num, size in zip(num_in_class, sizes, strict=True))
        drawn.append(chosen)
        # Neither the numbers of the classes nor the order of the pictures change the draw.
        order = np.random.default_rng(seed).permutation(len(labels))
        renumbered = np.random.default_rng(seed).permutation(len(sizes))[labels]
        again = in_test_split(
            [digests[number] for number in order], renumbered[order], test_share=share, seed=seed, carry_rounding=True
        )
        np.testing.assert_array_equal(again, chosen[order])
    if max(sizes) < 4 and len(sizes) > 1 and share >= 0.2:
        assert np.any(drawn, axis=0).mean() > 0.9  # the seed decides which of the rare classes are tested


def test_a_share_that_leaves_a_class_empty_names_it(tmp_path: Path) -> None:
    root = write_pictures(tmp_path / "root", num=3)
    (root / "dog" / "001.png").unlink()
    (root / "dog" / "002.png").unlink()
    with pytest.raises(
        UserError, match=r"test_share=0\.3 leaves no pictures of class dog of .*root for the test split"
    ):
        open_folder(root, split="test", test_share=0.3)
