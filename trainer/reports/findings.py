"""Turn accuracies into sentences: which encoders differ, by how much, and which questions the numbers leave open.

Accuracies are in [0, 1]. The sentences give them in per cent, and their differences in percentage points.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.probes.features import LabelSpace
from trainer.probes.result import ProbeResult
from trainer.reports.protocols import ProtocolArms, by_protocol, label_titles
from trainer.reports.runs import Arm, Run, datasets_of, labels_of, runs_of_arms

Method = Literal["linear", "knn"]

MOST_NAMED = 12  # configurations, in one sentence
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
        """The larger of two standard errors: from the draw of `num_test` pictures, and from the draw of seeds."""
        sampling = math.sqrt(self.mean * (1 - self.mean) / self.num_test)
        return max(sampling, (self.deviation or 0.0) / math.sqrt(len(self.values)))

    def __str__(self) -> str:
        spread = "" if self.deviation is None else f" ± {100 * self.deviation:.1f}"
        return f"{100 * self.mean:.1f}{spread}"


def score(probes: Sequence[ProbeResult], method: Method) -> Score | None:
    """Return the accuracies of some probes; None without probes."""
    if not probes:
        return None
    values = tuple(probe.linear.accuracy if method == "linear" else probe.knn.accuracy for probe in probes)
    return Score(values, num_test=min(probe.num_test for probe in probes))


def resolution(a: Score, b: Score) -> float:
    """Return two standard errors of the difference. A smaller difference may be chance."""
    return 2 * math.hypot(a.standard_error, b.standard_error)


def baseline(arm: Arm, arms: Sequence[Arm], space: LabelSpace) -> list[ProbeResult]:
    """Return the probes of the arm's untrained encoder, or of the same encoder of another arm on the same data."""
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
    """Return the result in sentences, from linear probes.

    Compares with the untrained encoder, then between arms, and only within one dataset and one probe protocol.
    """
    measured = [group for group in by_protocol(arms) if _measured(group.arms)]
    if not measured:
        return ["No trained encoder has been probed yet, so this report cannot say what was learned."]
    datasets = datasets_of(arms)
    sentences = []
    if len(datasets) > 1:
        names = _join([dataset.name for dataset in datasets])
        sentences.append(
            f"The runs are of {len(datasets)} datasets, {names}; accuracies are compared only within each of them."
        )
    if len(measured) > 1:
        sentences.append(
            f"The runs were probed in {len(measured)} ways; accuracies are compared only within each of them."
        )
    elif measured[0].title:
        sentences.append(f"Accuracies are of a {measured[0].title}.")
    for group in measured:
        title = group.title[:1].upper() + group.title[1:]
        sentences += _verdict_under(group, title if len(measured) > 1 else "")
    return sentences


def _verdict_under(group: ProtocolArms, title: str) -> list[str]:
    datasets = datasets_of(group.arms)
    sentences = []
    for dataset in datasets:
        where = " · ".join(part for part in (title, dataset.name if len(datasets) > 1 else "") if part)
        sentences += [f"{where}: {text}" if where else text for text in _verdict_of_one(dataset.arms)]
    return sentences


def _measured(arms: Sequence[Arm]) -> list[LabelSpace]:
    """Return the labels on which some trained encoder was probed."""
    return [space for space in labels_of(runs_of_arms(arms)) if any(arm.trained(space) for arm in arms)]


def _verdict_of_one(arms: Sequence[Arm]) -> list[str]:
    measured, titles = _measured(arms), label_titles(arms)
    if not measured:
        return ["No trained encoder has been probed yet, so none is compared."]
    sentences = [_against_untrained(arms, space, titles[space]) for space in measured]
    sentences += [text for space in measured if (text := _between(arms, space, titles[space]))]
    missing = [arm.name for arm in arms if not any(arm.trained(space) for space in measured)]
    if missing:
        sentences.append(f"Not probed, and so not compared: {_join(missing)}.")
    return sentences


