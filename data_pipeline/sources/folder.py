"""Read pictures from one folder for each class.

The layout is `ROOT/train/CLASS/*` and `ROOT/test/CLASS/*`, or `ROOT/CLASS/*` with a test split that is drawn from it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
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
from data_pipeline.core.sample import BASE, NO_LABEL, Record
from data_pipeline.core.system import num_cores
from data_pipeline.sources import LabelColumn, visible
from data_pipeline.sources.picture_file import middle_square, read_rgb
from data_pipeline.storage.source_digests import content_digest

logger = logging.getLogger(__name__)

SUFFIXES: Final = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_NUM_AT_ONCE: Final = 1_000  # pictures that wait for the threads
# In the manifest, so that no build goes on with the split of another rule. Manifests of the first rule name none.
_SPLIT_RULE: Final = 2


class PictureFiles:
    """The pictures of one split, read by `read_rgb`, and their labels.

    Args:
        root: the folder that the user named.
        names: the path of each picture below `root`.
        labels: each label by name; `base` may be among them.
        image_size: the size to which each picture is brought, as torchvision's `Resize` and `CenterCrop` do; if it is
            None, all must have the size of the first.
        description: the kind of source, for the manifest.

    Reading a record raises `UserError` with the name of the file if it does not decode or has another size.
    """

    title = "picture"

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        labels: Mapping[str, LabelColumn],
        *,
        image_size: int | None,
        description: str,
    ) -> None:
        self.root, self.image_size, self.description = root, image_size, description
        # Bytes: there may be millions of files, and each worker has a copy.
        self._name_N = np.array([os.fsencode(name) for name in names])
        self.more_labels = dict(labels)
        base = self.more_labels.pop(BASE, None)
        self.class_names: tuple[str, ...] = () if base is None else base.classes
        self.labels: NDArray[np.int64] = np.full(len(names), NO_LABEL) if base is None else base.label_N
        self._shape = _decoded(self.path(0), image_size).shape

    def name(self, number: int) -> str:
        """Return the path of the file of a record below `root`."""
        return os.fsdecode(self._name_N[number])

    def path(self, number: int) -> Path:
        """Return the file of a record."""
        return self.root / self.name(number)

    def __getitem__(self, number: int) -> Record:
        pixels = _decoded(self.path(number), self.image_size)
        if pixels.shape != self._shape:
            (height, width, _), (first_height, first_width, _) = pixels.shape, self._shape
            raise UserError(
                f"{self.path(number)} is {width}x{height} pixels but {self.path(0)} is {first_width}x{first_height}; "
                f"bring all pictures to one size with {SOURCE_OPTION} image_size=N"
            )
        return Record(pixels, int(self.labels[number]), self.name(number))


def _decoded(path: Path, image_size: int | None) -> NDArray[np.uint8]:
    """Return the pixels of a picture, (H, W, 3): its middle square in `image_size`, or all if that is None."""
    picture = read_rgb(path)
    if image_size is not None:
        height, width, top, left = middle_square(picture.height, picture.width, image_size)
        resized = picture.resize((width, height), Image.Resampling.BILINEAR)
        picture = resized.crop((left, top, left + image_size, top + image_size))
    return np.asarray(picture)


def image_folder(
    root: Path, *, split: str, image_size: int | None = None, test_share: float | None = None, seed: int = 0
) -> PictureFiles:
    """Return the pictures of one split, with classes and files sorted by name.

    If `root` has folders `train` and `test`, reads the one named `split`. If it has neither, `root` itself holds the
    classes, and `draw_split` draws the share `test_share` of each class as the test split. Files with other endings
    than `SUFFIXES`, and pictures beside the class folders, are ignored with a warning, hidden files without one.

    Raises `UserError` with the name of the folder or file if a folder is missing or empty, if there are fewer than two
    classes, or if `test_share` is missing, not needed or leaves a class without pictures.
    """
    top = _split_folder(root, split, test_share)
    folders = [path for path in visible(top) if path.is_dir()]
    if len(folders) < 2:
        found = f"only one class folder ({folders[0].name})" if folders else "no class folders"
        raise UserError(f"{top} holds {found}; give a folder that holds at least two, each with its pictures")
    classes = tuple(folder.name for folder in folders)
    others: list[Path] = []
    names_of = [_picture_names(folder, others) for folder in folders]
    if others:
        logger.warning("%s: ignored %d entries that are no pictures, such as %s", top, len(others), others[0])
    below = top.relative_to(root)
    names = [str(below / name / each) for name, in_class in zip(classes, names_of, strict=True) for each in in_class]
    label_N = np.repeat(np.arange(len(folders)), [len(in_class) for in_class in names_of])
    description = described("folder", image_size)
    if test_share is not None:
        in_test_N, drawn = draw_split(root, names, label_N, test_share=test_share, seed=seed, carry_rounding=False)
        chosen_N = np.flatnonzero(in_test_N == (split == "test"))
        counts = np.bincount(label_N[chosen_N], minlength=len(classes))
        if not counts.all():
            raise UserError(
                f"test_share={test_share} leaves no pictures of class {classes[int(counts.argmin())]} of {root} for "
                f"the {split} split; choose another share or add pictures"
            )
        names, label_N = [names[number] for number in chosen_N.tolist()], label_N[chosen_N]
        description += drawn
    labels = {BASE: LabelColumn(PictureFiles.title, classes, label_N)}
    return PictureFiles(root, names, labels, image_size=image_size, description=description)


def described(kind: str, image_size: int | None) -> str:
    """Return the description of a source of pictures that are brought to `image_size`."""
    return kind if image_size is None else f"{kind}, middle {image_size}x{image_size}"


def draw_split(
    root: Path, names: Sequence[str], group_N: NDArray[np.int64], *, test_share: float, seed: int, carry_rounding: bool
) -> tuple[NDArray[np.bool_], str]:
    """Return whether each picture is in the test split, (N,) bool, and the draw in words for the manifest.

    `group_N` numbers the groups over which the draw is spread, as `in_test_split` does. Threads decode every picture.
    """
    digests: list[bytes] = []
    with (
        ThreadPoolExecutor(num_cores()) as pool,
        Progress(f"splitting {root.name} into train and test", total=len(names)) as progress,
    ):
        for start in range(0, len(names), _NUM_AT_ONCE):
            some = names[start : start + _NUM_AT_ONCE]
            digests += pool.map(lambda name: content_digest(_decoded(root / name, None)), some)
            progress.advance(len(some))
    in_test_N = in_test_split(digests, group_N, test_share=test_share, seed=seed, carry_rounding=carry_rounding)
    num = f"{np.count_nonzero(in_test_N)} of {len(in_test_N)} pictures"
    return in_test_N, f", test share {test_share} ({num}) by seed {seed} and rule {_SPLIT_RULE}"


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
    paths = visible(folder)
    names = [path.name for path in paths if path.suffix.lower() in SUFFIXES]
    others += [path for path in paths if path.suffix.lower() not in SUFFIXES]
    if not names:
        raise UserError(f"{folder} holds no pictures ({', '.join(sorted(SUFFIXES))}); add some or remove the folder")
    return names
