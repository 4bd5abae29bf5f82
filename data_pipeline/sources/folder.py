"""A folder of pictures with a folder for each class: `ROOT/CLASS/*`, or `ROOT/train/CLASS/*` and
`ROOT/test/CLASS/*`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data_pipeline.errors import UserError
from data_pipeline.sample import Record

SUFFIXES: Final = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class ImageFolder:
    """Every picture of a folder, classes and files sorted by name, converted to RGB; all must have the size of the
    first.

    If `root` has a folder named `train` or `test`, the one named `split` is read; else `root` itself holds the classes.
    Files with other endings than `SUFFIXES`, and names that begin with a dot, are passed over.

    Raises `UserError` that names the folder or file: a missing or empty folder, fewer than two classes, a picture that
    does not decode (found when it is read) or has another size.
    """

    description = "folder"

    def __init__(self, root: Path, *, split: str) -> None:
        self.root = _split_folder(root, split)
        folders = sorted(path for path in self.root.iterdir() if path.is_dir() and not path.name.startswith("."))
        if len(folders) < 2:
            found = f"only one class folder ({folders[0].name})" if folders else "no class folders"
            raise UserError(f"{self.root} holds {found}; give a folder that holds at least two, each with its pictures")
        files_by_class = [_picture_names(folder) for folder in folders]
        self.class_names = tuple(folder.name for folder in folders)
        self.labels = np.repeat(np.arange(len(folders)), [len(files) for files in files_by_class])
        self._files: list[str] = [name for files in files_by_class for name in files]
        self._shape = _decode(self._path(0)).shape

    def _path(self, number: int) -> Path:
        return self.root / self.class_names[int(self.labels[number])] / self._files[number]

    def __getitem__(self, number: int) -> Record:
        path = self._path(number)
        image = _decode(path)
        if image.shape != self._shape:
            (height, width, _), (first_height, first_width, _) = image.shape, self._shape
            raise UserError(
                f"{path} is {width}x{height} pixels but {self._path(0)} is {first_width}x{first_height}; "
                "give pictures of one size"
            )
        return Record(image, int(self.labels[number]))


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


def _decode(path: Path) -> NDArray[np.uint8]:
    try:
        with Image.open(path) as picture:
            return np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} does not decode as a picture ({error}); mend or remove it") from None
