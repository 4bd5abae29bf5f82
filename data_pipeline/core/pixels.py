"""Turn pixels of 0 to 255 into numbers from 0 to 1, with the same bits on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def from_bytes(pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return uint8 pixels, or floats from 0 to 255, divided by 255: a new tensor of the same shape, of type `dtype`.

    If the divisor is a number of Python, torch multiplies by its reciprocal on a GPU, and half of the 256 values differ
    in their last bit from a CPU's. A tensor as the divisor makes both divide.
    """
    numbers = pixels.to(dtype, copy=True)
    return numbers.div_(torch.full((), 255, dtype=dtype, device=numbers.device))
