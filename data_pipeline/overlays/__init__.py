"""Overlays: a second, labelled object drawn on a picture, or a second, labelled sound behind the first.

An overlay takes a batch of clean pictures or waveforms, on any device, and the keys of all draws. It returns the batch
with an object in each input, the class of the object, and for pictures a mask of it. The draw of the class does not
depend on the input, so the two labels of a sample are independent.

Guarantees: the same input and keys give the same output, in a build, in a stream and from data in memory, on CPU and
GPU. The input is not changed.

To add an overlay of pictures, write a `PictureOverlay` with `class_names` and `draw`, and a line in `OVERLAYS`.

Shapes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.sample import MASK_OUTSIDE

IMAGE_SIZE: Final = 32  # width and height in pixels; the published positions and sizes of objects assume it
FIRST_PURPOSE: Final = 100  # overlays number their draws from here (`purpose` in `data_pipeline.core.counter_rng`)


@dataclass(frozen=True)
class Overlaid:
    """The result of an overlay: the inputs with an object in each, the classes, and the masks (None for sounds).

    `inputs` are pictures (B, 3, H, W) uint8 or waveforms (B, T) float32; `label_B` is int64; `masks_BHW` is uint8 in
    the levels `MASK_OUTSIDE`, `MASK_BOX`, `MASK_OBJECT`.
    """

    inputs: Tensor
    label_B: Tensor
    masks_BHW: Tensor | None


class Overlay(nn.Module, ABC):
    """The base class of all overlays.

    The assets of an overlay, such as its pictures of digits, are persistent buffers. An online dataset stores them
    beside its shards, so that a draw does not depend on the software that reads it.
    """

    class_names: tuple[str, ...]  # in the order of the labels
    title: str = "object"  # what the label is about, such as "digit"

    def options(self) -> dict[str, str | int | float]:
        """Return the other arguments of the constructor: `type(overlay)(**buffers, **options)` is the same overlay."""
        return {}

    @abstractmethod
    def forward(self, inputs: Tensor, keys: DrawKeys) -> Overlaid:
        """Put one object into each input, drawn from `keys` alone."""


@dataclass(frozen=True)
class Layer:
    """One object for each picture of a batch: its class, its colour and its opacity.

    Attributes:
        label_B: (B,) int64, the class of each object.
        colour_BCHW: uint8, broadcastable to (B, 3, H, W): (B, 3, 1, 1) is one colour for each picture.
        alpha_BHW: (B, H, W) uint8, the opacity of the paint: 0 is the photo, 255 the colour alone.
        mask_BHW: (B, H, W) uint8 in the three mask levels.
    """

    label_B: Tensor
    colour_BCHW: Tensor
    alpha_BHW: Tensor
    mask_BHW: Tensor


class PictureOverlay(Overlay):
    """An overlay that paints what a subclass returns from `draw`."""

    @abstractmethod
    def draw(self, keys: DrawKeys) -> Layer:
        """Draw one object for each key; the draw does not depend on the pictures."""

    def forward(self, inputs: Tensor, keys: DrawKeys) -> Overlaid:
        """Paint over pictures (B, 3, H, W) uint8; each value is rounded to the nearest integer."""
        layer = self.draw(keys)
        return Overlaid(paint(inputs, layer), layer.label_B, layer.mask_BHW)


def paint(pictures_BCHW: Tensor, layer: Layer) -> Tensor:
    """Return (photo * (255 - alpha) + colour * alpha) / 255, rounded, for pictures (B, 3, H, W) uint8."""
    alpha_B1HW = layer.alpha_BHW[:, None].to(torch.int32)
    total = (pictures_BCHW * (255 - alpha_B1HW)).add_(layer.colour_BCHW * alpha_B1HW)
    return divide_by_255(total).to(torch.uint8)


def divide_by_255(total: Tensor) -> Tensor:
    """Return `total` / 255 rounded, exact for int32 from 0 to 255 * 255; integer division is slow on CPU."""
    total = total + 128
    return total.add_(total >> 8).bitwise_right_shift_(8)


def no_mask(pictures_BCHW: Tensor) -> Tensor:
    """Return the mask of pictures on which nothing is drawn, (B, H, W) uint8."""
    return torch.full_like(pictures_BCHW[:, 0], MASK_OUTSIDE)


_EVALUATION, _BAKED = 1_000, {"train": 1_001, "test": 1_002}  # numbers of views that training never uses


def evaluation_keys(index_B: Tensor, *, draw: int) -> DrawKeys:
    """Return the keys of an online overlay for evaluation, the same in every run.

    Pass several values of `draw` to measure how much a result varies with the overlays of the test set.
    """
    return DrawKeys(seed=0, epoch=draw, index_B=index_B, view=_EVALUATION)


def baked_keys(index_B: Tensor, *, seed: int, split: str) -> DrawKeys:
    """Return the keys of an overlay that a build draws into the shards."""
    return DrawKeys(seed=seed, epoch=0, index_B=index_B, view=_BAKED[split])
