from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from trainer.analyses.dip import Floats, dip, dip_p_value, uniform_dips


def dip_by_linear_programs(x_N: Floats) -> float:
    """Compute the dip by its definition: the least d such that a function within d of the empirical one is unimodal.

    For each place of the mode, a linear program finds a function that is convex before it and concave from it. Its
    variables are the values up to the mode, the values from the mode, and d.
    """
    x_K, count_K = np.unique(x_N, return_counts=True)
    above_K = np.cumsum(count_K) / len(x_N)
    below_K = above_K - count_K / len(x_N)
    best = 1.0
    for mode in range(len(x_K)):
        convex, concave = mode + 1, len(x_K) - mode
        rows: list[Floats] = []
        limits: list[float] = []

        def at_most(limit: float, terms: dict[int, float], size: int, rows=rows, limits=limits) -> None:  # type: ignore[no-untyped-def]
            row = np.zeros(size)
            for place, factor in terms.items():
                row[place] = factor
            rows.append(row)
            limits.append(limit)

        size = convex + concave + 1
        d = size - 1
        for place in range(size - 1):
            k = place if place < convex else mode + place - convex
            left, right = place != convex, place != mode  # the function may jump at its mode, and only there
            for known_K in (below_K,) * left + (above_K,) * right:
                at_most(known_K[k], {place: 1, d: -1}, size)
                at_most(-known_K[k], {place: -1, d: -1}, size)
        for place in range(size - 2):
            at_most(0, {place: 1, place + 1: -1}, size)
        for place in range(1, size - 2):
            if convex - 1 <= place <= convex:
                continue  # an end of either part
            k = place if place < convex else mode + place - convex
            before, after = 1 / (x_K[k] - x_K[k - 1]), 1 / (x_K[k + 1] - x_K[k])
            sign = 1 if place < convex else -1
            at_most(0, {place: sign * (before + after), place - 1: -sign * before, place + 1: -sign * after}, size)
        solved = linprog(np.eye(size)[d], A_ub=np.array(rows), b_ub=limits, bounds=[(0, 1)] * size)
        best = min(best, solved.fun)
    return max(best, 1 / (2 * len(x_N)))


@pytest.mark.parametrize("kind", ["continuous", "tied", "at both ends"])
def test_the_dip_is_that_of_its_definition(kind: str) -> None:
    draw = np.random.default_rng(3)
    for _ in range(5):
        size = int(draw.integers(2, 13))
        x_N = {
            "continuous": draw.random(size),
            "tied": draw.integers(0, 6, size) / 5,
            "at both ends": draw.beta(0.3, 0.3, size),
        }[kind]
        assert dip(x_N) == pytest.approx(dip_by_linear_programs(x_N), abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "quantiles"),
    [  # Critical values that the authors of R's package diptest found with a million samples each.
        (10, {0.5: 0.09778, 0.9: 0.13046, 0.95: 0.13961}),
        (1000, {0.5: 0.01174, 0.9: 0.01561, 0.95: 0.01693}),
    ],
)
def test_uniform_samples_have_the_published_dips(num: int, quantiles: dict[float, float]) -> None:
    dips_D = uniform_dips(num, num_draws=400, seed=1)
    for share, published in quantiles.items():
        deviation = np.sqrt(share * (1 - share) / dips_D.size)
        assert abs((dips_D < published).mean() - share) < 4 * deviation


def test_probabilities_near_the_smallest_float_are_zeros() -> None:
    """A judge that is very sure gives them; the slopes between them are too large for a float."""
    tiny_N = np.array([0.0, 5e-324, 1e-320, 1e-310, 1e-300])
    for rest_N in (np.full(5, 1.0), np.linspace(0.3, 1, 7)):
        assert dip(np.r_[tiny_N, rest_N]) == dip(np.r_[np.zeros(5), rest_N])


def test_two_modes_are_told_from_one() -> None:
    draw = np.random.default_rng(2)
    uniform_D = uniform_dips(400, num_draws=99, seed=0)
    skewed = draw.beta(0.5, 5.0, 400)  # one mode, at the edge; Sarle's coefficient takes it for two
    two = np.concatenate([draw.beta(0.5, 8.0, 200), draw.beta(8.0, 0.5, 200)])
    assert dip_p_value(dip(skewed), uniform_D) > 0.1
    assert dip_p_value(dip(two), uniform_D) == 1 / 100


def test_equal_numbers_have_the_least_dip() -> None:
    assert dip(np.full(8, 0.3)) == 1 / 16
