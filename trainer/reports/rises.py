"""Tell which label an encoder learns first, from the online probes of its training.

The number is the step at which a label first has half of its gain (`trainer.probes.curve.ProbeCurve.half_gain`). It is
given only if `trainer.reports.paired` tells the gain from chance: the best of some noise comes early as well as late.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.probes.curve import Point, ProbeCurve, curve_of, online_labels
from trainer.probes.features import LabelSpace, label_order
from trainer.probes.linear import ProbeConfig
from trainer.probes.result import ProbeResult
from trainer.provenance import RECORDED_NUM_SAMPLES, RECORDED_NUM_TEST_SAMPLES
from trainer.reports.findings import join_some
from trainer.reports.paired import LEVEL, Reading, difference_of
from trainer.reports.protocols import label_titles
from trainer.reports.runs import Arm, Run, join, runs_of_arms
from trainer.reports.tables import Grid


def rise_grid(arms: Sequence[Arm]) -> Grid:
    """Return how soon each label rises: a row for each encoder and label, the first label of an encoder first.

    The first is the one that has half of its gain first by either method; labels without such a step stand last.
    Steps and accuracies are means over the seeds. Without rows if no run has online probes.
    """
    titles, methods = label_titles(arms), {"kNN": "knn", "ridge": "ridge"}
    rows = []
    for arm in arms:
        logged = label_order(space for run in arm.runs for space in online_labels(run.metrics.names))
        of_arm = [(_rises(arm, space, methods.values()), titles.get(space, f"{space} label")) for space in logged]
        of_arm.sort(key=lambda row: min(rise.mean_step for rise in row[0]))
        rows += [[arm.name, title, *(cell for rise in rises for cell in rise.cells())] for rises, title in of_arm]
    head = [part for name in methods for part in (f"{name}, first to last", "half of the gain after")]
    return Grid(["encoder", "accuracy of the", *head], rows)


def rise_notes(arms: Sequence[Arm]) -> list[str]:
    """Return sentences on what the means of `rise_grid` mix: runs that have not ended, and probes of unlike size."""
    probed = [replace(arm, runs=tuple(run for run in arm.runs if online_labels(run.metrics.names))) for arm in arms]
    unended = [f"{run.name} at {run.stands_at}" for run in runs_of_arms(probed) if run.stands_at]
    notes = [f"Not all curves go to the end of a training: {join_some(unended)}."] if unended else []
    for arm in probed:
        seeds: dict[str, list[str]] = {}
        for run in arm.runs:
            seeds.setdefault(_size(run), []).append(str(run.config.seed))
        if len(seeds) > 1:
            sizes = "; ".join(
                f"{size} (seed{'s' if len(of_size) > 1 else ''} {join(of_size)})" for size, of_size in seeds.items()
            )
            notes.append(f"The online probes of {arm.name} differ in size, and the means mix them: {sizes}.")
    return notes


def _size(run: Run) -> str:
    """Return the number of samples that the online probe reads, in words."""
    probe, known = run.config.probe, run.provenance
    num_train = min(probe.online_num_train, known.get(RECORDED_NUM_SAMPLES) or math.inf)
    num_test = min(probe.online_num_test, known.get(RECORDED_NUM_TEST_SAMPLES) or math.inf)
    return f"{num_train:,} train and {num_test:,} test samples"


@dataclass(frozen=True)
class _Rise:
    """The curves of one label by one method, by seed; none if a seed has no such curve.

    num_test: the number of test samples of each seed's online probe.
    """

    curves: Mapping[int, ProbeCurve]
    num_test: Mapping[int, int]
    batch_size: int

    @property
    def is_told(self) -> bool:
        """Return whether the last accuracies are told from the first ones, paired over the seeds."""
        first, last = (
            {seed: Reading(curve.points[place].accuracy, self.num_test[seed]) for seed, curve in self.curves.items()}
            for place in (0, -1)
        )
        change = difference_of(last, first)
        return change is not None and change.p < LEVEL

    @property
    def steps(self) -> list[int]:
        """Return the steps with half of the gain; empty if the gain is not told from chance, or a seed has none."""
        found = [curve.half_gain.step for curve in self.curves.values() if curve.half_gain is not None]
        return found if len(found) == len(self.curves) and self.is_told else []

    @property
    def mean_step(self) -> float:
        return statistics.fmean(self.steps) if self.steps else math.inf

    def cells(self) -> list[str | None]:
        if not self.curves:
            return [None, None]
        first, last = (
            100 * statistics.fmean(curve.points[place].accuracy for curve in self.curves.values()) for place in (0, -1)
        )
        gain = f"{first:.1f} to {last:.1f} %"
        if not self.is_told:
            return [gain, "not told from chance"]
        if not self.steps:
            return [gain, "no gain" if last < first else "no gain in some seeds"]
        spread = f" ± {statistics.stdev(self.steps):,.0f}" if len(self.steps) > 1 else ""
        return [gain, f"{self.mean_step:,.0f}{spread} steps ({self.mean_step * self.batch_size:,.0f} samples)"]


def _accuracies(run: Run, key: str) -> dict[int, float]:
    """Return the logged accuracies by step. Leaves out numbers that are none, as in a line that somebody has edited."""
    return {step: value for step, value in run.logged(key).items() if 0 <= value <= 1}


def _rises(arm: Arm, space: LabelSpace, methods: Iterable[str]) -> list[_Rise]:
    rises = []
    num_test = {
        run.config.seed: online_num_test(
            run.config.probe,
            num_test=run.provenance.get(RECORDED_NUM_TEST_SAMPLES),
            result=run.final_probe(space) or run.untrained_probe(space),
        )
        for run in arm.runs
    }
    for method in methods:
        of_runs = {run.config.seed: _accuracies(run, f"probe/{space}/{method}") for run in arm.runs}
        curves = {
            seed: curve_of(space, "online_knn", [Point(step=step, epoch=0, accuracy=y) for step, y in points.items()])
            for seed, points in of_runs.items()
            if points
        }
        is_whole = len(curves) == len(of_runs)
        rises.append(_Rise(curves if is_whole else {}, num_test, arm.runs[0].config.global_batch_size))
    return rises


def online_num_test(config: ProbeConfig, *, num_test: object, result: ProbeResult | None) -> int:
    """Return the number of test samples with a label that the online probe reads.

    `num_test` is the recorded size of the test set. `result` is a probe of the label on all of it, which counts the
    samples that have the label. If both are known, their share of the drawn samples is taken as their share of all.
    """
    if not isinstance(num_test, int) or num_test < 1:
        return config.online_num_test if result is None else min(config.online_num_test, result.num_test)
    drawn = min(config.online_num_test, num_test)
    return drawn if result is None else max(1, round(drawn * min(1.0, result.num_test / num_test)))
