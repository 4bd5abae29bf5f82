"""The dip test: has a sample more than one mode? (Hartigan and Hartigan 1985)

The dip is the largest distance between the empirical distribution function and the nearest unimodal one, which is
convex up to its mode and concave from there. It is about 1 / sqrt(n) where there is one mode, and up to 1/4 where there
are two. It assumes no shape, unlike coefficients of skewness and kurtosis, which take a skewed mode for two.

Shapes: N numbers, K distinct ones, D draws.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray
from sklearn.isotonic import isotonic_regression

from data_pipeline.core.randomness import generator

Floats = NDArray[np.float64]


def dip(x_N: Floats) -> float:
    """The dip of numbers (N,), equal ones allowed, in any order; 1 / (2 N) at least.

    As Hartigan (1985) finds it: an interval that holds the mode shrinks from all of the sample to where the greatest
    convex minorant and the least concave majorant of the empirical function are farthest apart, as long as they are
    farther apart there than the function is from them outside.

    Raises:
        ValueError: no numbers, or one that is not finite.

    Examples:
        >>> float(dip(np.array([0.0, 0.0, 1.0, 1.0])))  # as far from one mode as can be
        0.25
    """
    if x_N.size == 0 or not np.isfinite(x_N).all():
        raise ValueError(f"the dip is of finite numbers, one at least, got {x_N.size}, not all of them finite")
    x_K, count_K = np.unique(x_N.astype(np.float64), return_counts=True)
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


def uniform_dips(num: int, *, num_draws: int, seed: int) -> Floats:
    """Dips of samples of `num` uniform numbers, (D,) ascending: the uniform law is the hardest unimodal one to tell."""
    return _uniform_dips(num, num_draws, seed)


def dip_p_value(value: float, uniform_D: Floats) -> float:
    """Probability of at least this dip where there is one mode; 1 / (D + 1) at the least."""
    return float((1 + (uniform_D >= value).sum()) / (1 + uniform_D.size))


@cache
def _uniform_dips(num: int, num_draws: int, seed: int) -> Floats:
    draw = generator(seed, "dip of uniform numbers", num)
    return np.sort([dip(draw.random(num)) for _ in range(num_draws)])


def _hull(x_K: Floats, y_K: Floats, *, increasing: bool) -> tuple[Floats, NDArray[np.int64]]:
    """The greatest convex minorant of points (slopes increase), or the least concave majorant, at each point; and the
    points that it bends at, with both ends. Its slopes are the isotonic regression of the points' own.
    """
    width = np.diff(x_K)
    slope = isotonic_regression(np.diff(y_K) / width, sample_weight=width, increasing=increasing)
    knots = np.concatenate([[0], np.flatnonzero(np.diff(slope)) + 1, [len(x_K) - 1]])
    return np.interp(x_K, x_K[knots], y_K[knots]), knots
