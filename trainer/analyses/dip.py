"""The dip test, which detects if a sample has more than one mode (Hartigan and Hartigan 1985).

A unimodal distribution function is convex up to its mode and concave after it. The dip is the distance of the empirical
function from the nearest unimodal one. It is about 1 / sqrt(n) for one mode, and up to 1/4 for two. It assumes no
shape, unlike coefficients of skewness and kurtosis, which mistake one skewed mode for two.

Shapes: N numbers, K distinct ones, D draws.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from data_pipeline.core.randomness import generator

Floats = NDArray[np.float64]

_TINY = 1e-280  # smaller numbers count as 0: between them, slopes of the empirical function exceed float64


def dip(x_N: Floats) -> float:
    """Return the dip of finite numbers (N,) in any order, equal ones allowed; at least 1 / (2 N).

    The algorithm is Hartigan's (1985). An interval around the mode starts as the whole sample. It shrinks towards the
    point at which the greatest convex minorant and the least concave majorant of the empirical function are farthest
    apart. It stops when that distance no longer exceeds their distance from the function outside of the interval.

    Examples:
        >>> float(dip(np.array([0.0, 0.0, 1.0, 1.0])))  # as far from one mode as possible
        0.25
    """
    x_N = x_N.astype(np.float64)
    x_K, count_K = np.unique(np.where(np.abs(x_N) < _TINY, 0.0, x_N), return_counts=True)
    above_K = np.cumsum(count_K).astype(np.float64)  # the empirical function times N at each number, and just below it
    below_K = above_K - count_K
    least, low, high = 1.0, 0, len(x_K) - 1  # `least` is 2 N times the dip so far
    while high > low:
        inside = slice(low, high + 1)
        minorant, its_knots = _hull(x_K[inside], below_K[inside], increasing=True)
        majorant, other_knots = _hull(x_K[inside], above_K[inside], increasing=False)
        gap = majorant - minorant
        knots = np.union1d(its_knots, other_knots)
        widest = int(knots[np.argmax(gap[knots])])
        if gap[widest] <= least:
            break
        new_low = int(its_knots[its_knots <= widest][-1])
        new_high = int(other_knots[other_knots >= widest][0])
        before, after = slice(0, new_low), slice(new_high + 1, None)
        outside = [above_K[inside][before] - minorant[before], majorant[after] - below_K[inside][after]]
        least = max(least, *(float(distance.max()) for distance in outside if distance.size))
        if new_low == 0 and new_high == high - low:
            break
        low, high = low + new_low, low + new_high
    return least / (2 * x_N.size)


@cache
def uniform_dips(num: int, *, num_draws: int, seed: int) -> Floats:
    """Return dips of samples of `num` uniform numbers, (D,) ascending: the largest of any unimodal distribution."""
    draw = generator(seed, "dip of uniform numbers", num)
    return np.sort([dip(draw.random(num)) for _ in range(num_draws)])


def dip_p_value(value: float, uniform_D: Floats) -> float:
    """Return the probability of a dip this large or larger with one mode; at least 1 / (D + 1)."""
    return float((1 + (uniform_D >= value).sum()) / (1 + uniform_D.size))


def _hull(x_K: Floats, y_K: Floats, *, increasing: bool) -> tuple[Floats, NDArray[np.int64]]:
    """Return the greatest convex minorant of points (`increasing` slopes) or least concave majorant, and its knots.

    The knots are the points at which it bends, and both ends. Its slopes are the isotonic regression of the slopes
    between the points.
    """
    width = np.diff(x_K)
    knots = isotonic_regression(np.diff(y_K) / width, weights=width, increasing=increasing).blocks
    return np.interp(x_K, x_K[knots], y_K[knots]), knots
