"""C+Shapes (Tamkin et al. 2022): a square, a triangle or an ellipse in the middle of the picture, half see-through.

Place and size never change, only class and colour do. The rasters are stored as the columns that each row covers,
because they are those of the original's drawing library and must not change with a later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from data_pipeline.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE, Overlaid

FIRST, LAST = 10, 21  # the box of every shape, inclusive, in both axes
ALPHA: Final = 180  # of 255

# First and last column of rows 10 to 21.
_ROWS: Final = MappingProxyType(
    {
        "square": ((10, 21),) * 12,
        "triangle": (
            *((16, 16), (15, 16), (15, 17), (14, 17), (14, 18), (13, 18)),
            *((13, 19), (12, 19), (12, 20), (11, 20), (11, 21), (10, 21)),
        ),
        "ellipse": (
            *((14, 17), (12, 19), (11, 20), (11, 20), (10, 21), (10, 21)),
            *((10, 21), (10, 21), (11, 20), (11, 20), (12, 19), (14, 17)),
        ),
    }
)


def shape_mask(name: str) -> NDArray[np.uint8]:
    """(32, 32) uint8 in the three levels of `Overlaid.mask`: the shape inside its box."""
    mask = np.full((32, 32), MASK_OUTSIDE, dtype=np.uint8)
    mask[FIRST : LAST + 1, FIRST : LAST + 1] = MASK_BOX
    for row, (first, last) in enumerate(_ROWS[name], start=FIRST):
        mask[row, first : last + 1] = MASK_OBJECT
    return mask


def blend(below: NDArray[np.uint8], colour: NDArray[np.integer], *, alpha: int) -> NDArray[np.uint8]:
    """`colour` over `below` at opacity `alpha` of 255, each channel rounded to the nearest grey level."""
    total = below.astype(np.uint32) * (255 - alpha) + colour.astype(np.uint32) * alpha
    return ((total + 127) // 255).astype(np.uint8)


@dataclass(frozen=True)
class Shapes:
    """Three classes, uniform; the colour is uniform over the RGB cube."""

    class_names: tuple[str, ...] = tuple(_ROWS)

    def __call__(self, image: NDArray[np.uint8], rng: Generator) -> Overlaid:
        label = int(rng.integers(len(self.class_names)))
        colour = rng.integers(256, size=3)
        mask = shape_mask(self.class_names[label])
        inside = mask == MASK_OBJECT
        drawn = image.copy()
        drawn[inside] = blend(image[inside], colour, alpha=ALPHA)
        return Overlaid(drawn, label, mask)
