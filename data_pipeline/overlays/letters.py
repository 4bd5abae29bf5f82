"""C+Letters (Tamkin et al. 2022): one capital in one colour, four times, each copy somewhere in its corner.

The face is Liberation Sans, which is free and drawn to the widths of the original's Arial; at 12 pixels its capitals
are 9 pixels high and begin 2 below the drawing point. In the right column the last pixels of a W, and in the lower row
those of a Q's tail, can fall off the picture's edge, as they do in the original.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from data_pipeline.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE, Overlaid

FONT_PATH: Final = Path(__file__).parent / "assets" / "LiberationSans-Regular.ttf"
FONT_SIZE: Final = 12
NEAR, FAR = (0, 6), (16, 21)  # inclusive ranges of a drawing point's coordinate
PLACES: Final = ((NEAR, NEAR), (FAR, NEAR), (NEAR, FAR), (FAR, FAR))  # of x and y


@cache
def glyph(letter: str) -> Image.Image:
    """How much of each pixel the letter covers, mode L, with its drawing point at (0, 0)."""
    # Without the basic layout the result would depend on whether libraqm is installed.
    font = ImageFont.truetype(FONT_PATH, FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)
    picture = Image.new("L", (2 * FONT_SIZE, 2 * FONT_SIZE))
    ImageDraw.Draw(picture).text((0, 0), letter, fill=255, font=font, anchor="la")
    return picture


@dataclass(frozen=True)
class Letters:
    """Twenty-six classes, uniform; the colour is uniform over the RGB cube and opaque."""

    class_names: tuple[str, ...] = tuple(string.ascii_uppercase)

    def __call__(self, image: NDArray[np.uint8], rng: Generator) -> Overlaid:
        label = int(rng.integers(len(self.class_names)))
        red, green, blue = rng.integers(256, size=3).tolist()
        ink = glyph(self.class_names[label])
        drawn = Image.fromarray(image)
        mask = np.full(image.shape[:2], MASK_OUTSIDE, dtype=np.uint8)
        for (x_first, x_last), (y_first, y_last) in PLACES:
            x, y = int(rng.integers(x_first, x_last + 1)), int(rng.integers(y_first, y_last + 1))
            drawn.paste((red, green, blue), (x, y), ink)
            _mark(mask, ink, x, y)
        return Overlaid(np.asarray(drawn), label, mask)


def _mark(mask: NDArray[np.uint8], ink: Image.Image, x: int, y: int) -> None:
    """Write one copy of a glyph into the mask; where copies overlap, the higher level stays."""
    left, top, right, bottom = ink.getbbox() or (0, 0, 0, 0)
    inked = np.asarray(ink)[top:bottom, left:right] > 0
    box = mask[y + top : y + bottom, x + left : x + right]  # a slice ends at the picture's edge by itself
    height, width = box.shape
    np.maximum(box, np.where(inked[:height, :width], MASK_OBJECT, MASK_BOX), out=box, casting="unsafe")
