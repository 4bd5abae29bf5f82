"""Small datasets of random samples for tests. The tars are written by plain webdataset, as another project would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import webdataset

from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE, Sample
from data_pipeline.storage.manifest import Description, Fields, HowMade, LabelEntry, OverlayEntry
from data_pipeline.storage.write import encode
from tests.tiny_data import index as index_tars

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


LABELS = {
    "base": LabelEntry(title="letter", classes=tuple("abcdefghij")),
    "overlay": LabelEntry(title="object", classes=("x", "y", "z"), given_by="overlay"),
}
CLASSES = {name: label.classes for name, label in LABELS.items()}
FIELDS = Fields(content=("png",), mask="mask.png", labels={name: f"json:{name}" for name in LABELS})


def write_dataset(
    directory: Path, shard_sizes: Sequence[int], *, samples: Sequence[Sample] | None = None
) -> Sequence[Sample]:
    """A dataset of samples, by default random ones, in shards of the given sizes; returns the samples."""
    directory.mkdir(parents=True, exist_ok=True)
    samples = random_samples(sum(shard_sizes)) if samples is None else samples
    remaining = iter(samples)
    paths = []
    for number, num_samples in enumerate(shard_sizes):
        paths.append(directory.absolute() / f"shard-{number:05d}.tar")
        with webdataset.TarWriter(str(paths[-1]), encoder=False) as writer:
            for _ in range(num_samples):
                sample = next(remaining)
                writer.write({"__key__": sample.key, **encode(sample, CLASSES)})
    how_made = HowMade(dataset="random", source="random", split="train")
    description = Description(
        medium="picture",
        how_made=how_made,
        input_shape=(3, IMAGE_SIZE, IMAGE_SIZE),
        mean=(0.5,) * 3,
        std=(0.3,) * 3,
        labels=LABELS,
        overlay=OverlayEntry(kind="random", drawn="baked"),
    )
    index_tars(directory, paths, description, fields=FIELDS)
    return samples
