"""C+Digits (Tamkin et al. 2022): four copies of one handwritten digit, 10x10 pixels each, at fixed places.

Pixels that are black after the digit is made smaller let the picture through; all others hide it. So the faint pixels
round a stroke are a dark rim, as in the original.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from data_pipeline.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE, Overlaid
from data_pipeline.sources.digits import DigitSource

DIGIT_SIZE: Final = 10
CORNERS: Final = ((4, 4), (4, 16), (16, 4), (16, 16))  # row and column of the top left pixel: off centre, as published


def shrink(digit: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A digit of any size as (10, 10) uint8, by Pillow's bicubic filter with antialiasing."""
    return np.asarray(Image.fromarray(digit).resize((DIGIT_SIZE, DIGIT_SIZE), Image.Resampling.BICUBIC))


@dataclass(frozen=True)
class Digits:
    """Ten classes, with the frequencies of `digits`, of which one is drawn uniformly, with replacement."""

    digits: DigitSource
    class_names: tuple[str, ...] = tuple("0123456789")

    def __call__(self, image: NDArray[np.uint8], rng: Generator) -> Overlaid:
        number = int(rng.integers(len(self.digits.labels)))
        digit = shrink(self.digits.images[number])
        inside = digit > 0
        drawn = image.copy()
        mask = np.full(image.shape[:2], MASK_OUTSIDE, dtype=np.uint8)
        for row, column in CORNERS:
            square = (slice(row, row + DIGIT_SIZE), slice(column, column + DIGIT_SIZE))
            drawn[square][inside] = digit[inside][:, None]
            mask[square] = np.where(inside, MASK_OBJECT, MASK_BOX)
        return Overlaid(drawn, int(self.digits.labels[number]), mask)
