"""Say which label the encoder learns first in a setting, from the online probes of one cure.

The number is the step at which the mean over the seeds first has half of its gain, as in
`trainer.probes.curve.ProbeCurve.half_gain`. The accuracies are those of ridge regression, a linear classifier as the
probe is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.probes.curve import Point, curve_of
from trainer.probes.features import LabelSpace
from trainer.reports.suppression.measured import Setting, StudyRun

_WIDTH = 1.96  # standard errors in half of a 95 % interval


@dataclass(frozen=True)
class Rise:
    """The accuracy of a label over the training, mean over seeds.

    Attributes:
        accuracy: test accuracy in [0, 1] by step, from the untrained encoder on.
        half_at: the step with half of the gain; None if the gain is not more than chance in the test samples.
    """

    label: LabelSpace
    accuracy: Mapping[int, float]
    half_at: int | None

    @property
    def first(self) -> float:
        return self.accuracy[min(self.accuracy)]

    @property
    def last(self) -> float:
        return self.accuracy[max(self.accuracy)]


@dataclass(frozen=True)
class Rises:
    """The rises of the labels of a setting at one difficulty, the first to rise first.

    cure: that of the runs, which is the first cure of the setting with online probes.
    """

    setting: Setting
    difficulty: str
    cure: str
    rises: Sequence[Rise]

    @property
    def easy_first(self) -> bool | None:
        """Return whether every easy label rises before every hard one that rises; None if no easy one rises."""
        easy, hard = (
            [rise.half_at for rise in self.rises if (rise.label in self.setting.hard) == is_hard]
            for is_hard in (False, True)
        )
        if any(one is None for one in easy):
            return None
        return max((one for one in easy if one is not None), default=0) < min(
            (one for one in hard if one is not None), default=math.inf
        )


def rises_of(setting: Setting, difficulty: str) -> Rises | None:
    """Return the rises of the labels of a setting; None if no run at this difficulty has online probes."""
    for cure in setting.cures:
        runs = [run for run in setting.runs(difficulty, cure).values() if run.online]
        if runs:
            found = [rise for label in setting.labels if (rise := _rise(runs, label)) is not None]
            found.sort(key=lambda rise: math.inf if rise.half_at is None else rise.half_at)
            return Rises(setting, difficulty, cure, found)
    return None


def _rise(runs: Sequence[StudyRun], label: LabelSpace) -> Rise | None:
    """Return the rise of a label over the steps that all seeds have; None if they share fewer than two."""
    curves = [run.online[label] for run in runs if label in run.online]
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    if len(steps) < 2:
        return None
    mean = {step: statistics.fmean(curve[step] for curve in curves) for step in steps}
    points = [Point(step=step, epoch=0, accuracy=accuracy) for step, accuracy in mean.items()]
    half = curve_of(label, "online_ridge", points).half_gain
    first, last = points[0].accuracy, points[-1].accuracy
    num_test = sum(run.config.probe.online_num_test for run in runs)
    noise = _WIDTH * math.sqrt((first * (1 - first) + last * (1 - last)) / num_test)
    return Rise(label, mean, half.step if half is not None and last - first > noise else None)
