"""Handwritten digits to draw over pictures: MNIST (LeCun et al. 1998), or the small set that scikit-learn ships.

Four sets can be chosen, each by its name:

- `mnist`: MNIST's 60,000 training digits for both splits, as published for C+Digits. A test picture can show a digit
  that was trained on.
- `mnist_test_for_test`: without this leak, MNIST's 10,000 test digits for the test split.
- `mnist_t10k`: MNIST's test digits alone, 0 to 7,999 for the train split and 8,000 to 9,999 for the test split.
- `sklearn`: scikit-learn's 1,797 digits, 0 to 1,436 for the train split and 1,437 to 1,796 for the test split.

A set that is missing is never replaced by another.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data_pipeline.core.errors import UserError
from data_pipeline.core.options import OVERLAY_OPTION
from data_pipeline.sources import LabelColumn

MnistKind = Literal["mnist", "mnist_test_for_test", "mnist_t10k"]
DigitKind = MnistKind | Literal["sklearn"]
NUM_T10K_FOR_TRAIN: Final = 8_000
NUM_SKLEARN_FOR_TRAIN: Final = 1_437  # four fifths; the set is ordered by writer, so the splits share few writers
SMALLEST_SIZE: Final = 8  # pixels, of a digit that can be read
_UINT8 = 0x08  # idx type code
_MAX_LEVEL = 16  # of scikit-learn's digits


@dataclass(frozen=True)
class DigitSource:
    """Digits as (num_digits, H, W) uint8, white on black, with their labels 0 to 9, (num_digits,)."""

    name: str
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    @property
    def column(self) -> LabelColumn:
        """Return the label of a source of these digits."""
        return LabelColumn("digit", tuple("0123456789"), self.labels)

    @property
    def description(self) -> str:
        """Return the name and the first characters of a hash of the content, for the manifest."""
        return f"{self.name} ({hashlib.sha256(self.images.tobytes() + self.labels.tobytes()).hexdigest()[:12]})"


def resize(digit: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Resize a digit of any size to (size, size) uint8, by Pillow's bicubic filter with antialiasing."""
    return np.asarray(Image.fromarray(digit).resize((size, size), Image.Resampling.BICUBIC))


def check_fits(size: int, *, image_size: int) -> None:
    """Raise `UserError` unless a digit of `size` pixels can be read and fits a picture of `image_size` pixels."""
    if not SMALLEST_SIZE <= size <= image_size:
        raise UserError(
            f"a digit of {size} pixels cannot be drawn on a picture of {image_size}x{image_size}; give a size from "
            f"{SMALLEST_SIZE} to {image_size}, or a larger image_size"
        )


def read_digits(kind: DigitKind, root: Path | None, *, split: str) -> DigitSource:
    """Return the digits of one split by the name of their set. Raises `UserError` if their folder is missing."""
    if kind == "sklearn":
        return sklearn_digits(split=split)
    if root is None:
        raise UserError(
            f"the digits of MNIST are read from a folder; name it with --root or {OVERLAY_OPTION} digits_root=DIR, or "
            "choose the digits sklearn"
        )
    return mnist_digits(root, split=split, kind=kind)


def mnist_digits(root: Path, *, split: str, kind: MnistKind = "mnist") -> DigitSource:
    """Read the digits for one split from torchvision's layout, `root/MNIST/raw/*-ubyte` or `*-ubyte.gz`.

    The module's docstring says which digits each `kind` takes. Raises `UserError` if their files are missing or
    damaged.
    """
    raw = root / "MNIST" / "raw"
    prefix = "t10k" if kind == "mnist_t10k" or (kind == "mnist_test_for_test" and split == "test") else "train"
    images = _read_idx(raw, f"{prefix}-images-idx3-ubyte", num_dimensions=3)
    labels = _read_idx(raw, f"{prefix}-labels-idx1-ubyte", num_dimensions=1).astype(np.int64)
    if kind != "mnist_t10k":
        return DigitSource(f"mnist {'test' if prefix == 't10k' else 'train'} digits", images, labels)
    part = slice(None, NUM_T10K_FOR_TRAIN) if split == "train" else slice(NUM_T10K_FOR_TRAIN, None)
    first, last, _ = part.indices(len(labels))
    return DigitSource(f"mnist t10k digits {first}-{last - 1}", images[part], labels[part])


def sklearn_digits(*, split: str) -> DigitSource:
    """Return scikit-learn's 8x8 digits of one split, with levels 0 to 16 scaled to 0 to 255. Needs no download."""
    from sklearn.datasets import load_digits  # here alone, because it takes a second

    images, labels = load_digits(return_X_y=True)
    part = slice(None, NUM_SKLEARN_FOR_TRAIN) if split == "train" else slice(NUM_SKLEARN_FOR_TRAIN, None)
    first, last, _ = part.indices(len(labels))
    pixels = np.rint(images.reshape(-1, 8, 8) * (255 / _MAX_LEVEL)).astype(np.uint8)
    return DigitSource(f"scikit-learn digits {first}-{last - 1}", pixels[part], labels[part].astype(np.int64))


def _find(raw: Path, name: str) -> Path | None:
    return next((path for path in (raw / name, raw / f"{name}.gz") if path.is_file()), None)


def _read_idx(raw: Path, name: str, *, num_dimensions: int) -> NDArray[np.uint8]:
    """Read an array in MNIST's idx format: two zero bytes, type, number of dimensions, sizes, values."""
    path = _find(raw, name)
    if path is None:
        instead = ""
        if name.startswith("train") and _find(raw, "t10k-images-idx3-ubyte") is not None:
            instead = ", or choose the digits mnist_t10k, which cuts the test digits that are there into two splits"
        raise UserError(
            f'{raw} has no {name}, with or without .gz; download MNIST with `python -c "import torchvision; '
            f"torchvision.datasets.MNIST('{raw.parents[1]}', download=True)\"`{instead}"
        )
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read()
        zeros, kind, dimensions, *shape = struct.unpack_from(f">HBB{num_dimensions}I", data)
        if (zeros, kind, dimensions) != (0, _UINT8, num_dimensions):
            raise ValueError("its header is wrong")
        return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * num_dimensions).reshape(shape)
    except (OSError, EOFError, zlib.error, struct.error, ValueError) as error:
        raise UserError(f"{path} is not a whole MNIST file ({error}); download it again") from None
