"""C+Digits (Tamkin et al. 2022): four copies of one handwritten digit, 10x10 pixels each of 32x32, at fixed places.

A pixel of the resized digit hides the picture unless it is black. The faint pixels around a stroke therefore form a
dark rim, as in the original.

Shapes: B batch, N digits to choose from, H height, W width.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, integers
from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE, Layout
from data_pipeline.core.schema import Schema
from data_pipeline.overlays import (
    FIRST_PURPOSE,
    IMAGE_SIZE,
    Layer,
    LayoutOptions,
    OverlayInputs,
    PictureOverlay,
    scaled,
    square_size,
)
from data_pipeline.sources.digits import DigitKind, DigitSource, read_digits, resize

DIGIT_SIZE: Final = 10  # in a picture of 32 pixels, like the corners
CORNERS: Final = ((4, 4), (4, 16), (16, 4), (16, 16))  # row and column of the top left pixel; off centre, as published
DIGIT_PURPOSE: Final = FIRST_PURPOSE


def resized(source: DigitSource, size: int) -> tuple[Tensor, Tensor]:
    """Return all digits of `source` in one size, (N, size, size) uint8, and their labels, (N,) int64."""
    digits_NHW = torch.from_numpy(np.stack([resize(digit, size) for digit in source.images]))
    return digits_NHW, torch.tensor(source.labels, dtype=torch.int64)


class DigitOptions(Schema):
    """The options of an overlay that draws digits. The digits stand in the description of a dataset.

    digits: a set of `data_pipeline.sources.digits`; by default `sklearn` on procedural pictures, else `mnist`.
    digits_root: the folder of MNIST; by default that of the source.
    """

    digits: DigitKind | None = Field(None, exclude=True)
    digits_root: Path | None = Field(None, exclude=True)

    def read(self, given: OverlayInputs) -> DigitSource:
        """Read the digits of a split. Raises `UserError` if they are missing."""
        kind = self.digits or ("sklearn" if given.base == "procedural" else "mnist")
        return read_digits(kind, self.digits_root or given.root, split=given.split)


class PaintedDigitOptions(DigitOptions, LayoutOptions):
    """The options of the overlay digits."""


class DigitOverlay(PictureOverlay):
    """The base class of overlays that draw one of N digits for each picture, uniformly, whatever its base label."""

    class_names = tuple("0123456789")
    digits_NHW: Tensor
    label_N: Tensor

    @classmethod
    def open(cls, given: OverlayInputs) -> Self:
        """Return `cls.of(digits, image_size=..., **options)` for square pictures of 32 pixels or more."""
        options = given.read(cls.options_schema)
        assert isinstance(options, DigitOptions)
        image_size = square_size(given)
        source = options.read(given)
        overlay = cls.of(source, image_size=image_size, **options.model_dump())
        overlay.made_from = f" + {source.description}"
        return overlay

    @classmethod
    @abstractmethod
    def of(cls, *args: Any, **options: Any) -> Self:
        """Return the overlay of a `DigitSource`. Takes `image_size`, and the options of the user by name."""

    def __init__(
        self, digits_NHW: Tensor, label_N: Tensor, *, image_size: int = IMAGE_SIZE, layout: Layout = "scaled"
    ) -> None:
        super().__init__(image_size=image_size, layout=layout)
        self.register_buffer("digits_NHW", digits_NHW)
        self.register_buffer("label_N", label_N)

    def draw_numbers(self, keys: DrawKeys) -> Tensor:
        """Draw the number of a digit for each key, (B,) int64."""
        return integers(keys, 1, self.label_N.numel(), purpose=DIGIT_PURPOSE)[:, 0]

    def in_corners(self, number_BL: Tensor) -> Layer:
        """Return the digits with these numbers in the first L corners; the label is that of the first."""
        grey_BHW = self.digits_NHW.new_zeros(len(number_BL), self.drawn_size, self.drawn_size)
        mask_BHW = torch.full_like(grey_BHW, MASK_OUTSIDE)
        for number_B, corner in zip(number_BL.unbind(1), CORNERS, strict=False):
            digit_BHW = self.digits_NHW[number_B]
            row, column = (scaled(place, drawn_size=self.drawn_size) for place in corner)
            size = self.digits_NHW.shape[-1]
            square = (slice(None), slice(row, row + size), slice(column, column + size))
            grey_BHW[square] = digit_BHW
            mask_BHW[square] = torch.where(digit_BHW > 0, MASK_OBJECT, MASK_BOX).to(torch.uint8)
        alpha_BHW = (grey_BHW > 0).to(torch.uint8) * 255
        return Layer(self.label_N[number_BL[:, 0]], grey_BHW[:, None], alpha_BHW, mask_BHW)


class Digits(DigitOverlay):
    """An overlay of digits in ten classes.

    Digits are drawn uniformly, with replacement, so the classes have the frequencies of `label_N`.

    Args:
        digits_NHW: (N, S, S) uint8, white on black, as `resize` returns them; N is at least 1. S is 10 in a drawing of
            32 pixels, and in proportion in others.
        label_N: (N,) int64, 0 to 9.
        image_size, layout: see `PictureOverlay`.
    """

    title = "digit"
    options_schema: ClassVar[type[Schema]] = PaintedDigitOptions

    @classmethod
    def of(cls, source: DigitSource, *, image_size: int = IMAGE_SIZE, layout: Layout = "scaled") -> Self:
        """Return the overlay of all digits of `source`; resizing 60,000 digits takes seconds."""
        drawn_size = IMAGE_SIZE if layout == "tiled" else image_size
        return cls(*resized(source, scaled(DIGIT_SIZE, drawn_size=drawn_size)), image_size=image_size, layout=layout)

    def draw(self, keys: DrawKeys) -> Layer:
        """Draw one digit for each key."""
        return self.in_corners(self.draw_numbers(keys)[:, None].expand(-1, len(CORNERS)))
