"""From accuracies to sentences: what was compared, by how much it differs, and what the numbers cannot tell.

Accuracies are in [0, 1]; texts give them in per cent and their differences in percentage points.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.probes.features import LABEL_SPACES, LabelSpace
from trainer.probes.result import ProbeResult
from trainer.reporting.runs import Arm, Run, datasets_of

Method = Literal["linear", "knn"]

PUBLISHED_PICTURES, PUBLISHED_EPOCHS = 50_000, 200  # Tamkin et al. 2022, image experiments


@dataclass(frozen=True)
class Score:
    """Accuracies of one arm, one for each seed, on `num_test` pictures."""

    values: tuple[float, ...]
    num_test: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over seeds (divisor n - 1); None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def standard_error(self) -> float:
        """The larger of two: that of drawing `num_test` test pictures, and that of drawing the seeds."""
        sampling = math.sqrt(self.mean * (1 - self.mean) / self.num_test)
        return max(sampling, (self.deviation or 0.0) / math.sqrt(len(self.values)))

    def __str__(self) -> str:
        spread = "" if self.deviation is None else f" ± {100 * self.deviation:.1f}"
        return f"{100 * self.mean:.1f}{spread}"


def score(probes: Sequence[ProbeResult], method: Method) -> Score | None:
    """The accuracies of some probes; None where there are none."""
    if not probes:
        return None
    values = tuple(probe.linear.accuracy if method == "linear" else probe.knn.accuracy for probe in probes)
    return Score(values, num_test=min(probe.num_test for probe in probes))


def resolution(a: Score, b: Score) -> float:
    """Differences smaller than this are not told from chance: two standard errors of the difference."""
    return 2 * math.hypot(a.standard_error, b.standard_error)


def baseline(arm: Arm, arms: Sequence[Arm], space: LabelSpace) -> list[ProbeResult]:
    """Probes of the untrained encoder: the arm's own, else those of an arm with the same encoder on the same data."""
    first = arm.runs[0]
    same_encoder = [
        other
        for other in arms
        if other.runs[0].config.encoder == first.config.encoder and other.runs[0].data_key == first.data_key
    ]
    return next((probes for other in [arm, *same_encoder] if (probes := other.untrained(space))), [])


def num_seeds(arm: Arm) -> int:
    return len({run.config.seed for run in arm.runs})


def verdict(arms: Sequence[Arm]) -> list[str]:
    """The result in sentences, from linear probes: against the untrained encoder, then between arms of one dataset."""
    datasets = datasets_of(arms)
    if len(datasets) == 1:
        return _verdict_of_one(arms)
    return [
        f"The runs are of {len(datasets)} datasets, {_join([dataset.name for dataset in datasets])}; accuracies are "
        "compared within each alone.",
        *(f"{dataset.name}: {sentence}" for dataset in datasets for sentence in _verdict_of_one(dataset.arms)),
    ]


def _verdict_of_one(arms: Sequence[Arm]) -> list[str]:
    measured = [space for space in LABEL_SPACES if any(arm.trained(space) for arm in arms)]
    if not measured:
        return ["No trained encoder has been probed yet, so this report cannot say what was learned."]
    sentences = [_against_untrained(arms, space) for space in measured]
    sentences += [text for space in measured if (text := _between(arms, space))]
    missing = [arm.name for arm in arms if not any(arm.trained(space) for space in measured)]
    if missing:
        sentences.append(f"Not probed, and so not compared: {_join(missing)}.")
    return sentences


