"""Say which label the encoder learns first in a setting, and which it loses, from the online probes of one cure.

The number is the step at which the mean over the seeds first has half of its change from the untrained to the trained
encoder. The accuracies come from ridge regression, which is a linear classifier like the probe.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.probes.curve import Point, half_of_change
from trainer.probes.features import LabelSpace
from trainer.reports.paired import LEVEL, Reading, difference_of
from trainer.reports.suppression.measured import Setting, StudyRun


@dataclass(frozen=True)
class Rise:
    """The accuracy of a label over the training, mean over seeds.

    Attributes:
        accuracy: test accuracy in [0, 1] by step, from the untrained encoder on.
        is_whole: whether the curve ends at the probed checkpoint; true if no checkpoint was probed.
        half_at: the step with half of the change; None if `trainer.reports.paired` does not tell it from chance.
    """

    label: LabelSpace
    accuracy: Mapping[int, float]
    is_whole: bool
    half_at: int | None

    @property
    def gains(self) -> bool:
        return self.half_at is not None and self.last > self.first

    @property
    def loses(self) -> bool:
        return self.half_at is not None and self.last < self.first

    @property
    def first(self) -> float:
        return self.accuracy[min(self.accuracy)]

    @property
    def last(self) -> float:
        return self.accuracy[max(self.accuracy)]


@dataclass(frozen=True)
class Rises:
    """The rises of the labels of a setting at one difficulty: the first to gain first, those that lose last.

    cure: the first cure of the setting with online probes; its runs are shown.
    """

    setting: Setting
    difficulty: str
    cure: str
    rises: Sequence[Rise]

    def of_kind(self, *, is_hard: bool) -> list[Rise]:
        """Return the rises of the hard labels, or of the easy ones."""
        return [rise for rise in self.rises if (rise.label in self.setting.hard) == is_hard]

    @property
    def easy_first(self) -> bool:
        """Return whether an easy label gains, before every hard one that gains."""
        easy, hard = (
            [rise.half_at or 0 for rise in self.of_kind(is_hard=is_hard) if rise.gains] for is_hard in (False, True)
        )
        return bool(easy) and min(easy) < min(hard, default=math.inf)

    @property
    def loses_hard(self) -> bool:
        """Return whether a hard label loses."""
        return any(rise.loses for rise in self.of_kind(is_hard=True))


def rises_of(setting: Setting, difficulty: str) -> Rises | None:
    """Return the rises of the labels of a setting; None if no run at this difficulty has online probes."""
    for cure in setting.cures:
        runs = {seed: run for seed, run in setting.runs(difficulty, cure).items() if run.online}
        if runs:
            found = [rise for label in setting.labels if (rise := _rise(runs, label)) is not None]
            found.sort(key=lambda rise: (not rise.gains, rise.loses, rise.half_at or 0))
            return Rises(setting, difficulty, cure, found)
    return None


def _rise(runs: Mapping[int, StudyRun], label: LabelSpace) -> Rise | None:
    """Return the rise of a label over the steps that all seeds have; None if they share fewer than two."""
    curves = {seed: run.online[label] for seed, run in runs.items() if label in run.online}
    steps = sorted(set.intersection(*(set(curve) for curve in curves.values()))) if curves else []
    if len(steps) < 2:
        return None
    points = [
        Point(step=step, epoch=0, accuracy=statistics.fmean(curve[step] for curve in curves.values())) for step in steps
    ]
    first, last = (
        {seed: Reading(curve[steps[place]], runs[seed].online_num_test(label)) for seed, curve in curves.items()}
        for place in (0, -1)
    )
    change = difference_of(last, first)
    is_told = change is not None and change.p < LEVEL
    return Rise(
        label,
        {point.step: point.accuracy for point in points},
        is_whole=all(
            runs[seed].trained[label].checkpoint_step == steps[-1] for seed in curves if label in runs[seed].trained
        ),
        half_at=half_of_change(points).step if is_told else None,
    )
