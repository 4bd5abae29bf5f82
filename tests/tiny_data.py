"""Small shard directories for tests: samples that differ, both labels, made in a fraction of a second."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from data_pipeline.core.sample import NO_LABEL, Sample
from data_pipeline.overlays import Overlay
from data_pipeline.overlays.noise import Noise
from data_pipeline.overlays.registry import kind_of, save_overlay
from data_pipeline.overlays.shapes import Shapes
from data_pipeline.storage.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    OVERLAY_NAME,
    SOURCE_DIGESTS_NAME,
    HowMade,
    LabelNames,
    Manifest,
    OverlayEntry,
)
from data_pipeline.storage.shards import encode, write_shards
from data_pipeline.storage.source_digests import content_digest, write_source_digests
from data_pipeline.storage.store import SampleStore
from data_pipeline.storage.totals import Totals

SAMPLE_RATE = 8_000  # of the sounds, points a second
NUM_POINTS = 8_333  # of a sound as it is read: the size that the log-mel of this rate takes


def write_tiny_dataset(
    directory: Path,
    *,
    num_samples: int,
    seed: int = 0,
    num_samples_per_shard: int = 16,
    overlay: Literal["baked", "online", "none"] = "baked",
    split: Literal["train", "test"] = "train",
    num_channels: int = 3,
) -> Path:
    """A finished dataset of pictures: base class = brightness of the top half.

    baked: 16x16, overlay class = brightness of the bottom half, which is the mask. online: 32x32, and `Shapes` are
    drawn as they are read. none: 16x16 without a second label.
    """
    rng = np.random.default_rng(seed)
    size = 32 if overlay == "online" else 16
    samples = []
    for index in range(num_samples):
        base, second = int(rng.integers(2)), int(rng.integers(3))
        picture = rng.integers(0, 90, size=(size, size, num_channels))
        picture[: size // 2] += 120 * base
        mask = None
        if overlay == "baked":
            picture[size // 2 :] += 80 * second
            mask = np.zeros((size, size), dtype=np.uint8)
            mask[size // 2 :] = 255
        samples.append(
            Sample(
                index=index,
                content=picture.clip(0, 255).astype(np.uint8),
                mask=mask,
                labels={"base": base, "overlay": second if overlay == "baked" else NO_LABEL},
            )
        )
    second_names = {"baked": ("low", "middle", "high"), "online": Shapes.class_names, "none": ()}[overlay]
    return _write(
        directory,
        samples,
        names=LabelNames(
            base=("dark", "bright"),
            overlay=second_names,
            title_base="picture",
            title_overlay="shape" if overlay == "online" else "object",
        ),
        input_shape=(num_channels, size, size),
        baked_kind="halves" if overlay == "baked" else None,
        online=Shapes() if overlay == "online" else None,
        seed=seed,
        split=split,
        num_samples_per_shard=num_samples_per_shard,
    )


def write_tiny_pair(
    directory: Path, *, num_train: int, num_test: int, overlay: Literal["baked", "online", "none"] = "baked"
) -> Path:
    """`directory/train` and `directory/test`, as training asks for them; returns `directory`."""
    write_tiny_dataset(directory / "train", num_samples=num_train, overlay=overlay)
    write_tiny_dataset(directory / "test", num_samples=num_test, seed=1, overlay=overlay, split="test")
    return directory


def damage(directory: Path, indices: Sequence[int]) -> None:
    """Make the pictures or sounds of some samples undecodable, in files of the same size."""
    store = SampleStore(directory)
    for index in indices:
        encoded = store.encoded(index)
        content = encoded.members.get("png") or encoded.members["wav"]
        shard = directory / store.manifest.shards[int(np.searchsorted(store.shard_ends, index, side="right"))].name
        data = shard.read_bytes()
        assert data.count(content) == 1
        shard.write_bytes(data.replace(content, b"\xff" * len(content)))


def write_tiny_sounds(
    directory: Path,
    *,
    num_samples: int,
    seed: int = 0,
    num_samples_per_shard: int = 16,
    overlay: Overlay | Literal["baked", "none"] = "none",
    split: Literal["train", "test"] = "train",
) -> Path:
    """A finished dataset of sounds at 8 kHz: base class = deep or high tone, some below 8,333 points, some above.

    baked: float32 of 8,333 points, overlay class = loudness of a noise. An `Overlay`: stored beside the shards, to be
    drawn as they are read. none: int16 without a second label.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(num_samples):
        base, second = int(rng.integers(2)), int(rng.integers(3))
        num_points = NUM_POINTS if overlay == "baked" else int(rng.integers(2_000, 12_000))
        tone = 0.5 * np.sin(np.arange(num_points) * (0.2 + 0.8 * base)) + 0.01 * rng.standard_normal(num_points)
        if overlay == "baked":
            content = (tone + 0.05 * second * rng.standard_normal(num_points)).astype(np.float32)
        else:
            content = (32_767 * tone.clip(-1, 1)).astype(np.int16)
        samples.append(
            Sample(
                index=index,
                content=content,
                mask=None,
                labels={"base": base, "overlay": second if overlay == "baked" else NO_LABEL},
            )
        )
    second_names: tuple[str, ...] = ("quiet", "middle", "loud") if overlay == "baked" else ()
    return _write(
        directory,
        samples,
        names=LabelNames(
            base=("deep", "high"),
            overlay=overlay.class_names if isinstance(overlay, Overlay) else second_names,
            title_base="tone",
            title_overlay=overlay.title if isinstance(overlay, Overlay) else "background",
        ),
        input_shape=(NUM_POINTS,),
        baked_kind="hiss" if overlay == "baked" else None,
        online=overlay if isinstance(overlay, Overlay) else None,
        seed=seed,
        split=split,
        num_samples_per_shard=num_samples_per_shard,
    )


