"""Ask whether monitors without labels order the cures as the probes of labels do.

A monitor that sees suppression puts a cure that keeps the hard feature above one that loses it, on the same data. So
cures are compared within a difficulty, and only then put together: another difficulty changes accuracies and monitors
of all cures.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy import stats

from trainer.analyses.monitors import Monitors
from trainer.probes.features import LabelSpace
from trainer.reports.suppression.measured import Setting, StudyRun

MONITORS: Final = {"rank_me": "RankMe", "lidar": "LiDAR", "alpha": "alpha-ReQ"}
_SPACE: Final = "pooled"  # the features that the probes read
_LEAST_CURES: Final = 5  # at a difficulty


@dataclass(frozen=True)
class Correlation:
    """A rank correlation over cures, with its p-value."""

    value: float
    p: float
    num_cures: int


def monitors_of(setting: Setting, difficulty: str, cure: str) -> list[Monitors]:
    """Return the monitors of the pooled features, one for each seed that has them."""
    return [found for run in setting.runs(difficulty, cure).values() if (found := _monitors(run)) is not None]


def _monitors(run: StudyRun) -> Monitors | None:
    return None if run.monitors is None else run.monitors.spaces.get(_SPACE)


def monitored_difficulty(setting: Setting) -> str | None:
    """Return the middle difficulty, or else the hardest, at which some cures have monitors; None if there is none."""
    for difficulty in (setting.middle, *reversed(setting.difficulties)):
        if sum(bool(monitors_of(setting, difficulty, cure)) for cure in setting.cures) >= _LEAST_CURES:
            return difficulty
    return None


def monitor_correlation(setting: Setting, monitor: str, label: LabelSpace) -> Correlation | None:
    """Return the rank correlation of a monitor with the accuracy over the cures, within each difficulty.

    Cures are means over seeds, and are ranked within their difficulty. Of alpha-ReQ, the nearness to 1 is ranked. A
    cure has nearly the same rank at each difficulty, so it counts once in the p-value. Difficulties with fewer than
    five cures are left out; None if all are, or if all cures have one rank.
    """
    ranks: tuple[list[float], list[float]] = ([], [])
    measured: set[str] = set()
    for difficulty in setting.difficulties:
        means = {cure: _means(setting, difficulty, cure, monitor, label) for cure in setting.cures}
        pairs = {cure: pair for cure, pair in means.items() if pair is not None}
        if len(pairs) < _LEAST_CURES:
            continue
        measured |= pairs.keys()
        for of_all, values in zip(ranks, zip(*pairs.values(), strict=True), strict=True):
            of_all += list((stats.rankdata(values) - (len(pairs) + 1) / 2) / len(pairs))
    seen_N, accuracy_N = np.array(ranks)
    if not seen_N.any() or not accuracy_N.any():
        return None
    value = float(seen_N @ accuracy_N / math.sqrt((seen_N @ seen_N) * (accuracy_N @ accuracy_N)))
    freedom = len(measured) - 2
    t = value * math.sqrt(freedom / max(1 - value**2, 1e-12))
    return Correlation(value, float(2 * stats.t.sf(abs(t), freedom)), len(measured))


def _means(setting: Setting, difficulty: str, cure: str, monitor: str, label: LabelSpace) -> tuple[float, float] | None:
    """Return a monitor and an accuracy of a cure, means over the seeds that have both; None if there are none."""
    pairs = []
    for run in setting.runs(difficulty, cure).values():
        seen = getattr(_monitors(run), monitor, None)
        if seen is not None and label in run.trained:
            pairs.append((-abs(seen - 1) if monitor == "alpha" else seen, run.trained[label].linear.accuracy))
    if not pairs:
        return None
    seen_values, accuracies = zip(*pairs, strict=True)
    return statistics.fmean(seen_values), statistics.fmean(accuracies)
