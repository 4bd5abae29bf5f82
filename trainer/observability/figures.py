"""Draw grids of pictures (inputs, their views and the differences), and write figures as PNG.

Shapes: N pictures (columns of the grid), H height, W width.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

# Sizes of the grid in pixels: a picture (approximately), the gaps, and the room for the titles.
PICTURE_SIZE, GAP, LEFT, TOP, DPI = 128, 6, 128, 44, 100
_LETTER = 7.5  # pixels of a letter of a column's title, about

GAINS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100)


@dataclass(frozen=True)
class GridRow:
    """One row of the grid: a title, and one picture (H, W, 3) float in [0, 1] for each column."""

    title: str
    pictures_NHWC: NDArray[np.float32]


def difference_gain(*differences: NDArray[np.float32]) -> int:
    """Return the largest of `GAINS` that shows 99 % of the differences without clipping; 1 if they are large or nan."""
    largest = float(np.quantile(np.abs(np.concatenate([np.ravel(difference) for difference in differences])), 0.99))
    return max((gain for gain in GAINS if gain * largest <= 0.5), default=GAINS[0])


def difference_pictures(difference_NHWC: NDArray[np.float32], *, gain: int) -> NDArray[np.float32]:
    """Return a signed difference as a picture: middle grey is no change, brighter is more of a colour."""
    pictures_NHWC: NDArray[np.float32] = np.clip(0.5 + gain * difference_NHWC, 0.0, 1.0)
    return pictures_NHWC


def picture_grid(rows: Sequence[GridRow], *, column_titles: Sequence[str]) -> bytes:
    """Return a PNG of the rows, one below the other. Pictures are enlarged by a whole factor.

    A pixel that is nan is black. Titles grow with large pictures, because a page shows the whole grid in its width. A
    title that is wider than its column ends in three dots. Equal input gives equal bytes.
    """
    num_columns, height, width = rows[0].pictures_NHWC.shape[:3]
    scale = max(1, round(PICTURE_SIZE / width))
    cell_width, cell_height = scale * width + GAP, scale * height + GAP
    zoom = max(1.0, scale * width / PICTURE_SIZE)
    top_of_grid, left_of_grid = round(zoom * TOP), round(zoom * LEFT)
    size = (top_of_grid + cell_height * len(rows), left_of_grid + cell_width * num_columns, 3)
    canvas_HWC = np.ones(size, dtype=np.float32)
    full_height, full_width = canvas_HWC.shape[:2]
    figure = Figure(figsize=(full_width / DPI, full_height / DPI), dpi=DPI)
    for row_number, row in enumerate(rows):
        top = top_of_grid + cell_height * row_number
        for column, picture_HWC in enumerate(row.pictures_NHWC):
            left = left_of_grid + cell_width * column
            enlarged_HWC = picture_HWC.repeat(scale, axis=0).repeat(scale, axis=1)
            canvas_HWC[top : top + scale * height, left : left + scale * width] = np.nan_to_num(enlarged_HWC)
        middle = 1 - (top + scale * height / 2) / full_height
        x = (left_of_grid - 14) / full_width
        figure.text(x, middle, row.title, ha="right", va="center", fontsize=11 * zoom)
    num_letters = int(cell_width / (_LETTER * zoom))
    for column, title in enumerate(column_titles):
        shown = title if len(title) <= num_letters else f"{title[: num_letters - 3]}..."
        x = (left_of_grid + cell_width * column + scale * width / 2) / full_width
        y = 1 - (top_of_grid - 8) / full_height
        figure.text(x, y, shown, ha="center", va="bottom", fontsize=10 * zoom, color="#444444")
    figure.figimage(canvas_HWC, vmin=0.0, vmax=1.0)
    return to_png(figure)


def to_png(picture: Figure | Image.Image) -> bytes:
    """Return the picture as a PNG without date and version."""
    file = io.BytesIO()
    if isinstance(picture, Figure):
        picture.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    else:
        picture.save(file, "PNG", optimize=True)
    return file.getvalue()
