"""Figures made of pictures: a grid of inputs, their views and what the views changed.

Shapes: N pictures (columns of the grid), H height, W width.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

GAINS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100)


@dataclass(frozen=True)
class GridRow:
    """One row of the grid: a title and one picture (H, W, 3) float in [0, 1] for each column."""

    title: str
    pictures_NHWC: NDArray[np.float32]


def difference_gain(*differences: NDArray[np.float32]) -> int:
    """The largest of `GAINS` that shows 99 % of the differences without clipping; 1 where they are large."""
    largest = float(np.quantile(np.abs(np.concatenate([np.ravel(difference) for difference in differences])), 0.99))
    return max((gain for gain in GAINS if gain * largest <= 0.5), default=GAINS[0])


def difference_pictures(difference_NHWC: NDArray[np.float32], *, gain: int) -> NDArray[np.float32]:
    """A signed difference as a picture: middle grey is no change, brighter is more of a colour."""
    pictures_NHWC: NDArray[np.float32] = np.clip(0.5 + gain * difference_NHWC, 0.0, 1.0)
    return pictures_NHWC


def picture_grid(rows: Sequence[GridRow], *, column_titles: Sequence[str]) -> bytes:
    """A PNG of the rows, one below the other; pixels are shown as squares, never interpolated.

    Equal input gives equal bytes: the file holds no date and no version.
    """
    cell, left, top = 0.92, 1.25, 0.42  # inches
    num_columns = len(column_titles)
    width, height = left + cell * num_columns, top + cell * len(rows)
    figure = Figure(figsize=(width, height), dpi=120, facecolor="white")
    for row_number, row in enumerate(rows):
        bottom = height - top - cell * (row_number + 1)
        figure.text((left - 0.12) / width, (bottom + cell / 2) / height, row.title, ha="right", va="center", fontsize=9)
        for column in range(num_columns):
            pad = 0.03
            axes = figure.add_axes(
                (
                    (left + cell * column + pad) / width,
                    (bottom + pad) / height,
                    (cell - 2 * pad) / width,
                    (cell - 2 * pad) / height,
                )
            )
            axes.imshow(row.pictures_NHWC[column], interpolation="nearest", vmin=0.0, vmax=1.0)
            axes.set_axis_off()
    for column, title in enumerate(column_titles):
        x = (left + cell * (column + 0.5)) / width
        figure.text(x, (height - top + 0.06) / height, title, ha="center", va="bottom", fontsize=8, color="#444444")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