def _against_untrained(arms: Sequence[Arm], space: LabelSpace, title: str) -> str:
    compared = [
        (arm.name, trained, untrained)
        for arm in arms
        if (trained := score(arm.trained(space), "linear"))
        and (untrained := score(baseline(arm, arms, space), "linear"))
    ]
    if not compared:
        return f"The untrained encoder was not probed on the {title}, so whether training helped is not measured."
    outcomes = [outcome(trained, untrained) for _, trained, untrained in compared]
    if set(outcomes) == {"above"}:
        who = {1: "The trained encoder beats", 2: "Both trained encoders beat"}.get(
            len(compared), f"All {len(compared)} trained encoders beat"
        )
        numbers = _join([f"{name} {trained} % against {untrained} %" for name, trained, untrained in compared])
        return f"{who} the untrained one on the {title}: {numbers}."
    relation = {"above": "is above", "below": "is below", "unresolved": "cannot be told apart from"}
    clauses = [
        f"{name} {relation[found]} the untrained encoder ({trained} % against {untrained} %)"
        for (name, trained, untrained), found in zip(compared, outcomes, strict=True)
    ]
    return f"On the {title}, {_join(clauses)}."


def _between(arms: Sequence[Arm], space: LabelSpace, title: str) -> str:
    """Return a sentence on the best arm and the next; empty if fewer than two were measured."""
    ranked = sorted(
        ((measured, arm.name) for arm in arms if (measured := score(arm.trained(space), "linear"))),
        key=lambda pair: -pair[0].mean,
    )
    if len(ranked) < 2:
        return ""
    (best, best_name), (second, second_name) = ranked[:2]
    numbers = f"{best} % against {second} %"
    if outcome(best, second) == "unresolved":
        return (
            f"On the {title}, {best_name} and {second_name} cannot be told apart: {numbers}, and differences "
            f"below {100 * resolution(best, second):.1f} points are not resolved."
        )
    lead = f"{100 * (best.mean - second.mean):.1f} points"
    return f"On the {title}, {best_name} is ahead of {second_name} by {lead}: {numbers}."


def outcome(a: Score, b: Score) -> Literal["above", "below", "unresolved"]:
    """Compare two scores; "unresolved" if they differ by less than two standard errors."""
    difference = a.mean - b.mean
    if abs(difference) <= resolution(a, b):
        return "unresolved"
    return "above" if difference > 0 else "below"


def winner(arms: Sequence[Arm], space: LabelSpace) -> Arm | None:
    """Return the arm whose linear probe is above every other by more than two standard errors, or None."""
    scores = [(arm, measured) for arm in arms if (measured := score(arm.trained(space), "linear"))]
    for arm, own in scores:
        others = [other for another, other in scores if another is not arm]
        if others and all(outcome(own, other) == "above" for other in others):
            return arm
    return None


def limits(arms: Sequence[Arm]) -> list[str]:
    """Return sentences on the questions that these runs are too small to answer, from the sizes of data and runs."""
    runs = runs_of_arms(arms)
    main = by_protocol(arms)[0].arms
    probes = [probe for arm in main for space in labels_of(runs) for probe in arm.trained(space)]
    notes: list[str] = []
    single = [arm.name for arm in arms if num_seeds(arm) == 1]
    if single:
        which = "every configuration" if len(single) == len(arms) else _join(single)
        if len(single) < len(arms) and len(single) > MOST_NAMED:
            which = f"{len(single)} of {len(arms)} configurations"
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
    notes += [problem for run in runs for problem in run.problems]
    if any(run.provenance.get("git_dirty") for run in runs):
        notes.append("Some of the code was not committed when it ran; the commit alone does not give these numbers.")
    return notes


def samples_of(runs: Sequence[Run]) -> str:
    """Return the word for the samples of these runs: pictures, sounds or samples."""
    sounds = {run.config.data.sample_rate is not None for run in runs}
    return {frozenset({True}): "sounds", frozenset({False}): "pictures"}.get(frozenset(sounds), "samples")


def _join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
