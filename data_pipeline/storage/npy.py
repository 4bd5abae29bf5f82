"""Encode and decode pictures of any number of channels as `.npy`, the format of numpy, which WebDataset readers know.

Guarantees: nothing is unpickled, and no more memory is taken than the file holds. A file may come from a stranger.

Shapes: B pictures, C channels, H height, W width.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.lib import format as npy_format
from numpy.typing import NDArray
from torch import Tensor

_MAX_HEADER: Final = 10_000


def encode_npy(pixels: NDArray[np.uint8]) -> bytes:
    """Return the `.npy` of a picture, (H, W, C) uint8; the same pixels give the same bytes."""
    file = io.BytesIO()
    npy_format.write_array(file, np.ascontiguousarray(pixels), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def is_npy(file: bytes | memoryview) -> bool:
    """Return whether a file begins as a `.npy` does."""
    return bytes(file[: npy_format.MAGIC_LEN - 2]) == npy_format.MAGIC_PREFIX


def npy_values(file: bytes | memoryview) -> NDArray[Any]:
    """Return the numbers of a `.npy`, as a view of the file.

    Raises `ValueError` if it is damaged or cut short, or holds something else than numbers.
    """
    start = io.BytesIO(file[: _MAX_HEADER + npy_format.MAGIC_LEN + 4])
    is_first_version = npy_format.read_magic(start) == (1, 0)
    read_header = npy_format.read_array_header_1_0 if is_first_version else npy_format.read_array_header_2_0
    shape, is_fortran, dtype = read_header(start, max_header_size=_MAX_HEADER)
    if dtype.kind not in "biuf":
        raise ValueError(f"a .npy of the type {dtype} holds no picture; save whole numbers or floats")
    num_bytes, expected = len(file) - start.tell(), math.prod(shape) * dtype.itemsize
    if num_bytes != expected or not expected:
        raise ValueError(f"a .npy of the shape {shape} holds {expected:,} bytes, not {num_bytes:,}")
    return np.frombuffer(file, dtype, offset=start.tell()).reshape(shape, order="F" if is_fortran else "C")


def decode_npys(files: Sequence[memoryview], shape: tuple[int, int, int]) -> tuple[Tensor, dict[int, str]]:
    """Decode files of `encode_npy` that should all have `shape`, (C, H, W).

    Returns (B, C, H, W) uint8, and by row the reason why a picture did not decode; such a picture is black.
    """
    num_channels, height, width = shape
    pictures_BCHW = np.zeros((len(files), *shape), dtype=np.uint8)
    errors: dict[int, str] = {}
    for row, file in enumerate(files):
        try:
            pixels_HWC = npy_values(file)
            if pixels_HWC.dtype != np.uint8 or pixels_HWC.shape != (height, width, num_channels):
                raise ValueError(f"it holds {pixels_HWC.dtype} of the shape {pixels_HWC.shape}")
        except ValueError as error:
            errors[row] = f"it is not a .npy of a build with {num_channels} channels of {width}x{height} ({error})"
        else:
            pictures_BCHW[row] = pixels_HWC.transpose(2, 0, 1)
    return torch.from_numpy(pictures_BCHW), errors
