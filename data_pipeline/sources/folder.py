"""A folder of pictures with a folder for each class: `ROOT/CLASS/*`, or `ROOT/train/CLASS/*` and
`ROOT/test/CLASS/*`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data_pipeline.errors import UserError
from data_pipeline.sample import Record

SUFFIXES: Final = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


def middle_square(picture: Image.Image, size: int) -> Image.Image:
    """A picture resized until its shorter side has `size` pixels, and of that the middle, (size, size).

    Bilinear with antialiasing, and rounded as torchvision's `Resize` and `CenterCrop` round.
    """
    shorter = min(picture.size)
    width, height = (int(size * side / shorter) for side in picture.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return picture.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))


class ImageFolder:
    """Every picture of a folder, classes and files sorted by name, converted to RGB.

    If `root` has a folder named `train` or `test`, the one named `split` is read; else `root` itself holds the classes.
    Files with other endings than `SUFFIXES`, and names that begin with a dot, are passed over. With an `image_size`,
    each picture is made that size by `middle_square`; without one, all must have the size of the first.

    Raises `UserError` that names the folder or file: a missing or empty folder, fewer than two classes, a picture that
    does not decode (found when it is read) or has another size.
    """

    title = "picture"

    def __init__(self, root: Path, *, split: str, image_size: int | None = None) -> None:
        self.root = _split_folder(root, split)
        self.image_size = image_size
        folders = sorted(path for path in self.root.iterdir() if path.is_dir() and not path.name.startswith("."))
        if len(folders) < 2:
            found = f"only one class folder ({folders[0].name})" if folders else "no class folders"
            raise UserError(f"{self.root} holds {found}; give a folder that holds at least two, each with its pictures")
        self.class_names = tuple(folder.name for folder in folders)
        # Names end to end, not as objects: millions of files cost their letters and 16 bytes each.
        names, lengths, num_files = [], [], []
        for folder in folders:
            in_class = [os.fsencode(name) for name in _picture_names(folder)]
            names.append(b"".join(in_class))
            lengths.append(np.array([len(name) for name in in_class], dtype=np.int64))
            num_files.append(len(in_class))
        self._names, self._name_ends = b"".join(names), np.cumsum(np.concatenate(lengths))
        self.labels: NDArray[np.int64] = np.repeat(np.arange(len(folders)), num_files)
        self._shape = _decode(self._path(0), image_size).shape

    @property
    def description(self) -> str:
        return "folder" if self.image_size is None else f"folder, middle {self.image_size}x{self.image_size}"

    def _path(self, number: int) -> Path:
        start = self._name_ends[number - 1] if number else 0
        name = os.fsdecode(self._names[start : self._name_ends[number]])
        return self.root / self.class_names[int(self.labels[number])] / name

    def __getitem__(self, number: int) -> Record:
        path = self._path(number)
        pixels = _decode(path, self.image_size)
        if pixels.shape != self._shape:
            (height, width, _), (first_height, first_width, _) = pixels.shape, self._shape
            raise UserError(
                f"{path} is {width}x{height} pixels but {self._path(0)} is {first_width}x{first_height}; "
                "make all one size with --image-size"
            )
        return Record(pixels, int(self.labels[number]))


def _split_folder(root: Path, split: str) -> Path:
    if not root.is_dir():
        raise UserError(
            f"{root} is not a folder; give --root the folder that holds one folder of pictures for each class"
        )
    if not any((root / name).is_dir() for name in ("train", "test")):
        return root
    if not (root / split).is_dir():
        raise UserError(f"{root} has no folder {split}; add it, or choose the other --split")
    return root / split


def _picture_names(folder: Path) -> list[str]:
    names = [path.name for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] != "."]
    if not names:
        raise UserError(f"{folder} holds no pictures ({', '.join(sorted(SUFFIXES))}); fill it or remove it")
    return sorted(names)


def _decode(path: Path, image_size: int | None) -> NDArray[np.uint8]:
    try:
        with Image.open(path) as picture:
            rgb = picture.convert("RGB")
            return np.asarray(rgb if image_size is None else middle_square(rgb, image_size))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} does not decode as a picture ({error}); mend or remove it") from None
