"""Tell differences between encoders from chance, by paired differences over seeds and over test samples.

Two encoders that were trained with the same seeds and tested on the same samples share the luck of both. So their
accuracies are compared seed by seed and sample by sample. The mean of a table of seeds and samples varies with both.
The two variances are those of a crossed analysis of variance (Searle, Casella and McCulloch 1992, chapter 4), the
degrees of freedom after Satterthwaite (1946). Of several comparisons, Holm (1979) keeps the chance of any false one
below the level.

Shapes: S seeds, N test samples. Accuracies are in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

LEVEL = 0.05  # the chance of a false difference; intervals hold 1 - LEVEL


@dataclass(frozen=True)
class Reading:
    """The accuracy of one run on one label, and which of the `num_test` samples are right, if that is known."""

    accuracy: float
    num_test: int
    right_N: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and samples, with its standard error and the degrees of freedom of that error."""

    mean: float
    error: float
    degrees: float
    num_seeds: int

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval."""
        return self.error * float(stats.t.ppf(1 - LEVEL / 2, self.degrees)) if self.error else 0.0

    @property
    def p(self) -> float:
        """The two-sided probability of a mean at least as far from 0, if the true mean is 0."""
        if not self.error:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * stats.t.sf(abs(self.mean) / self.error, self.degrees))


def mean_of(readings: Sequence[Reading]) -> Estimate:
    """Return the mean accuracy of runs that differ in their seed, at least one."""
    return _estimate(
        np.array([one.accuracy for one in readings]),
        _table([one.right_N for one in readings]),
        num_test=min(one.num_test for one in readings),
        largest_variance=_binomial(readings),
    )


def difference_of(a: Mapping[int, Reading], b: Mapping[int, Reading]) -> Estimate | None:
    """Return accuracy of `a` minus that of `b`, paired over the seeds that both have; None if they share none.

    Without the single samples of both, the error of the samples is that of two unpaired test sets, which is larger.
    """
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None
    of_a, of_b = [a[seed] for seed in seeds], [b[seed] for seed in seeds]
    right_a, right_b = _table([one.right_N for one in of_a]), _table([one.right_N for one in of_b])
    is_paired = right_a is not None and right_b is not None and right_a.shape == right_b.shape
    return _estimate(
        np.array([one.accuracy - other.accuracy for one, other in zip(of_a, of_b, strict=True)]),
        right_a - right_b if is_paired else None,  # type: ignore[operator]  # neither is None
        num_test=min(one.num_test for one in [*of_a, *of_b]),
        largest_variance=_binomial(of_a) + _binomial(of_b),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Return adjusted p-values in the order given: reject those below a level, and any false one is rarer than it.

    Examples:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, number in enumerate(np.argsort(p_values, kind="stable").tolist()):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = highest
    return adjusted


@dataclass(frozen=True)
class Rival:
    """A cure that is not the best: the lead of the best over it, and the p-value of this lead, adjusted by Holm."""

    name: str
    lead: Estimate
    p: float

    @property
    def is_told(self) -> bool:
        """Return whether the best is told from it."""
        return self.p < LEVEL


@dataclass(frozen=True)
class Ranking:
    """The cure of the highest mean, the others by rising lead of the best, and those that share no seed with it."""

    best: str
    rivals: tuple[Rival, ...]
    not_paired: tuple[str, ...] = ()

    @property
    def told(self) -> tuple[Rival, ...]:
        return tuple(one for one in self.rivals if one.is_told)

    @property
    def not_told(self) -> tuple[Rival, ...]:
        return tuple(one for one in self.rivals if not one.is_told)


def rank(cures: Mapping[str, Mapping[int, Reading]]) -> Ranking | None:
    """Compare the cure of the highest mean with every other one; None without cures.

    `cures` has the reading of each seed by the name of the cure.
    """
    cures = {name: by_seed for name, by_seed in cures.items() if by_seed}
    if not cures:
        return None
    best = max(cures, key=lambda name: math.fsum(one.accuracy for one in cures[name].values()) / len(cures[name]))
    leads = {name: difference_of(cures[best], by_seed) for name, by_seed in cures.items() if name != best}
    paired = {name: lead for name, lead in leads.items() if lead is not None}
    adjusted = holm([lead.p for lead in paired.values()])
    rivals = [Rival(name, lead, p) for (name, lead), p in zip(paired.items(), adjusted, strict=True)]
    return Ranking(
        best,
        tuple(sorted(rivals, key=lambda one: one.lead.mean)),
        tuple(name for name, lead in leads.items() if lead is None),
    )


def _table(rows: Sequence[NDArray[np.bool_] | None]) -> NDArray[np.float64] | None:
    """Return the rows as one table (S, N); None if one is missing or they differ in length."""
    present = [row for row in rows if row is not None]
    if len(present) < len(rows) or len({len(row) for row in present}) != 1 or len(present[0]) < 2:
        return None
    return np.array(present, dtype=np.float64)


def _binomial(readings: Sequence[Reading]) -> float:
    """Return the variance of the mean accuracy over draws of the test samples, if all seeds agree on every sample."""
    accuracy = math.fsum(one.accuracy for one in readings) / len(readings)
    return accuracy * (1 - accuracy) / min(one.num_test for one in readings)


def _estimate(
    of_seed_S: NDArray[np.float64], table_SN: NDArray[np.float64] | None, *, num_test: int, largest_variance: float
) -> Estimate:
    """Return the mean with the variance of seeds and samples: V_samples + max(0, V_seeds - V_both).

    Each of V_samples and V_seeds is measured from means over the other, and so contains V_both, the variance of single
    cells. `largest_variance` stands for V_samples if there is no table.
    """
    num_seeds = len(of_seed_S)
    of_samples, of_cells = largest_variance, 0.0
    if table_SN is not None:
        num_cells = table_SN.size
        of_samples = float(table_SN.mean(0).var(ddof=1)) / table_SN.shape[1]
        rest_SN = table_SN - table_SN.mean(0) - table_SN.mean(1, keepdims=True) + table_SN.mean()
        of_cells = float(np.square(rest_SN).sum()) / max((num_seeds - 1) * (table_SN.shape[1] - 1), 1) / num_cells
    of_seeds = float(of_seed_S.var(ddof=1)) / num_seeds if num_seeds > 1 else 0.0
    more = max(0.0, of_seeds - of_cells)
    variance = of_samples + more
    parts = of_seeds**2 / max(num_seeds - 1, 1) + of_samples**2 / max(num_test - 1, 1)
    degrees = variance**2 / parts if parts else float(max(num_test - 1, 1))
    return Estimate(float(of_seed_S.mean()), math.sqrt(variance), degrees, num_seeds)