def _against_untrained(arms: Sequence[Arm], space: LabelSpace) -> str:
    compared = [
        (arm.name, trained, untrained)
        for arm in arms
        if (trained := score(arm.trained(space), "linear"))
        and (untrained := score(baseline(arm, arms, space), "linear"))
    ]
    if not compared:
        return f"The untrained encoder was not probed on label_{space}, so whether training helped is not measured."
    outcomes = [_outcome(trained, untrained) for _, trained, untrained in compared]
    if set(outcomes) == {"above"}:
        who = {1: "The trained encoder beats", 2: "Both trained encoders beat"}.get(
            len(compared), f"All {len(compared)} trained encoders beat"
        )
        numbers = _join([f"{name} {trained} % against {untrained} %" for name, trained, untrained in compared])
        return f"{who} the untrained one on label_{space}: {numbers}."
    relation = {"above": "is above", "below": "is below", "unresolved": "cannot be told apart from"}
    clauses = [
        f"{name} {relation[outcome]} the untrained encoder ({trained} % against {untrained} %)"
        for (name, trained, untrained), outcome in zip(compared, outcomes, strict=True)
    ]
    return f"On label_{space}, {_join(clauses)}."


def _between(arms: Sequence[Arm], space: LabelSpace) -> str:
    """How the best arm differs from the next; empty where fewer than two were measured."""
    ranked = sorted(
        ((measured, arm.name) for arm in arms if (measured := score(arm.trained(space), "linear"))),
        key=lambda pair: -pair[0].mean,
    )
    if len(ranked) < 2:
        return ""
    (best, best_name), (second, second_name) = ranked[:2]
    numbers = f"{best} % against {second} %"
    if _outcome(best, second) == "unresolved":
        return (
            f"On label_{space}, {best_name} and {second_name} cannot be told apart: {numbers}, and differences "
            f"below {100 * resolution(best, second):.1f} points are not resolved."
        )
    lead = f"{100 * (best.mean - second.mean):.1f} points"
    return f"On label_{space}, {best_name} is ahead of {second_name} by {lead}: {numbers}."


def _outcome(a: Score, b: Score) -> Literal["above", "below", "unresolved"]:
    difference = a.mean - b.mean
    if abs(difference) <= resolution(a, b):
        return "unresolved"
    return "above" if difference > 0 else "below"


def limits(arms: Sequence[Arm]) -> list[str]:
    """What the numbers are too small to show, from the sizes of what was run."""
    runs = [run for arm in arms for run in arm.runs]
    probes = [probe for arm in arms for space in LABEL_SPACES for probe in arm.trained(space)]
    notes: list[str] = []
    single = [arm.name for arm in arms if num_seeds(arm) == 1]
    if single:
        which = "every configuration" if len(single) == len(arms) else _join(single)
        notes.append(
            f"One seed of {which}: how much a result varies from seed to seed is not measured, so a difference "
            "that the test pictures resolve may still be chance."
        )
    for num in sorted({num_seeds(arm) for arm in arms} - {1}):
        notes.append(f"{num} seeds: ± is their sample standard deviation, itself uncertain for so few.")
    if probes:
        num_test = min(probe.num_test for probe in probes)
        notes.append(
            f"{num_test:,} test {samples_of(runs)}: an accuracy near 50 % is known to "
            f"± {200 * math.sqrt(0.25 / num_test):.1f} points (two standard errors)."
        )
        num_train = max(probe.num_train for probe in probes)
        epochs = max(run.config.num_epochs for run in runs)
        share = num_train * epochs / (PUBLISHED_PICTURES * PUBLISHED_EPOCHS)
        if share < 1:
            notes.append(
                f"{num_train:,} train {samples_of(runs)} for {epochs} epochs are {100 * share:.2g} % of what the "
                f"published runs on pictures saw ({PUBLISHED_PICTURES:,} for {PUBLISHED_EPOCHS} epochs): compare "
                "signs, not levels."
            )
        if len({probe.probe_config for probe in probes}) > 1:
            notes.append("The probes were not trained with the same settings, so part of a difference may be theirs.")
    if any(run.provenance.get("git_dirty") for run in runs):
        notes.append("Some of the code was not committed when it ran; the commit alone does not give these numbers.")
    return notes


def samples_of(runs: Sequence[Run]) -> str:
    """What the samples of these runs are."""
    sounds = {run.config.data.sample_rate is not None for run in runs}
    return {frozenset({True}): "sounds", frozenset({False}): "pictures"}.get(frozenset(sounds), "samples")


def _join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
