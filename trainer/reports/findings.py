"""Turn accuracies into sentences: which encoders differ, by how much, and which questions the numbers leave open.

Accuracies are in [0, 1]. The sentences give them in per cent, and their differences in percentage points.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import special

from trainer.probes.features import LabelSpace
from trainer.probes.result import ProbeResult
from trainer.provenance import RECORDED_NUM_SAMPLES, facts_of_starts
from trainer.reports.protocols import by_protocol, label_titles
from trainer.reports.runs import Arm, Run, datasets_of, join, labels_of, runs_of_arms

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

    def error_beside(self, other: Score) -> tuple[float, float]:
        """Return the standard error for a comparison with another score, and its degrees of freedom.

        The error is the larger of two: from the draw of `num_test` pictures, with infinite degrees, and from the draw
        of seeds, with a degree less than seeds. One seed does not show how far seeds scatter, so the other score's
        deviation then counts for both.
        """
        sampling = math.sqrt(self.mean * (1 - self.mean) / self.num_test)
        scattered = other if self.deviation is None else self
        of_seeds = (scattered.deviation or 0.0) / math.sqrt(len(self.values))
        return (sampling, math.inf) if sampling >= of_seeds else (of_seeds, len(scattered.values) - 1)

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
    """Return two standard errors of the difference, by which the directions of studies are told."""
    return 2 * math.hypot(a.error_beside(b)[0], b.error_beside(a)[0])


def least_difference(a: Score, b: Score) -> float:
    """Return the difference below which two scores may be equal: `resolution`, or more with few seeds.

    Two or three seeds say little about their scatter. So the factor is the 97.5 % quantile of Student's t, with the
    degrees of freedom of Welch (1947), if that is above two.
    """
    (of_a, degrees_a), (of_b, degrees_b) = a.error_beside(b), b.error_beside(a)
    error = math.hypot(of_a, of_b)
    parts = of_a**4 / degrees_a + of_b**4 / degrees_b
    factor = float(special.stdtrit(error**4 / parts, 0.975)) if parts else 2.0
    return max(2.0, factor) * error


def untrained_like(arm: Arm) -> tuple[str, ...]:
    """Return what decides the result of an arm's untrained encoder, beside its seed.

    A probe that is fitted on views gets those of the run's own policy.
    """
    first = arm.runs[0]
    views = first.config.views.model_dump_json() if first.protocol.views == "policy" else ""
    return first.config.encoder.model_dump_json(), views, *first.data_key


def untrained_arms(arms: Sequence[Arm], space: LabelSpace) -> dict[tuple[str, ...], Arm]:
    """Return the first arm in which each untrained encoder was probed, by `untrained_like`."""
    found: dict[tuple[str, ...], Arm] = {}
    for arm in arms:
        if arm.untrained(space):
            found.setdefault(untrained_like(arm), arm)
    return found


def baseline_arm(arm: Arm, arms: Sequence[Arm], space: LabelSpace) -> Arm | None:
    """Return the arm itself if its untrained encoder was probed, else another one whose untrained encoder is the same.

    Returns None if there is none.
    """
    return arm if arm.untrained(space) else untrained_arms(arms, space).get(untrained_like(arm))


def baseline(arm: Arm, arms: Sequence[Arm], space: LabelSpace) -> list[ProbeResult]:
    """Return the probes of the untrained encoder of `baseline_arm`; none if there is none."""
    found = baseline_arm(arm, arms, space)
    return [] if found is None else found.untrained(space)


def num_seeds(arm: Arm) -> dict[LabelSpace, int]:
    """Return the number of seeds with results of the trained encoder, for each label that has any."""
    found = {space: len(arm.trained_seeds(space)) for space in labels_of(arm.runs)}
    return {space: num for space, num in found.items() if num}


def probed_steps(arms: Sequence[Arm]) -> list[str]:
    """Return a sentence on the probed steps, if one is not of the end of a training, or if they differ."""
    probed = [arm for arm in arms if arm.probed_at]
    runs = [run for run in runs_of_arms(probed) if run.probed_step is not None]
    early = [arm for arm in probed if not all(run.is_probed_at_end for run in arm.runs if run.probed_step is not None)]
    if not early and len({run.probed_step for run in runs}) < 2:
        return []
    named = [f"{arm.name} at {arm.probed_at}" for arm in early or probed]
    said = "Not all probes are of the end of a training" if early else "The probes are of different steps"
    return [f"{said}: {join_some(named)}."]


def join_some(names: Sequence[str]) -> str:
    """Return the first names and the number of those that are left out, in words."""
    left = len(names) - MOST_NAMED
    return join([*names[:MOST_NAMED], f"{left} more"] if left > 0 else names)


def verdict(arms: Sequence[Arm]) -> list[str]:
    """Return the result in sentences, from linear probes.

    Compares with the untrained encoder, then between arms, and only within one dataset and one probe protocol.
    """
    return say_of_each(arms, _verdict_of_one)


def say_of_each(arms: Sequence[Arm], say: Callable[[Sequence[Arm]], list[str]]) -> list[str]:
    """Return the sentences of `say` on each protocol and dataset, after those on how many of both there are.

    A dataset without results is named only under the first protocol.
    """
    measured = [group for group in by_protocol(arms) if measured_labels(group.arms)]
    if not measured:
        return ["No trained encoder has been probed yet, so this report cannot say what was learned."]
    datasets = datasets_of(arms)
    sentences = []
    if len(datasets) > 1:
        names = join([dataset.name for dataset in datasets])
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
        title = group.title[:1].upper() + group.title[1:] if len(measured) > 1 else ""
        for dataset in datasets_of(group.arms):
            where = " · ".join(part for part in (title, dataset.name if len(datasets) > 1 else "") if part)
            if group is measured[0] or measured_labels(dataset.arms):
                sentences += [f"{where}: {text}" if where else text for text in say(dataset.arms)]
    return sentences


def measured_labels(arms: Sequence[Arm]) -> list[LabelSpace]:
    """Return the labels on which some trained encoder was probed."""
    return [space for space in labels_of(runs_of_arms(arms)) if any(arm.trained(space) for arm in arms)]


def _verdict_of_one(arms: Sequence[Arm]) -> list[str]:
    measured, titles = measured_labels(arms), label_titles(arms)
    if not measured:
        return ["No trained encoder has been probed yet, so none is compared."]
    sentences = [_against_untrained(arms, space, titles[space]) for space in measured]
    sentences += [text for space in measured if (text := _between(arms, space, titles[space]))]
    missing = [arm.name for arm in arms if not any(arm.trained(space) for space in measured)]
    if missing:
        sentences.append(f"Not probed, and so not compared: {join(missing)}.")
    return sentences + probed_steps(arms)


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
        numbers = join([f"{name} {trained} % against {untrained} %" for name, trained, untrained in compared])
        return f"{who} the untrained one on the {title}: {numbers}."
    relation = {"above": "is above", "below": "is below", "unresolved": "cannot be told apart from"}
    clauses = [
        f"{name} {relation[found]} the untrained encoder ({trained} % against {untrained} %)"
        for (name, trained, untrained), found in zip(compared, outcomes, strict=True)
    ]
    return f"On the {title}, {join(clauses)}."


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
            f"below {100 * least_difference(best, second):.1f} points are not resolved."
        )
    lead = f"{100 * (best.mean - second.mean):.1f} points"
    return f"On the {title}, {best_name} is ahead of {second_name} by {lead}: {numbers}."


def outcome(a: Score, b: Score) -> Literal["above", "below", "unresolved"]:
    """Compare two scores; "unresolved" if they differ by `least_difference` or less."""
    difference = a.mean - b.mean
    if abs(difference) <= least_difference(a, b):
        return "unresolved"
    return "above" if difference > 0 else "below"


def winner(arms: Sequence[Arm], space: LabelSpace) -> Arm | None:
    """Return the arm whose linear probe is above every other by more than `least_difference`, or None."""
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
    single = _of_one_seed(main)
    if single:
        which = "every configuration" if single == [arm.name for arm in main] else join(single)
        if len(single) < len(arms) and len(single) > MOST_NAMED:
            which = f"{len(single)} of {len(arms)} configurations"
        notes.append(
            f"One seed of {which}: how much a result varies from seed to seed is not measured, so a difference "
            f"that the test {samples_of(runs)} resolve may still be chance."
        )
    if few := _of_one_untrained_seed(main):
        notes.append(
            f"One seed of the untrained encoder of {join_some(few)}: it is assumed to scatter as the trained one does. "
            "`python -m trainer.probe --step 0` probes the other seeds."
        )
    for num in sorted({num for arm in main for num in num_seeds(arm).values()} - {1}):
        notes.append(f"{num} seeds: ± is their sample standard deviation, itself uncertain for so few.")
    if probes:
        num_test = min(probe.num_test for probe in probes)
        notes.append(
            f"{num_test:,} test {samples_of(runs)}: an accuracy near 50 % is known to "
            f"± {200 * math.sqrt(0.25 / num_test):.1f} points (two standard errors)."
        )
        notes += _share_of_published(runs, max(probe.num_train for probe in probes))
    notes += [problem for run in runs for problem in run.problems]
    if any(start.get("git_diff_sha256") for run in runs for start in facts_of_starts(run.provenance)):
        notes.append("Some of the code was not committed when it ran; the commit alone does not give these numbers.")
    return notes


def _of_one_seed(arms: Sequence[Arm]) -> list[str]:
    """Return the names of the arms with results of one seed, with the labels if other labels have more seeds."""
    titles = label_titles(arms)
    names = []
    for arm in arms:
        seeds = num_seeds(arm)
        single = [titles[space] for space, num in seeds.items() if num == 1]
        if len(single) == len(seeds) and (seeds or len(arm.runs) == 1):
            names.append(arm.name)
        elif single:
            names.append(f"{arm.name} on the {join(single)}")
    return names


def _of_one_untrained_seed(arms: Sequence[Arm]) -> list[str]:
    """Return the names of the arms with several trained seeds on a label, and an untrained encoder of one seed."""
    untrained = {space: untrained_arms(arms, space) for space in labels_of(runs_of_arms(arms))}

    def has_one(arm: Arm, space: LabelSpace) -> bool:
        found = arm if arm.untrained(space) else untrained[space].get(untrained_like(arm))
        return found is not None and len(found.untrained(space)) == 1

    return [arm.name for arm in arms if any(num > 1 and has_one(arm, space) for space, num in num_seeds(arm).items())]


def _share_of_published(runs: Sequence[Run], num_labelled: int) -> list[str]:
    """Return a sentence if the longest training saw less than the published ones.

    A training that has not ended counts up to its last logged step. The size of the train set is in provenance.json. If
    it is not, `num_labelled` counts, the samples with a label.
    """
    known = all(isinstance(run.provenance.get(RECORDED_NUM_SAMPLES), int) for run in runs)
    sizes = [run.provenance[RECORDED_NUM_SAMPLES] if known else num_labelled for run in runs]
    trained = [(size, _num_epochs(run, size)) for run, size in zip(runs, sizes, strict=True)]
    num_train, epochs = max(trained, key=lambda size: size[0] * size[1])
    share = num_train * epochs / (PUBLISHED_PICTURES * PUBLISHED_EPOCHS)
    if share >= 1:
        return []
    epochs_text = f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"
    return [
        f"{num_train:,} {'' if known else 'labelled '}train {samples_of(runs)} for {epochs_text} epochs are "
        f"{100 * share:.2g} % of what the published runs on pictures saw ({PUBLISHED_PICTURES:,} for "
        f"{PUBLISHED_EPOCHS} epochs): compare signs, not levels."
    ]


def _num_epochs(run: Run, num_train: int) -> float:
    """Return the epochs that a run has trained, from its last step if it has not ended."""
    if "finished_step" in run.provenance:
        return run.config.num_epochs
    step = max([run.metrics.last_step or 0, *run.probes])
    return min(run.config.num_epochs, step * run.config.global_batch_size / num_train)


def samples_of(runs: Sequence[Run]) -> str:
    """Return the word for the samples of these runs: pictures, sounds or samples."""
    sounds = {run.config.data.sample_rate is not None for run in runs}
    return {frozenset({True}): "sounds", frozenset({False}): "pictures"}.get(frozenset(sounds), "samples")
