"""Tell differences between encoders from chance, by paired differences over seeds and over test samples.

Two encoders that were trained with the same seeds and tested on the same samples share the luck of both. So their
accuracies are compared seed by seed and sample by sample. The mean of a table of seeds and samples varies with both.
The two variances are those of a crossed analysis of variance (Searle, Casella and McCulloch 1992, chapter 4), the
degrees of freedom after Satterthwaite (1946). Two or three seeds say little about their scatter, so cures that are
compared together lend each other degrees of freedom (Smyth 2004), no more than all of them have. Of all pairs of cures,
Holm (1979) keeps the chance of any false difference below the level.

Shapes: S seeds, N test samples. Accuracies are in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import special

LEVEL = 0.05  # the chance of a false difference; intervals hold 1 - LEVEL
_MOST_DEGREES = 1e4  # of a prior


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
        return self.error * float(special.stdtrit(self.degrees, 1 - LEVEL / 2)) if self.error else 0.0

    @property
    def p(self) -> float:
        """The two-sided probability of a mean at least as far from 0, if the true mean is 0."""
        if not self.error:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * special.stdtr(self.degrees, -abs(self.mean) / self.error))


def mean_of(readings: Sequence[Reading]) -> Estimate:
    """Return the mean accuracy of runs that differ in their seed, at least one.

    Its error counts four more samples, two right and two wrong (Agresti and Coull 1998). Without them, the error of an
    encoder that gets all samples right would be 0.
    """
    found = _variances(
        np.array([one.accuracy for one in readings]),
        _table([one.right_N for one in readings]),
        num_test=min(one.num_test for one in readings),
        largest=_binomial(readings),
    )
    number = found.num_test
    squares = found.samples * number * (number - 1) + 1 + 4 * number / (number + 4) * (found.mean - 0.5) ** 2
    return replace(found, samples=squares / ((number + 3) * (number + 4))).estimate()


def difference_of(a: Mapping[int, Reading], b: Mapping[int, Reading]) -> Estimate | None:
    """Return accuracy of `a` minus that of `b`, paired over the seeds that both have; None if they share none.

    Without the single samples of both, the error of the samples is that of two unpaired test sets, which is larger.
    """
    found = _difference(a, b)
    return None if found is None else found.estimate()


def _difference(a: Mapping[int, Reading], b: Mapping[int, Reading]) -> _Variances | None:
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None
    of_a, of_b = [a[seed] for seed in seeds], [b[seed] for seed in seeds]
    right_a, right_b = _table([one.right_N for one in of_a]), _table([one.right_N for one in of_b])
    is_paired = right_a is not None and right_b is not None and right_a.shape == right_b.shape
    return _variances(
        np.array([one.accuracy - other.accuracy for one, other in zip(of_a, of_b, strict=True)]),
        right_a - right_b if is_paired else None,  # type: ignore[operator]  # neither is None
        num_test=min(one.num_test for one in [*of_a, *of_b]),
        largest=_binomial(of_a) + _binomial(of_b),
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
    """A cure that is not the best: the lead of the best over it, and its p-value after Holm's correction.

    The lead can be below 0 only if the cures do not have the same seeds.
    """

    name: str
    lead: Estimate
    p: float

    @property
    def is_told(self) -> bool:
        """Return whether the best is told to be above it."""
        return self.lead.mean > 0 and self.p < LEVEL


@dataclass(frozen=True)
class Ranking:
    """The best cure (`best_of`), and the others that share a seed with it by rising lead of the best."""

    best: str
    rivals: tuple[Rival, ...]

    @property
    def told(self) -> tuple[Rival, ...]:
        return tuple(one for one in self.rivals if one.is_told)

    @property
    def not_told(self) -> tuple[Rival, ...]:
        return tuple(one for one in self.rivals if not one.is_told)


def best_of(cures: Mapping[str, Mapping[int, Reading]]) -> str:
    """Return the cure that is not behind the most others, on the seeds that it shares with each of them.

    If all have the same seeds, this is the cure of the highest mean. Means over different seeds are not compared, as
    long as seeds are shared: a seed can be lucky for every cure. `cures` has a reading or more for each name.
    """

    def lead(a: str, b: str) -> float | None:
        shared = sorted(cures[a].keys() & cures[b].keys())
        differences = [cures[a][seed].accuracy - cures[b][seed].accuracy for seed in shared]
        return math.fsum(differences) / len(shared) if shared else None

    def order(name: str) -> tuple[int, float, float]:
        leads = [one for other in cures if other != name and (one := lead(name, other)) is not None]
        mean = math.fsum(one.accuracy for one in cures[name].values()) / len(cures[name])
        return sum(one >= 0 for one in leads), min(leads, default=0.0), mean

    return max(cures, key=order)


def rank(cures: Mapping[str, Mapping[int, Reading]]) -> Ranking | None:
    """Compare the best cure with every other one; None without cures.

    `cures` has the reading of each seed by the name of the cure. Holm's correction is over all pairs of cures, because
    the best is chosen after its accuracy: among equal cures one is always ahead of the rest.
    """
    cures = {name: by_seed for name, by_seed in cures.items() if by_seed}
    if not cures:
        return None
    best = best_of(cures)
    order = [best, *(name for name in cures if name != best)]
    leads = _leads({name: cures[name] for name in order})
    adjusted = dict(zip(leads, holm([lead.p for lead in leads.values()]), strict=True))
    rivals = [Rival(b, lead, adjusted[a, b]) for (a, b), lead in leads.items() if a == best]
    return Ranking(best, tuple(sorted(rivals, key=lambda one: one.lead.mean)))


def leads_over(base: Mapping[int, Reading], others: Mapping[str, Mapping[int, Reading]]) -> dict[str, Estimate]:
    """Return the lead of each of `others` over `base`, by name; those that share no seed with it are left out.

    The seeds of all pairs, not only of those with `base`, lend each other degrees of freedom: what all leads share, the
    luck of `base`, would otherwise count once for each.
    """
    leads = _leads({**others, None: base})
    return {name: leads[name, None] for name in others if (name, None) in leads}


_Name = TypeVar("_Name")


def _leads(readings: Mapping[_Name, Mapping[int, Reading]]) -> dict[tuple[_Name, _Name], Estimate]:
    """Return the lead of the first over the second, of all pairs in the order of `readings` that share a seed."""
    pairs = combinations(readings, 2)
    found = {(a, b): one for a, b in pairs if (one := _difference(readings[a], readings[b])) is not None}
    # K names have K (K - 1) / 2 pairs, but only K - 1 differences that do not follow from the others.
    share_of_own = 2 / max(len(readings), 2)
    prior = _prior([one for one in found.values() if one.num_seeds > 1], share_of_own=share_of_own)
    return {pair: one.estimate(prior) for pair, one in found.items()}


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


@dataclass(frozen=True)
class _Variances:
    """A mean over seeds and samples, and the variances of this mean that can be measured.

    samples: over draws of the samples, from the means over seeds. It contains `cells`.
    seeds: over draws of the seeds, from the means over samples. It contains `cells`. 0 for one seed.
    cells: over draws of single cells of the table, beyond samples and seeds. 0 if there is no table.
    """

    mean: float
    samples: float
    seeds: float
    cells: float
    num_seeds: int
    num_test: int

    def estimate(self, prior: _Prior | None = None) -> Estimate:
        """Return the mean with the variance samples + max(0, seeds - cells).

        `prior` lends degrees of freedom to the scatter of the seeds. For one seed, it is all that is known of it.
        """
        seeds, degrees = self.seeds, float(self.num_seeds - 1)
        if prior is not None:
            of_seed, degrees = prior.shrunk(seeds * self.num_seeds, degrees)
            seeds = of_seed / self.num_seeds
        variance = self.samples + max(0.0, seeds - self.cells)
        parts = seeds**2 / max(degrees, 1.0) + self.samples**2 / max(self.num_test - 1, 1)
        total = variance**2 / parts if parts else float(max(self.num_test - 1, 1))
        return Estimate(self.mean, math.sqrt(variance), total, self.num_seeds)


def _variances(
    of_seed_S: NDArray[np.float64], table_SN: NDArray[np.float64] | None, *, num_test: int, largest: float
) -> _Variances:
    """Return the variances of a mean; `largest` stands for that of the samples if there is no table."""
    num_seeds = len(of_seed_S)
    samples, cells = largest, 0.0
    if table_SN is not None:
        samples = float(table_SN.mean(0).var(ddof=1)) / table_SN.shape[1]
        rest_SN = table_SN - table_SN.mean(0) - table_SN.mean(1, keepdims=True) + table_SN.mean()
        degrees = max((num_seeds - 1) * (table_SN.shape[1] - 1), 1)
        cells = float(np.square(rest_SN).sum()) / degrees / table_SN.size
    seeds = float(of_seed_S.var(ddof=1)) / num_seeds if num_seeds > 1 else 0.0
    return _Variances(float(of_seed_S.mean()), samples, seeds, cells, num_seeds, num_test)


@dataclass(frozen=True)
class _Prior:
    """The variance of one seed that is usual among estimates, and how many degrees of freedom it is worth.

    `most_degrees` is what all seeds have together.
    """

    variance: float
    degrees: float
    most_degrees: float

    def shrunk(self, variance: float, degrees: float) -> tuple[float, float]:
        """Return a variance of one seed with the help of the prior, and its degrees of freedom.

        They are not more than those of all seeds together, as in Smyth's package limma.
        """
        total = self.degrees + degrees
        return (self.degrees * self.variance + degrees * variance) / total, min(total, self.most_degrees)


def _prior(pairs: Sequence[_Variances], *, share_of_own: float = 1.0) -> _Prior | None:
    """Return the prior of the variances of one seed, after Smyth (2004), section 6.2; None for fewer than three pairs.

    The more alike the variances are, the more the prior counts. `share_of_own` is the share of the degrees of freedom
    of all pairs that do not follow from those of others.
    """
    from scipy import optimize  # here, because every report imports this module, and few need this

    variance_P = np.array([one.seeds * one.num_seeds for one in pairs])
    if len(pairs) < 3 or not variance_P.any():
        return None
    half_P = np.array([one.num_seeds - 1 for one in pairs]) / 2
    variance_P = np.maximum(variance_P, 1e-3 * np.median(variance_P[variance_P > 0]))
    log_P = np.log(variance_P) - special.digamma(half_P) + np.log(half_P)
    excess = float(log_P.var(ddof=1) - special.polygamma(1, half_P).mean())
    half = _MOST_DEGREES / 2
    if excess > special.polygamma(1, half):
        half = optimize.brentq(lambda value: special.polygamma(1, value) - excess, 1e-3, half)
    variance = math.exp(log_P.mean() + special.digamma(half) - math.log(half))
    return _Prior(variance, 2 * half, share_of_own * 2 * float(half_P.sum()))
