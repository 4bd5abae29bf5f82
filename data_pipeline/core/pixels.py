"""Turn pixels of 0 to 255 into numbers from 0 to 1, with the same bits on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def from_bytes(pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return uint8 pixels, or floats from 0 to 255, divided by 255: a new tensor of the same shape, of type `dtype`.

    A GPU does not divide by a number of Python's, but multiplies by its reciprocal, and so every other pixel would
    differ in its last bit from that of a CPU. By a tensor it divides.
    """
    numbers = pixels.to(dtype, copy=True)
    return numbers.div_(torch.full((), 255, dtype=dtype, device=numbers.device))
