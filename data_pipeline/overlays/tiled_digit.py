"""DigitOnImageNet (Chen, Luo and Li 2021): one handwritten digit, repeated over the whole picture.

All digits come from a few different ones, `unique` of them. The fewer there are, the easier it is to tell them apart,
and the less a contrastively trained encoder learns of the picture below.

A pixel is the brighter one of the picture and the digit, as in the authors' notebook. It draws nine copies, 28 pixels
wide, at fixed places of pictures of 224 pixels. Here copies touch each other and fill the picture, from a drawn offset.
The notebook takes the first digits of MNIST; here a seed chooses them, with equal numbers of each class.

Shapes: B batch, N digits to choose from, H height, W width, S height and width of a digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Final, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, integers
from data_pipeline.core.errors import UserError
from data_pipeline.core.options import OptionValue
from data_pipeline.core.randomness import generator, shuffled_in_rounds
from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT
from data_pipeline.core.schema import Schema
from data_pipeline.overlays import Layer, OverlayInputs
from data_pipeline.overlays.digits import DIGIT_PURPOSE, DigitOptions, DigitOverlay, resized
from data_pipeline.sources.digits import SMALLEST_SIZE, DigitSource

_OFFSET: Final = DIGIT_PURPOSE + 1
_NUM_CLASSES: Final = 10


def default_size(image_size: int) -> int:
    """Return the size of a digit in pixels: the published 28 of 224 in proportion, and at least 16.

    Examples:
        >>> default_size(32), default_size(224)
        (16, 28)
    """
    return max(16, image_size * 28 // 224)


Blend = Literal["brighter", "opaque"]


class TiledDigitOptions(DigitOptions):
    """The options of the overlay tiled_digit.

    unique: how many different digits there are; by default all of the digit set. The seed of the build chooses them
        from the digits of the train split, for both splits, so both builds need the same seed.
    size: the width of a digit in pixels; by default `default_size`.
    blend: "brighter" takes the brighter one of picture and digit, as published; "opaque" hides the picture wherever the
        digit is not black, as C+Digits does, so that digits can be read on bright pictures too.
    """

    unique: int | None = Field(None, exclude=True)
    size: int | None = Field(None, ge=SMALLEST_SIZE)
    blend: Blend = "brighter"

    def read(self, given: OverlayInputs) -> DigitSource:
        """Read the digits. With `unique`, both splits have digits of the train split, so a probe knows all classes.

        Raises `UserError` if they are missing, or if there are fewer than `unique`.
        """
        if self.unique is None:
            return super().read(given)
        return choose_digits(super().read(replace(given, split="train")), self.unique, seed=given.seed)


class TiledDigit(DigitOverlay):
    """An overlay of one digit in many copies, in ten classes.

    Digits are drawn uniformly, so the classes have the frequencies of `label_N`. Copies touch each other, and the first
    begins at a drawn offset, so the edges of the picture cut some. At least one copy is whole.

    Args:
        digits_NHW: (N, S, S) uint8, white on black; S is 8 to image_size / 2, and N is at least 1.
        label_N: (N,) int64, 0 to 9.
        image_size: height and width of the pictures in pixels, at least 32.
        blend: see `TiledDigitOptions`.

    Raises:
        UserError: S is out of range.
    """

    title = "tiled digit"
    options_schema: ClassVar[type[Schema]] = TiledDigitOptions

    def __init__(self, digits_NHW: Tensor, label_N: Tensor, *, image_size: int, blend: Blend = "brighter") -> None:
        super().__init__(digits_NHW, label_N, image_size=image_size)
        self.size = digits_NHW.shape[-1]
        if not SMALLEST_SIZE <= self.size <= image_size // 2:
            raise UserError(
                f"a digit of {self.size} pixels cannot be tiled over a picture of {image_size}x{image_size}, because "
                f"no copy would be whole or legible; give a size from {SMALLEST_SIZE} to {image_size // 2}"
            )
        self.blend = blend
        self.chosen = {"unique": label_N.numel(), "size": self.size, "blend": blend}

    @classmethod
    def of(cls, source: DigitSource, *, size: int | None = None, blend: Blend = "brighter", image_size: int) -> Self:
        """Return the overlay of the digits of `source`, `size` pixels wide; None stands for `default_size`."""
        return cls(*resized(source, size or default_size(image_size)), image_size=image_size, blend=blend)

    def options(self) -> dict[str, OptionValue]:
        return {"image_size": self.image_size, "blend": self.blend}  # the digits say their number and size

    def draw(self, keys: DrawKeys) -> Layer:
        """Draw one digit for each key, in as many copies as fit."""
        number_B = self.draw_numbers(keys)
        offset_B2 = integers(keys, 2, self.size, purpose=_OFFSET)
        place_H = torch.arange(self.image_size, device=number_B.device)
        row_BH, column_BW = ((offset_B[:, None] + place_H) % self.size for offset_B in offset_B2.T)
        grey_BHW = self.digits_NHW[number_B[:, None, None], row_BH[:, :, None], column_BW[:, None, :]]
        mask_BHW = torch.where(grey_BHW > 0, MASK_OBJECT, MASK_BOX).to(torch.uint8)
        return Layer(self.label_N[number_B], grey_BHW[:, None], (grey_BHW > 0).to(torch.uint8) * 255, mask_BHW)

    def draw_over(self, pictures_BCHW: Tensor, keys: DrawKeys, labels: Mapping[str, Tensor]) -> tuple[Tensor, Layer]:
        if self.blend == "opaque":
            return super().draw_over(pictures_BCHW, keys, labels)
        layer = self.draw(keys)
        return pictures_BCHW.maximum(layer.colour_BCHW), layer


def choose_digits(source: DigitSource, num: int, *, seed: int) -> DigitSource:
    """Return `num` different digits of `source`, drawn by `seed`.

    The numbers of any two classes differ by one at most, unless `source` has too few of one. A larger `num` adds digits
    to those of a smaller one. Raises `UserError` if there are not so many.
    """
    if not 1 <= num <= len(source.labels):
        raise UserError(
            f"{num} unique digits were asked for, but {source.name} are {len(source.labels):,}; give unique from 1 to "
            f"{len(source.labels)}"
        )
    chosen_N = shuffled_in_rounds(source.labels, generator(seed, "unique digits"))[:num]
    return DigitSource(f"{num} of {source.name}", source.images[chosen_N], source.labels[chosen_N])
