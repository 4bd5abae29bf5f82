"""Small shard directories for tests: pictures that differ, both labels, made in a fraction of a second."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from data_pipeline.manifest import FORMAT_VERSION, HowMade, LabelNames, Manifest
from data_pipeline.sample import Sample
from data_pipeline.shards import encode, write_shards


def write_tiny_dataset(directory: Path, *, num_samples: int, seed: int = 0, num_samples_per_shard: int = 16) -> Path:
    """A finished dataset of 16x16 pictures: base class = brightness of the top half, overlay class = of the bottom."""
    rng = np.random.default_rng(seed)
    directory.mkdir(parents=True)
    samples = []
    for index in range(num_samples):
        base, overlay = int(rng.integers(2)), int(rng.integers(3))
        image = rng.integers(0, 90, size=(16, 16, 3))
        image[:8] += 120 * base
        image[8:] += 80 * overlay
        mask = np.zeros((16, 16), dtype=np.uint8)
        mask[8:] = 255
        samples.append(
            Sample(
                index=index,
                image=image.clip(0, 255).astype(np.uint8),
                mask=mask,
                label_base=base,
                label_overlay=overlay,
            )
        )
    shards = write_shards(map(encode, samples), directory, num_samples_per_shard=num_samples_per_shard)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        num_samples=num_samples,
        image_shape=(3, 16, 16),
        label_names=LabelNames(base=("dark", "bright"), overlay=("low", "middle", "high")),
        counts_base=tuple(sum(s.label_base == label for s in samples) for label in range(2)),
        counts_overlay=tuple(sum(s.label_overlay == label for s in samples) for label in range(3)),
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        how_made=HowMade(
            dataset="tiny",
            source="test",
            split="train",
            seed=seed,
            repeats=1,
            limit=None,
            source_sha256=hashlib.sha256(str(seed).encode()).hexdigest(),
        ),
        shards=shards,
    )
    (directory / "manifest.json").write_text(manifest.model_dump_json())
    return directory
