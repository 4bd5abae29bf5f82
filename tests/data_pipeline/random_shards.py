"""Small datasets of random samples for tests. The tars are written by plain webdataset, as another project would."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import webdataset

from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE, Sample
from data_pipeline.storage.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    HowMade,
    LabelNames,
    Manifest,
    OverlayEntry,
    ShardEntry,
)
from data_pipeline.storage.shards import encode, index_content, index_shard

IMAGE_SIZE = 8


def random_samples(num: int) -> list[Sample]:
    """Samples with noise for pictures and masks, so that no two are alike."""
    rng = np.random.default_rng(num)
    samples = []
    for index in range(num):
        image = rng.integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
        levels = np.array([MASK_OUTSIDE, MASK_BOX, MASK_OBJECT], dtype=np.uint8)
        mask = levels[rng.integers(0, 3, (IMAGE_SIZE, IMAGE_SIZE))]
        samples.append(
            Sample(index, image, mask, labels={"base": int(rng.integers(10)), "overlay": int(rng.integers(3))})
        )
    return samples


def random_shard_sizes(num_shards: int) -> list[int]:
    """Between 1 and 20 samples a shard."""
    return [int(size) for size in np.random.default_rng(num_shards).integers(1, 21, num_shards)]


def write_dataset(directory: Path, shard_sizes: Sequence[int]) -> list[Sample]:
    """A dataset of random samples in shards of the given sizes, without indexes; returns the samples."""
    directory.mkdir(parents=True, exist_ok=True)
    samples = random_samples(sum(shard_sizes))
    remaining = iter(samples)
    entries = []
    for number, num_samples in enumerate(shard_sizes):
        path = directory / f"shard-{number:05d}.tar"
        with webdataset.TarWriter(str(path), encoder=False) as writer:
            for _ in range(num_samples):
                encoded = encode(next(remaining))
                writer.write({"__key__": encoded.key, **encoded.members})
        data = path.read_bytes()
        first = sum(shard_sizes[:number])
        rows = index_shard(path, members=("json", "mask.png", "png"), due=range(first, first + num_samples))
        entries.append(
            ShardEntry(
                name=path.name,
                num_samples=num_samples,
                num_bytes=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
                index_sha256=hashlib.sha256(index_content(rows)).hexdigest(),
            )
        )
    write_manifest(directory, entries)
    return samples


def write_manifest(directory: Path, entries: Sequence[ShardEntry]) -> None:
    num_samples = sum(entry.num_samples for entry in entries)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        num_samples=num_samples,
        medium="picture",
        input_shape=(3, IMAGE_SIZE, IMAGE_SIZE),
        sample_rate=None,
        label_names=LabelNames(base=tuple("abcdefghij"), overlay=("x", "y", "z")),
        counts_base=(num_samples, *(0,) * 9),
        counts_overlay=(num_samples, 0, 0),
        mean=(0.5,) * 3,
        std=(0.3,) * 3,
        overlay=OverlayEntry(kind="random", drawn="baked", sha256=None),
        how_made=HowMade(
            dataset="random", source="random", split="train", seed=0, repeats=1, limit=None, source_sha256=""
        ),
        shards=tuple(entries),
    )
    (directory / MANIFEST_NAME).write_text(manifest.model_dump_json())
