"""Add up the mean and the deviation of the values in a manifest."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

_PICTURE_SCALE = 255
_SOUND_SCALE = 1 << 20


@dataclass(frozen=True)
class Totals:
    """Sums over samples, for each channel: of values, and of their squares.

    Values are whole numbers in units of 1 / `scale`, so all sums are exact, in any order; only the division at the end
    rounds. Pictures and int16 sounds are whole numbers already. Points of float32 sounds are rounded to the nearest
    2**-20, about a millionth of full scale.
    """

    scale: int = 1
    num_values: int = 0  # of each channel
    sum_C: tuple[int, ...] = ()
    sum_of_squares_C: tuple[int, ...] = ()

    @classmethod
    def of(cls, content: NDArray[Any]) -> Self:
        """Return the totals of one sample: a picture (H, W, C) uint8, or a sound (T,) int16 or float32."""
        if content.ndim == 3:
            values_NC, scale, factor = content.reshape(-1, content.shape[-1]).astype(np.int64), _PICTURE_SCALE, 1
        elif content.dtype == np.int16:
            values_NC, scale, factor = content[:, None].astype(np.int64), _SOUND_SCALE, _SOUND_SCALE >> 15
        else:
            values_NC = np.rint(content[:, None] * np.float64(_SOUND_SCALE)).astype(np.int64)
            scale, factor = _SOUND_SCALE, 1
        return cls(
            scale=scale,
            num_values=len(values_NC),
            sum_C=tuple(factor * value for value in values_NC.sum(axis=0).tolist()),
            sum_of_squares_C=tuple(factor**2 * _sum_of_squares(values_N) for values_N in values_NC.T),
        )

    def __add__(self, other: Self) -> Self:
        """Return the totals of both, of which either may be empty."""
        if not (self.num_values and other.num_values):
            return self if self.num_values else other
        return type(self)(
            scale=self.scale,
            num_values=self.num_values + other.num_values,
            sum_C=tuple(map(int.__add__, self.sum_C, other.sum_C)),
            sum_of_squares_C=tuple(map(int.__add__, self.sum_of_squares_C, other.sum_of_squares_C)),
        )

    @property
    def mean(self) -> tuple[float, ...]:
        return tuple(total / (self.scale * self.num_values) for total in self.sum_C)

    @property
    def std(self) -> tuple[float, ...]:
        num = self.num_values
        return tuple(
            sqrt((num * squares - total**2) / num**2) / self.scale
            for total, squares in zip(self.sum_C, self.sum_of_squares_C, strict=True)
        )


def _sum_of_squares(values_N: NDArray[np.int64]) -> int:
    """Return the exact sum of squares, which may exceed int64 for a long and loud sound."""
    loudest = max(-int(values_N.min()), int(values_N.max()))
    if loudest**2 * len(values_N) < 1 << 63:
        return int(np.square(values_N).sum())
    return sum(value * value for value in values_N.tolist())
