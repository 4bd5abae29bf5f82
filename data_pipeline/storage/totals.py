"""Add up the mean and the deviation of the values in a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.sample import Sample
from data_pipeline.core.schema import Schema

_PICTURE_SCALE = 255
_SOUND_SCALE = 1 << 20


class Sums(Schema):
    """Sums over samples, for each channel: of values, and of their squares.

    Values are whole numbers in units of 1 / `scale`, so the order of the sum does not matter.
    """

    scale: int
    num_values: int  # of each channel
    sum_C: tuple[int, ...]
    sum_of_squares_C: tuple[int, ...]


def _sum_of_squares(values_N: NDArray[np.int64]) -> int:
    """Return the exact sum of squares, which may exceed int64 for a long and loud sound."""
    loudest = max(-int(values_N.min()), int(values_N.max()))
    if loudest**2 * len(values_N) < 1 << 63:
        return int(np.square(values_N).sum())
    return sum(value * value for value in values_N.tolist())


class Totals:
    """The running totals of samples. All sums are exact; only the division at the end rounds.

    Pictures and int16 sounds are whole numbers already. Points of float32 sounds are rounded to the nearest 2**-20,
    about a millionth of full scale.
    """

    def __init__(self) -> None:
        self._scale = 1
        self._num_values = 0
        self._sum_C: tuple[int, ...] = ()
        self._sum_of_squares_C: tuple[int, ...] = ()

    def add(self, sample: Sample) -> None:
        content = sample.content
        if content.ndim == 3:
            values_NC, scale, factor = content.reshape(-1, content.shape[-1]).astype(np.int64), _PICTURE_SCALE, 1
        elif content.dtype == np.int16:
            values_NC, scale, factor = content[:, None].astype(np.int64), _SOUND_SCALE, _SOUND_SCALE >> 15
        else:
            values_NC = np.rint(content[:, None] * np.float64(_SOUND_SCALE)).astype(np.int64)
            scale, factor = _SOUND_SCALE, 1
        sum_C = [factor * value for value in values_NC.sum(axis=0).tolist()]
        sum_of_squares_C = [factor**2 * _sum_of_squares(values_N) for values_N in values_NC.T]
        self._add_values(scale, len(values_NC), sum_C, sum_of_squares_C)

    def merge(self, sums: Sums) -> None:
        self._add_values(sums.scale, sums.num_values, sums.sum_C, sums.sum_of_squares_C)

    def _add_values(self, scale: int, num: int, sum_C: Sequence[int], sum_of_squares_C: Sequence[int]) -> None:
        none_C = (0,) * len(sum_C)
        self._scale = scale
        self._num_values += num
        self._sum_C = tuple(map(int.__add__, self._sum_C or none_C, sum_C))
        self._sum_of_squares_C = tuple(map(int.__add__, self._sum_of_squares_C or none_C, sum_of_squares_C))

    @property
    def sums(self) -> Sums:
        return Sums(
            scale=self._scale,
            num_values=self._num_values,
            sum_C=self._sum_C,
            sum_of_squares_C=self._sum_of_squares_C,
        )

    @property
    def mean(self) -> tuple[float, ...]:
        return tuple(total / (self._scale * self._num_values) for total in self._sum_C)

    @property
    def std(self) -> tuple[float, ...]:
        num = self._num_values
        return tuple(
            sqrt((num * squares - total**2) / num**2) / self._scale
            for total, squares in zip(self._sum_C, self._sum_of_squares_C, strict=True)
        )
