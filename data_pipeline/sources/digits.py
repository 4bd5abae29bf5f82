"""Handwritten digits to draw over pictures: MNIST (LeCun et al. 1998), or the small set that scikit-learn ships.

The published C+Digits draws from the 60,000 MNIST training digits for the training and for the test pictures, so that
a test picture can show a digit that was trained on. The variant without this leak takes MNIST's 10,000 test digits for
the test pictures. Where MNIST's training files are not at hand but its test digits are, digits 0 to 7,999 of those
serve the train split and 8,000 to 9,999 the test split. scikit-learn's 1,797 digits are cut in the same way: 0 to
1,436, and 1,437 to 1,796.
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

from data_pipeline.errors import UserError

NUM_T10K_FOR_TRAIN: Final = 8_000
NUM_SKLEARN_FOR_TRAIN: Final = 1_437  # four fifths; the set is ordered by writer, so the splits share few of them
_UINT8 = 0x08  # idx type code
_MAX_LEVEL = 16  # scikit-learn's digits run from 0 to this


@dataclass(frozen=True)
class DigitSource:
    """Digits as (num_digits, H, W) uint8, white on black, with their values (num_digits,)."""

    name: str
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    @property
    def description(self) -> str:
        """For the manifest: the name, and the beginning of a hash of the content."""
        return f"{self.name} ({hashlib.sha256(self.images.tobytes() + self.labels.tobytes()).hexdigest()[:12]})"


def mnist_digits(root: Path, *, split: str, test_digits: Literal["train", "test"] = "train") -> DigitSource:
    """The MNIST digits for one split from torchvision's layout, `root/MNIST/raw/*-ubyte` or `*-ubyte.gz`.

    `test_digits` says which of MNIST's digits the test split gets where its training files are at hand: the `train`
    digits, as published, or its own `test` digits, none of which is trained on.

    Raises `UserError` where the files are missing or damaged.
    """
    raw = root / "MNIST" / "raw"
    if _find(raw, "train-images-idx3-ubyte") is not None:
        if split == "test" and test_digits == "test":
            return DigitSource("mnist test digits", *_read_pair(raw, "t10k"))
        return DigitSource("mnist train digits", *_read_pair(raw, "train"))
    if _find(raw, "t10k-images-idx3-ubyte") is None:
        raise UserError(
            f"{raw} holds neither train-images-idx3-ubyte nor t10k-images-idx3-ubyte, with or without .gz; download "
            f"MNIST with `python -c \"import torchvision; torchvision.datasets.MNIST('{root}', download=True)\"`"
        )
    images, labels = _read_pair(raw, "t10k")
    part = slice(None, NUM_T10K_FOR_TRAIN) if split == "train" else slice(NUM_T10K_FOR_TRAIN, None)
    first, last, _ = part.indices(len(labels))
    return DigitSource(f"mnist t10k digits {first}-{last - 1}", images[part], labels[part])


def sklearn_digits(*, split: str) -> DigitSource:
    """scikit-learn's 8x8 digits for one split, their 17 levels spread over 0 to 255. Needs no download."""
    from sklearn.datasets import load_digits  # here alone, because it takes a second

    images, labels = load_digits(return_X_y=True)
    part = slice(None, NUM_SKLEARN_FOR_TRAIN) if split == "train" else slice(NUM_SKLEARN_FOR_TRAIN, None)
    first, last, _ = part.indices(len(labels))
    pixels = np.rint(images.reshape(-1, 8, 8) * (255 / _MAX_LEVEL)).astype(np.uint8)
    return DigitSource(f"scikit-learn digits {first}-{last - 1}", pixels[part], labels[part].astype(np.int64))


def _read_pair(raw: Path, prefix: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images = _read_idx(raw, f"{prefix}-images-idx3-ubyte", num_dimensions=3)
    labels = _read_idx(raw, f"{prefix}-labels-idx1-ubyte", num_dimensions=1).astype(np.int64)
    if len(images) != len(labels) or labels.max(initial=0) > 9:
        raise UserError(
            f"{raw}: {len(images)} {prefix} images and {len(labels)} labels do not fit; download MNIST again"
        )
    return images, labels


def _find(raw: Path, name: str) -> Path | None:
    return next((path for path in (raw / name, raw / f"{name}.gz") if path.is_file()), None)


def _read_idx(raw: Path, name: str, *, num_dimensions: int) -> NDArray[np.uint8]:
    """An array in MNIST's idx format: two zero bytes, the type, the number of dimensions, the sizes, the values."""
    path = _find(raw, name)
    if path is None:
        raise UserError(f"{raw / name} is missing; download MNIST again")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, dimensions, *shape = struct.unpack_from(f">HBB{num_dimensions}I", data)
        if (zeros, kind, dimensions) != (0, _UINT8, num_dimensions):
            raise ValueError("its header is not that of such a file")
        return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * num_dimensions).reshape(shape)
    except (OSError, EOFError, zlib.error, struct.error, ValueError) as error:
        raise UserError(f"{path} is not a whole MNIST file ({error}); download it again") from None
