"""Say which label the encoder learns first in a setting, and which it loses, from the online probes of one cure.

The number is the step at which the mean over the seeds first has half of its change from the untrained to the trained
encoder. The accuracies are those of ridge regression, a linear classifier as the probe is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.probes.features import LabelSpace
from trainer.reports.suppression.measured import Setting, StudyRun

_WIDTH = 1.96  # standard errors in half of a 95 % interval


@dataclass(frozen=True)
class Rise:
    """The accuracy of a label over the training, mean over seeds.

    Attributes:
        accuracy: test accuracy in [0, 1] by step, from the untrained encoder on.
        half_at: the step with half of the change; None if chance in the test samples explains the change.
    """

    label: LabelSpace
    accuracy: Mapping[int, float]
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

    cure: that of the runs, which is the first cure of the setting with online probes.
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
        runs = [run for run in setting.runs(difficulty, cure).values() if run.online]
        if runs:
            found = [rise for label in setting.labels if (rise := _rise(runs, label)) is not None]
            found.sort(key=lambda rise: (not rise.gains, rise.loses, rise.half_at or 0))
            return Rises(setting, difficulty, cure, found)
    return None


def _rise(runs: Sequence[StudyRun], label: LabelSpace) -> Rise | None:
    """Return the rise of a label over the steps that all seeds have; None if they share fewer than two."""
    curves = [run.online[label] for run in runs if label in run.online]
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    if len(steps) < 2:
        return None
    mean = {step: statistics.fmean(curve[step] for curve in curves) for step in steps}
    first, last = mean[steps[0]], mean[steps[-1]]
    num_test = sum(run.config.probe.online_num_test for run in runs)
    noise = _WIDTH * math.sqrt((first * (1 - first) + last * (1 - last)) / num_test)
    if abs(last - first) <= noise:
        return Rise(label, mean, None)
    share = {step: (accuracy - first) / (last - first) for step, accuracy in mean.items()}
    return Rise(label, mean, next(step for step in steps if share[step] >= 0.5))
