"""Check the inputs of view policies, and turn them into numbers of a floating type."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, TypeVar

import torch
from torch import Tensor

from data_pipeline.audio.waveform import to_float
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Draws = TypeVar("Draws", bound="DataclassInstance")
_LOUDEST: Final = 2  # a sound with another behind it is not clipped


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast. The device "meta" has none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def check_pictures(images_BCHW: Tensor, keys: DrawKeys) -> None:
    """Raise `UserError` if pictures are whole numbers, and `ValueError` as `check_keys` does.

    The range is not checked, because the host would wait for it.
    """
    check_keys(images_BCHW, keys)
    if not images_BCHW.is_floating_point():
        kind = str(images_BCHW.dtype).removeprefix("torch.")
        raise UserError(f"views take pictures of a floating type in [0, 1], got {kind}; divide bytes by 255")


def check_keys(inputs: Tensor, keys: DrawKeys) -> None:
    """Raise `ValueError` if there is not one key for each row of the inputs; a single key would be broadcast."""
    if len(keys.index_B) != len(inputs):
        raise ValueError(f"there are {len(keys.index_B)} keys for a batch of {len(inputs)}; pass one for each sample")


def rows_of(draws: Draws, rows: slice) -> Draws:
    """Return the draws of some of the samples: a dataclass with these rows of its tensors."""
    tensors = {name: value for name, value in vars(draws).items() if isinstance(value, Tensor)}
    return dataclasses.replace(draws, **{name: value[rows] for name, value in tensors.items()})


def from_bytes(
    pixels: Tensor, dtype: torch.dtype = torch.float32, memory_format: torch.memory_format = torch.preserve_format
) -> Tensor:
    """Return uint8 pixels, or floats from 0 to 255, divided by 255: a new tensor of the same shape, of type `dtype`.

    If the divisor is a number of Python, torch multiplies by its reciprocal on a GPU, and half of the 256 values differ
    in their last bit from a CPU's. A tensor as the divisor makes both divide.
    """
    divisor = torch.full([1] * pixels.dim(), 255, dtype=dtype, device=pixels.device)
    return torch.div(pixels, divisor, out=torch.empty_like(pixels, dtype=dtype, memory_format=memory_format))


def to_floating(inputs: Tensor) -> Tensor:
    """Return uint8 pictures as float32 in [0, 1], int16 waveforms (B, T) as float32 in [-1, 1), and floats as they are.

    Raises `UserError` for inputs of another type.
    """
    if inputs.is_floating_point():
        return inputs
    if inputs.dtype == torch.uint8:
        return from_bytes(inputs)
    if inputs.dtype == torch.int16 and inputs.dim() == 2:
        return to_float(inputs)
    raise UserError(
        "pictures must be uint8 or floats in [0, 1], and waveforms (B, T) int16 or floats in [-1, 1], got "
        f"{str(inputs.dtype).removeprefix('torch.')} of shape {tuple(inputs.shape)}; convert them to "
        "floats in that range"
    )


def to_unit_range(inputs: Tensor) -> Tensor:
    """Return inputs as `to_floating` does.

    Raises `UserError` if floating pictures (B, C, H, W) on the CPU are outside [0, 1], or floating waveforms (B, T)
    outside [-2, 2], which holds the sum of two sounds; on a GPU the host would wait for the answer.
    """
    if not inputs.is_floating_point():
        return to_floating(inputs)
    if inputs.dim() not in (2, 4) or inputs.device.type != "cpu" or not inputs.numel():
        return inputs
    low, high = (float(bound) for bound in inputs.detach().aminmax())
    if inputs.dim() == 4 and (low < 0 or high > 1):
        raise UserError(
            f"pictures must be in [0, 1], got values from {low:.3g} to {high:.3g}; divide bytes by 255, and leave "
            "out any normalisation, because the encoder normalises"
        )
    if inputs.dim() == 2 and max(-low, high) > _LOUDEST:
        raise UserError(
            f"waveforms must be in [-1, 1], got values from {low:.3g} to {high:.3g}; divide points of 16 bits by 32,768"
        )
    return inputs
