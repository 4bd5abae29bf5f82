"""Read pictures from one folder for each class.

The layout is `ROOT/train/CLASS/*` and `ROOT/test/CLASS/*`, or `ROOT/CLASS/*` with a test split that is drawn from it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data_pipeline.core.errors import UserError
from data_pipeline.core.options import SOURCE_OPTION
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import Record
from data_pipeline.core.system import num_cores
from data_pipeline.sources.picture_file import read_rgb
from data_pipeline.storage.source_digests import content_digest

logger = logging.getLogger(__name__)

SUFFIXES: Final = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})


def middle_square(picture: Image.Image, size: int) -> Image.Image:
    """Resize a picture so that its shorter side has `size` pixels, and crop the middle to (size, size).

    Resizes bilinearly with antialiasing, and rounds sizes like torchvision's `Resize` and `CenterCrop`.
    """
    shorter = min(picture.size)
    width, height = (int(size * side / shorter) for side in picture.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return picture.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))


class ImageFolder:
    """The pictures of one split, read by `read_rgb`, with classes and files sorted by name.

    If `root` has folders `train` and `test`, reads the one named `split`. If it has neither, `root` itself holds the
    classes, and `in_test_split` draws the share `test_share` of each class as the test split; this decodes every
    picture once. Files with other endings than `SUFFIXES`, and pictures beside the class folders, are ignored with a
    warning, hidden files without one.
    `middle_square` brings each picture to `image_size`; if that is None, all pictures must have the size of the first.

    Raises `UserError` with the name of the folder or file if a folder is missing or empty, if there are fewer than two
    classes, or if `test_share` is missing, not needed or leaves a class without pictures. Reading a record raises it if
    the picture does not decode or has another size.
    """

    title = "picture"

    def __init__(
        self, root: Path, *, split: str, image_size: int | None = None, test_share: float | None = None, seed: int = 0
    ) -> None:
        self.root = _split_folder(root, split, test_share)
        self.image_size = image_size
        self.description = "folder" if image_size is None else f"folder, middle {image_size}x{image_size}"
        visible = sorted(path for path in self.root.iterdir() if not path.name.startswith("."))
        folders = [path for path in visible if path.is_dir()]
        if len(folders) < 2:
            found = f"only one class folder ({folders[0].name})" if folders else "no class folders"
            raise UserError(f"{self.root} holds {found}; give a folder that holds at least two, each with its pictures")
        self.class_names = tuple(folder.name for folder in folders)
        names: list[bytes] = []
        num_files = []
        others: list[Path] = []
        for folder in folders:
            in_class = _picture_names(folder, others)
            names += map(os.fsencode, in_class)
            num_files.append(len(in_class))
        if others:
            logger.warning("%s: ignored %d entries that are no pictures, such as %s", self.root, len(others), others[0])
        self._name_N = np.array(names)  # bytes: there may be millions of files, and each worker has a copy
        self.labels: NDArray[np.int64] = np.repeat(np.arange(len(folders)), num_files)
        if test_share is not None:
            self._keep_split(split, test_share=test_share, seed=seed)
        self._shape = self._decode(0).shape

    def _keep_split(self, split: str, *, test_share: float, seed: int) -> None:
        """Keep the records of one split."""
        digests = picture_digests(self.path, len(self.labels), title=f"splitting {self.root.name} into train and test")
        in_test_N = in_test_split(digests, self.labels, test_share=test_share, seed=seed, carry_rounding=False)
        self.description += describe_draw(in_test_N, test_share=test_share, seed=seed)
        chosen_N = in_test_N == (split == "test")
        counts = np.bincount(self.labels[chosen_N], minlength=len(self.class_names))
        if not counts.all():
            raise UserError(
                f"test_share={test_share} leaves no pictures of class {self.class_names[int(counts.argmin())]} of "
                f"{self.root} for the {split} split; choose another share or add pictures"
            )
        self.labels, self._name_N = self.labels[chosen_N], self._name_N[chosen_N]

    def path(self, number: int) -> Path:
        """Return the file of a record."""
        return self.root / self.class_names[int(self.labels[number])] / os.fsdecode(self._name_N[number])

    def _decode(self, number: int) -> NDArray[np.uint8]:
        return decode_picture(self.path(number), self.image_size)

    def __getitem__(self, number: int) -> Record:
        pixels = self._decode(number)
        check_same_size(pixels, self.path(number), shape=self._shape, first=self.path(0))
        return Record(pixels, int(self.labels[number]))


_NUM_AT_ONCE: Final = 1_000  # pictures that wait for the threads
# In the manifest, so that no build goes on with the split of another rule. Manifests of the first rule name none.
_SPLIT_RULE: Final = 2


def decode_picture(path: Path, image_size: int | None) -> NDArray[np.uint8]:
    """Return the pixels of a picture, (H, W, 3): its `middle_square` of `image_size`, or all if that is None."""
    picture = read_rgb(path)
    return np.asarray(picture if image_size is None else middle_square(picture, image_size))


def check_same_size(pixels: NDArray[np.uint8], path: Path, *, shape: tuple[int, ...], first: Path) -> None:
    """Raise `UserError` if the pixels of a picture do not have the shape (H, W, 3) of the first one."""
    if pixels.shape != shape:
        (height, width, _), (first_height, first_width, _) = pixels.shape, shape
        raise UserError(
            f"{path} is {width}x{height} pixels but {first} is {first_width}x{first_height}; bring all pictures to one "
            f"size with {SOURCE_OPTION} image_size=N"
        )


def picture_digests(path: Callable[[int], Path], num: int, *, title: str) -> list[bytes]:
    """Return the digest of the whole upright picture in each of `num` files, whatever their formats.

    Threads decode the files. Progress is shown under `title`.
    """
    digests: list[bytes] = []
    with (
        ThreadPoolExecutor(num_cores()) as pool,
        Progress(title, total=num) as progress,
    ):
        for start in range(0, num, _NUM_AT_ONCE):
            numbers = range(start, min(start + _NUM_AT_ONCE, num))
            digests += pool.map(lambda number: content_digest(decode_picture(path(number), None)), numbers)
            progress.advance(len(numbers))
    return digests


def in_test_split(
    digests: Sequence[bytes], labels: NDArray[np.int64], *, test_share: float, seed: int, carry_rounding: bool
) -> NDArray[np.bool_]:
    """Return whether each picture is in the test split, (N,) bool.

    Draws the share `test_share` of the distinct pictures of each class, rounded. With `carry_rounding`, each class
    makes up for the rounding of the classes before it. Then the total is the rounded share of all distinct pictures,
    and the number of each class differs from its share by less than one.

    The draw depends on the pictures and the seed alone, not on names or order. Copies of a picture are in the same
    split; a picture in two classes counts for the first. A change of the draw needs another `_SPLIT_RULE`.
    """
    class_of: dict[bytes, int] = {}
    for digest, label in zip(digests, labels.tolist(), strict=True):
        class_of[digest] = min(label, class_of.get(digest, label))
    in_class: dict[int, list[tuple[bytes, bytes]]] = {}
    for digest, label in class_of.items():
        lot = hashlib.sha256(f"test share {seed} ".encode() + digest).digest()
        in_class.setdefault(label, []).append((lot, digest))
    chosen: set[bytes] = set()
    share, start = Fraction(str(test_share)), 0
    for lots in sorted(map(sorted, in_class.values()), key=_lot_of_class):
        stop = start + len(lots)
        chosen.update(digest for _, digest in lots[: _rounded(share * stop) - _rounded(share * start)])
        start = stop if carry_rounding else 0
    return np.array([digest in chosen for digest in digests])


def _lot_of_class(lots: list[tuple[bytes, bytes]]) -> bytes:
    """Return a lot that depends on no name and favours no size: the hash of the sorted lots of a class."""
    return hashlib.sha256(b"".join(lot for lot, _ in lots)).digest()


def _rounded(number: Fraction) -> int:
    """Return the nearest whole number, the upper one of two."""
    return math.floor(number + Fraction(1, 2))


def describe_draw(in_test_N: NDArray[np.bool_], *, test_share: float, seed: int) -> str:
    """Return for the manifest how a test split was drawn, and how many pictures it has."""
    num = int(np.count_nonzero(in_test_N))
    return f", test share {test_share} ({num} of {len(in_test_N)} pictures) by seed {seed} and rule {_SPLIT_RULE}"


def _split_folder(root: Path, split: str, test_share: float | None) -> Path:
    if not root.is_dir():
        raise UserError(
            f"{root} is not a folder; give --root the folder that holds one folder of pictures for each class"
        )
    there = [name for name in ("train", "test") if (root / name).is_dir()]
    if not there:
        if test_share is None:
            raise UserError(
                f"{root} has no folders train and test, so both splits would hold the same pictures; make these two "
                f"folders, or give {SOURCE_OPTION} test_share=0.2 to both builds, which draws a test split"
            )
        return root
    if test_share is not None:
        raise UserError(f"{root} has a folder {there[0]}, so it takes no test_share; leave it out")
    if split not in there:
        raise UserError(f"{root} has no folder {split}; add it, or choose the other --split")
    return root / split


def _picture_names(folder: Path, others: list[Path]) -> list[str]:
    """Return the sorted names of the pictures in a folder; add everything else that is not hidden to `others`."""
    names = []
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.suffix.lower() in SUFFIXES:
            names.append(path.name)
        else:
            others.append(path)
    if not names:
        raise UserError(f"{folder} holds no pictures ({', '.join(sorted(SUFFIXES))}); add some or remove the folder")
    return sorted(names)
