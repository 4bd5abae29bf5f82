"""A handwritten digit at a random place of a black canvas: the first digit of MultiDigits (Chen, Luo and Li 2021).

The overlay `second_digit` adds the second. Published are 20 pixels on a canvas of 112; smaller canvases train on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Self

import numpy as np
from pydantic import Field

from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import BASE, Record
from data_pipeline.core.schema import ImageSize, Schema
from data_pipeline.sources import LabelColumn, SourceInputs
from data_pipeline.sources.digits import DigitKind, DigitSource, check_fits, read_digits, resize

DEFAULT_DIGIT_SIZE: Final = 20  # pixels, as published
DEFAULT_IMAGE_SIZE: Final = 112


class PlacedDigitsOptions(Schema):
    """The options of the source placed_digits.

    digit_size: the width of a digit in pixels.
    kind: the digits of each split, as in `data_pipeline.sources.digits`; "sklearn" needs no files.
    image_size: height and width of the canvas in pixels; it stands in the description.
    """

    digit_size: int = DEFAULT_DIGIT_SIZE
    kind: DigitKind = "mnist_test_for_test"
    image_size: ImageSize = Field(DEFAULT_IMAGE_SIZE, exclude=True)


@dataclass(frozen=True)
class PlacedDigits:
    """A source of the digits of one split, one on each canvas.

    The place of digit `number` depends on (seed, split, number) alone, and is uniform over the places where the whole
    digit is on the canvas.

    Raises:
        UserError: the canvas is smaller than the digit.
    """

    digits: DigitSource
    seed: int
    split: str
    options: PlacedDigitsOptions
    options_schema: ClassVar[type[Schema]] = PlacedDigitsOptions

    def __post_init__(self) -> None:
        check_fits(self.options.digit_size, image_size=self.options.image_size)

    @classmethod
    def open(cls, given: SourceInputs) -> Self:
        options = given.read(PlacedDigitsOptions)
        digits = read_digits(options.kind, given.root, split=given.split)
        return cls(digits, given.seed, given.split, options)

    @property
    def description(self) -> str:
        return f"{self.digits.description}, {self.options.digit_size} pixels on a canvas of {self.options.image_size}"

    @property
    def num_records(self) -> int:
        return len(self.digits.labels)

    @property
    def labels(self) -> Mapping[str, LabelColumn]:
        return {BASE: self.digits.column}

    def __getitem__(self, number: int) -> Record:
        rng = generator(self.seed, f"placed digits {self.split}", number)
        size, image_size = self.options.digit_size, self.options.image_size
        row, column = rng.integers(0, image_size - size + 1, 2)
        canvas = np.zeros((image_size, image_size, 3), dtype=np.uint8)
        canvas[row : row + size, column : column + size] = resize(self.digits.images[number], size)[:, :, None]
        return Record(canvas)