def tiny_noise() -> Noise:
    """Three background sounds of 3 s, each one of them in a band of its own."""
    time_X = np.arange(3 * SAMPLE_RATE)
    rng = np.random.default_rng(5)
    sounds = [np.sin(time_X * pitch + rng.uniform(0, 0.3, time_X.size)) for pitch in (0.3, 0.8, 2.0)]
    tensors = [torch.from_numpy(sound.astype(np.float32)) for sound in sounds]
    return Noise.of(tensors, num_points=NUM_POINTS, volume=0.05, crop="first_or_last")


def share_sources(directory: Path, *, num_test: int, num_shared: int) -> Path:
    """Make a train set, and a test set with `num_shared` samples whose pictures are in the train set too."""
    data = write_tiny_pair(directory, num_train=64, num_test=num_test)
    train_N = np.fromfile(data / "train" / SOURCE_DIGESTS_NAME, dtype="<u8")
    path = data / "test" / SOURCE_DIGESTS_NAME
    test_M = np.fromfile(path, dtype="<u8")
    test_M[3 : 3 + num_shared] = train_N[7 : 7 + num_shared]
    path.write_bytes(test_M.tobytes())
    manifest = json.loads((data / "test" / "manifest.json").read_text())
    manifest["source_digests_sha256"] = hashlib.sha256(test_M.tobytes()).hexdigest()
    (data / "test" / "manifest.json").write_text(json.dumps(manifest))
    return data


def write_tiny_sound_pair(directory: Path, *, num_train: int, num_test: int) -> Path:
    """`directory/train` and `directory/test` of sounds, `tiny_noise` drawn as they are read; returns `directory`."""
    write_tiny_sounds(directory / "train", num_samples=num_train, overlay=tiny_noise())
    write_tiny_sounds(directory / "test", num_samples=num_test, seed=1, overlay=tiny_noise(), split="test")
    return directory


def _write(
    directory: Path,
    samples: Sequence[Sample],
    *,
    names: LabelNames,
    input_shape: tuple[int, ...],
    baked_kind: str | None,
    online: Overlay | None,
    seed: int,
    split: Literal["train", "test"],
    num_samples_per_shard: int,
) -> Path:
    directory.mkdir(parents=True)
    is_sound = len(input_shape) == 1
    sample_rate = SAMPLE_RATE if is_sound else None
    encoded = (encode(sample, sample_rate=sample_rate) for sample in samples)
    shards = write_shards(encoded, directory, num_samples_per_shard=num_samples_per_shard)
    entry = OverlayEntry(kind=baked_kind, drawn="baked", sha256=None) if baked_kind is not None else None
    if online is not None:
        sha256 = save_overlay(online, directory / OVERLAY_NAME)
        entry = OverlayEntry(kind=kind_of(online), drawn="online", sha256=sha256)
    totals = Totals({"base": len(names.base), "overlay": 0 if online is not None else len(names.overlay)})
    for sample in samples:
        totals.add(sample)
    digests = b"".join(content_digest(sample.content) for sample in samples)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        num_samples=len(samples),
        medium="sound" if is_sound else "picture",
        input_shape=input_shape,
        sample_rate=sample_rate,
        label_names=names,
        counts_base=totals.counts["base"],
        counts_overlay=totals.counts["overlay"],
        mean=totals.mean,
        std=totals.std,
        overlay=entry,
        how_made=HowMade(
            dataset="tiny",
            source="test",
            split=split,
            seed=seed,
            repeats=1,
            limit=None,
            source_sha256=hashlib.sha256(str(seed).encode()).hexdigest(),
        ),
        shards=shards,
        source_digests_sha256=write_source_digests(directory / SOURCE_DIGESTS_NAME, digests, num_samples=len(samples)),
    )
    (directory / MANIFEST_NAME).write_text(manifest.model_dump_json())
    return directory
