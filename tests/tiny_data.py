"""Small shard directories for tests: samples that differ, both labels, made in a fraction of a second."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from data_pipeline.building.index_tars import write_index
from data_pipeline.building.tar_scan import ScanInputs, scan_tar
from data_pipeline.core.sample import NO_LABEL, Sample
from data_pipeline.overlays import Overlay
from data_pipeline.overlays.noise import Noise
from data_pipeline.overlays.registry import kind_of, save_overlay
from data_pipeline.overlays.shapes import Shapes
from data_pipeline.storage.manifest import (
    OVERLAY_NAME,
    SOURCE_DIGESTS_NAME,
    Description,
    Fields,
    HowMade,
    LabelEntry,
    OverlayEntry,
)
from data_pipeline.storage.source_digests import content_digest, write_source_digests
from data_pipeline.storage.store import SampleStore
from data_pipeline.storage.totals import Totals
from data_pipeline.storage.write import encode, shard_name, write_shard

SAMPLE_RATE = 8_000  # of the sounds, points a second
NUM_POINTS = 8_333  # of a sound as it is read: the size that the log-mel of this rate takes


def on_data(data: Path, *more: str) -> list[str]:
    """Return the settings of a run on the two sets in a directory, read by one process, without W&B; and `more`."""
    sets = [f"data.{split}_dir={data / split}" for split in ("train", "test")]
    return [*sets, "data.num_workers=0", "tracking.wandb=disabled", *more]


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
        labels=_labels("picture", ("dark", "bright"), "shape" if overlay == "online" else "object", second_names),
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
        content = bytes(store.read(np.array([index])).files["content"][0])
        shard = store.tar_path(int(np.searchsorted(store.shard_ends, index, side="right")))
        data = shard.read_bytes()
        assert data.count(content) == 1
        shard.write_bytes(data.replace(content, b"\xff" * len(content)))


def change_file(directory: Path, name: str, content: bytes) -> None:
    """Replace a file beside the manifest, and its entry in the manifest."""
    (directory / name).write_bytes(content)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"][name] = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def _labels(title: str, classes: tuple[str, ...], title_2: str, classes_2: tuple[str, ...]) -> dict[str, LabelEntry]:
    labels = {"base": LabelEntry(title=title, classes=classes)}
    if classes_2:
        labels["overlay"] = LabelEntry(title=title_2, classes=classes_2, given_by="overlay")
    return labels


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
        labels=_labels(
            "tone",
            ("deep", "high"),
            overlay.title if isinstance(overlay, Overlay) else "background",
            overlay.class_names if isinstance(overlay, Overlay) else second_names,
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
    test_M = np.fromfile(data / "test" / SOURCE_DIGESTS_NAME, dtype="<u8")
    test_M[3 : 3 + num_shared] = train_N[7 : 7 + num_shared]
    change_file(data / "test", SOURCE_DIGESTS_NAME, test_M.tobytes())
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
    labels: dict[str, LabelEntry],
    input_shape: tuple[int, ...],
    baked_kind: str | None,
    online: Overlay | None,
    seed: int,
    split: Literal["train", "test"],
    num_samples_per_shard: int,
) -> Path:
    is_sound = len(input_shape) == 1
    sample_rate = SAMPLE_RATE if is_sound else None
    classes = {name: label.classes for name, label in labels.items()}
    encoded = [encode(sample, classes, sample_rate=sample_rate) for sample in samples]
    directory.mkdir(parents=True)
    paths = []
    for number, start in enumerate(range(0, len(encoded), num_samples_per_shard)):
        paths.append(directory.absolute() / shard_name(number))
        write_shard(encoded[start : start + num_samples_per_shard], paths[-1], first_index=start)
    entry = OverlayEntry(kind=baked_kind, drawn="baked") if baked_kind is not None else None
    beside = [SOURCE_DIGESTS_NAME]
    if online is not None:
        save_overlay(online, directory / OVERLAY_NAME)
        entry = OverlayEntry(kind=kind_of(online), drawn="online")
        beside.append(OVERLAY_NAME)
    totals = Totals()
    for sample in samples:
        totals += Totals.of(sample.content)
    digests = b"".join(content_digest(sample.content) for sample in samples)
    write_source_digests(directory / SOURCE_DIGESTS_NAME, digests, num_samples=len(samples))
    stored = [name for name in labels if name == "base" or online is None]
    index(
        directory,
        paths,
        Description(
            how_made=HowMade(
                dataset="tiny",
                source="test",
                split=split,
                seed=seed,
                source_sha256=hashlib.sha256(str(seed).encode()).hexdigest(),
            ),
            input_shape=input_shape,
            mean=totals.mean,
            std=totals.std,
            labels=labels,
            medium="sound" if is_sound else "picture",
            sample_rate=sample_rate,
            overlay=entry,
        ),
        fields=Fields(
            content=("wav" if is_sound else "png",),
            mask="mask.png" if samples[0].mask is not None else None,
            labels={name: f"json:{name}" for name in stored},
        ),
        beside=beside,
    )
    return directory


def index(
    directory: Path, paths: Sequence[Path], description: Description, *, fields: Fields, beside: Sequence[str] = ()
) -> None:
    """Index tars as a build does."""
    tars = [
        scan_tar(ScanInputs(fields, directory), (number, str(path)), is_built=True) for number, path in enumerate(paths)
    ]
    write_index(tars, directory, description, fields=fields, numbered=True, beside=beside)
