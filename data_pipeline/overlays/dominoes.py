"""Dominoes (Shah et al. 2020): a photo and a handwritten digit, joined to one picture.

The digit is scaled to the width of the photo and stands above it, as published, or below it: 32 x 32 pixels become 64
rows of 32. The class of the digit may follow the class of the photo. "The pitfalls of simplicity bias in neural
networks" joins two classes of MNIST and CIFAR-10; here there are all ten digits.

`join=square` makes a picture that is as high as it is wide, for views and encoders that need one: each pair of rows of
the joined picture becomes its mean, so both halves keep their full width and lose half of their rows.

Shapes: B batch, N digits to choose from, K classes, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal, Self

import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, integers
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT
from data_pipeline.core.schema import Schema, Share
from data_pipeline.overlays import FIRST_PURPOSE, NOTHING_GIVEN, Overlaid, OverlayInputs, PixelOverlay, Shape, no_mask
from data_pipeline.overlays.correlation import check_base_label, correlated_classes
from data_pipeline.overlays.digits import DigitOptions, resized

Join = Literal["tall", "square"]
Place = Literal["above", "below"]
NUM_CLASSES: Final = 10
_CLASS, _DIGIT = FIRST_PURPOSE, FIRST_PURPOSE + 2  # the class takes two purposes
_STEPS: Final = 1 << 30  # values of a draw among the digits of a class; times their number it fits 64 bits


class DominoesOptions(DigitOptions):
    """The options of the overlay dominoes.

    correlation: the probability that the digit is the number of the photo's class.
    digit: whether the digit is above or below the photo.
    join: "tall" for the published shape, "square" for half of its rows.
    """

    correlation: Share = 0.0
    digit: Place = "above"
    join: Join = "tall"


class Dominoes(PixelOverlay):
    """An overlay that joins a digit to each picture. Without a correlation, the ten classes are equally likely.

    The label `overlay` is the digit. The mask marks the digit's half: its ink, and the rest of the half as its box.

    Args:
        digits_NHW: (N, W, W) uint8, white on black, as `data_pipeline.sources.digits.resize` returns them; W is the
            width of the pictures.
        label_N: (N,) int64, 0 to 9; each class has a digit.
        correlation, digit, join: see `DominoesOptions`.

    The digits are kept in the order of their labels.

    Raises:
        UserError: a class has no digit.
    """

    class_names = tuple("0123456789")
    title = "digit"
    options_schema: ClassVar[type[Schema]] = DominoesOptions
    digits_NHW: Tensor
    label_N: Tensor
    _count_K: Tensor
    _start_K: Tensor

    def __init__(
        self,
        digits_NHW: Tensor,
        label_N: Tensor,
        *,
        correlation: float = 0.0,
        digit: Place = "above",
        join: Join = "tall",
    ) -> None:
        super().__init__()
        count_K = label_N.bincount(minlength=NUM_CLASSES)
        if not count_K.all():
            raise UserError(f"the digits hold no {int(count_K.argmin())}; choose other digits")
        order_N = label_N.argsort(stable=True)
        self.correlation, self.digit, self.join = correlation, digit, join
        self.chosen = {"correlation": correlation, "digit": digit, "join": join}
        self.register_buffer("digits_NHW", digits_NHW[order_N])
        self.register_buffer("label_N", label_N[order_N])
        self.register_buffer("_count_K", count_K, persistent=False)
        self.register_buffer("_start_K", count_K.cumsum(0) - count_K, persistent=False)

    @classmethod
    def open(cls, given: OverlayInputs) -> Self:
        options = given.read(DominoesOptions)
        check_base_label(given, options.correlation)
        source = options.read(given)
        overlay = cls(*resized(source, given.shape[2]), **options.model_dump())
        overlay.made_from = f" + {source.description}"
        return overlay

    def output_shape(self, stored_shape: Shape) -> Shape:
        num_channels, height, width = stored_shape
        tall = height + width
        return num_channels, tall // 2 if self.join == "square" else tall, width

    def forward(self, inputs: Tensor, keys: DrawKeys, labels: Mapping[str, Tensor] = NOTHING_GIVEN) -> Overlaid:
        """Join a digit to pictures (B, C, H, W) uint8: (B, C, H + W, W) uint8, or half as many rows."""
        num_channels = inputs.shape[1]
        label_B = correlated_classes(keys, labels, NUM_CLASSES, correlation=self.correlation, purpose=_CLASS)
        step_B = integers(keys, 1, _STEPS, purpose=_DIGIT)[:, 0]
        digit_BHW = self.digits_NHW[self._start_K[label_B] + step_B * self._count_K[label_B] // _STEPS]
        mask_BHW = torch.where(digit_BHW > 0, MASK_OBJECT, MASK_BOX).to(torch.uint8)
        parts = [inputs, digit_BHW[:, None].expand(-1, num_channels, -1, -1)]
        masks = [no_mask(inputs), mask_BHW]
        if self.digit == "above":
            parts, masks = parts[::-1], masks[::-1]
        pictures_BCHW, mask_BHW = torch.cat(parts, dim=2), torch.cat(masks, dim=1)
        if self.join == "square":
            pictures_BCHW, mask_BHW = halve_rows(pictures_BCHW), mask_BHW[:, ::2].maximum(mask_BHW[:, 1::2])
        return Overlaid(pictures_BCHW, label_B, mask_BHW)


def halve_rows(pictures_BCHW: Tensor) -> Tensor:
    """Return the mean of each pair of rows of pictures (B, C, H, W) uint8, rounded half up: (B, C, H / 2, W) uint8."""
    upper, lower = pictures_BCHW[:, :, ::2].to(torch.int16), pictures_BCHW[:, :, 1::2].to(torch.int16)
    return ((upper + lower + 1) >> 1).to(torch.uint8)
