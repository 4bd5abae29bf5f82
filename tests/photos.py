"""A folder of photos as a user has it: JPEGs of many sizes, cut from the two pictures that scikit-learn ships."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from data_pipeline.building.build import build_dataset
from data_pipeline.core.sample import Layout


def write_photos(root: Path, *, num_train: int, num_test: int) -> Path:
    """Write `root/train/CLASS/*.jpg` and `root/test/CLASS/*.jpg`, classes by turns; return `root`."""
    rng = np.random.default_rng(0)
    for split, num in (("train", num_train), ("test", num_test)):
        for number in range(num):
            name, picture = (("temple", "flower")[number % 2], load_sample_images().images[number % 2])
            height, width = rng.integers(100, 400, 2)
            top, left = (
                int(rng.integers(side - part)) for side, part in zip(picture.shape, (height, width), strict=False)
            )
            folder = root / split / name
            folder.mkdir(parents=True, exist_ok=True)
            part = picture[top : top + height, left : left + width]
            Image.fromarray(part).save(folder / f"IMG_{number:04}.jpg", quality=92)
    return root


def build_photos(
    directory: Path,
    *,
    size: int,
    num_train: int,
    num_test: int,
    dataset: str = "folder_digits",
    layout: Layout = "scaled",
    overlay: Literal["baked", "online"] = "online",
) -> Path:
    """Write photos and build `directory/train` and `directory/test` from them; return `directory`."""
    root = write_photos(directory / "photos", num_train=num_train, num_test=num_test)
    for split in ("train", "test"):
        build_dataset(
            dataset,
            directory / split,
            split=split,
            root=root,
            source_options={"image_size": size},
            overlay=None if dataset == "folder" else overlay,
            overlay_options={
                **({} if dataset == "folder" else {"layout": layout}),
                **({"digits": "sklearn"} if dataset == "folder_digits" else {}),
            },
        )
    return directory
