"""Turn the cells of the benchmark into comparisons: who is best, who is not told from it, and how much each cure keeps.

Accuracies are in [0, 1]; the sentences give them in per cent, and differences in percentage points.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.probes.features import LabelSpace
from trainer.probes.groups import worst_of_equal
from trainer.reports.paired import LEVEL, Estimate, Ranking, Reading, Rival, best_of, holm, leads_over, mean_of, rank
from trainer.reports.suppression.measured import CEILING, Setting, number_of

Mark = Literal["best", "tied", "lower", ""]

KEPT = 0.9  # of a feature, which a cure is asked to keep
LOST = 0.5  # of the hard feature, below which it counts as suppressed


@dataclass(frozen=True)
class Column:
    """The accuracies on one label of a setting at one difficulty.

    of_cure: the mean over seeds of each measured cure.
    not_above_floor: the cures that are not told from the untrained encoder, or are below it; None if that was not
        measured. No correction: each is a question of its own.
    ceiling_is_above: whether the encoder that is trained with the label is told to be above the untrained one; None if
        one of them was not measured. Where features are correlated, it need not be: the easy feature predicts the hard
        label in the train set, and training with the label can take that one.
    is_learnable: whether that encoder or, after Holm's correction, a cure is told to be above the untrained one; None
        as before. If not, the label says nothing about cures: it is too hard for this encoder in these steps, or random
        weights read it.
    """

    setting: Setting
    difficulty: str
    label: LabelSpace
    of_cure: Mapping[str, Estimate]
    ranking: Ranking | None
    untrained: Estimate | None
    pixels: Estimate | None
    ceiling: Estimate | None
    chance: float | None
    not_above_floor: tuple[str, ...] | None
    ceiling_is_above: bool | None
    is_learnable: bool | None

    @property
    def is_read_untrained(self) -> bool:
        """Return whether the untrained encoder reads more than half of the label, counted from chance."""
        if self.untrained is None or self.chance is None:
            return False
        return self.untrained.mean - self.chance > LOST * (1 - self.chance)

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """Return the means of the cures, and those of what they are compared with."""
        others = (self.ceiling, self.untrained, self.pixels)
        return (*self.of_cure.values(), *(one for one in others if one is not None))

    @property
    def num_seeds(self) -> int:
        """Return the most seeds that a cure has."""
        return max((one.num_seeds for one in self.of_cure.values()), default=0)

    def mark(self, cure: str) -> Mark:
        """Return whether a cure is the best, not told from the best, or told to be lower; "" if not compared."""
        if self.ranking is None or len(self.of_cure) < 2:
            return ""
        if cure == self.ranking.best:
            return "best"
        rival = next((one for one in self.ranking.rivals if one.name == cure), None)
        return "" if rival is None else "lower" if rival.is_told else "tied"


def column_of(setting: Setting, difficulty: str, label: LabelSpace) -> Column:
    readings = {cure: setting.readings(difficulty, cure, label) for cure in setting.cures}
    readings = {cure: of_cure for cure, of_cure in readings.items() if of_cure}
    untrained, ceiling = setting.untrained(difficulty, label), setting.ceiling(difficulty, label)
    pixels = setting.pixels(difficulty, label)
    leads = leads_over(untrained, {**readings, CEILING: ceiling})
    learned = leads.pop(CEILING, None)
    ceiling_is_above = None if learned is None else _is_told_above(learned)
    return Column(
        setting=setting,
        difficulty=difficulty,
        label=label,
        of_cure={cure: mean_of(list(of_cure.values())) for cure, of_cure in readings.items()},
        ranking=rank(readings),
        untrained=mean_of(list(untrained.values())) if untrained else None,
        pixels=mean_of(list(pixels.values())) if pixels else None,
        ceiling=mean_of(list(ceiling.values())) if ceiling else None,
        chance=setting.chance(difficulty, label),
        not_above_floor=tuple(cure for cure, lead in leads.items() if not _is_told_above(lead)) if untrained else None,
        ceiling_is_above=ceiling_is_above,
        is_learnable=ceiling_is_above or _one_is_told_above(leads.values()) if ceiling_is_above is not None else None,
    )


def _is_told_above(lead: Estimate) -> bool:
    return lead.mean > 0 and lead.p < LEVEL


def _one_is_told_above(leads: Iterable[Estimate]) -> bool:
    """Return whether the best of some leads is told to be positive, after Holm's correction over all of them."""
    found = list(leads)
    return any(lead.mean > 0 and p < LEVEL for lead, p in zip(found, holm([lead.p for lead in found]), strict=True))


def sentence(column: Column) -> str:
    """Return a sentence on who is best on a label at a difficulty, by how much, and who is not told from it."""
    setting = column.setting
    what = f"On the {setting.title(column.label)}{setting.at(column.difficulty)}"
    ranking = column.ranking
    if ranking is None:
        return f"{what}: not measured."
    if column.is_learnable is False:
        assert column.ceiling is not None
        why = "The label may be too hard for this encoder in these steps, and says nothing about cures."
        if column.is_read_untrained:
            why = "That one reads most of the label already, so the label says nothing about cures."
        nobody = f"neither the ceiling ({shown(column.ceiling)} %) nor a cure is told to be above the untrained encoder"
        return f"{what}: {nobody}. {why}"
    return f"{what}: {_comparison(column, ranking)}{_of_few_seeds(ranking)}{_of_a_low_ceiling(column)}"


def _of_few_seeds(ranking: Ranking) -> str:
    """Return a sentence if the best shares a single seed with another cure; else nothing."""
    num_single = sum(rival.lead.num_seeds == 1 for rival in ranking.rivals)
    if not num_single:
        return ""
    if num_single == len(ranking.rivals):
        return " With one seed."
    return f" {num_single} of {len(ranking.rivals)} of these comparisons have one seed."


def _of_a_low_ceiling(column: Column) -> str:
    """Return a sentence on a ceiling that is not above the untrained encoder, although a cure is; else nothing."""
    if column.ceiling is None or column.ceiling_is_above is not False:
        return ""
    told = f" The ceiling ({shown(column.ceiling)} %) is not told to be above the untrained encoder"
    is_correlated = column.setting.unit == "correlation" and bool(number_of(column.difficulty))
    if is_correlated and column.label in column.setting.hard:
        return f"{told}: in the correlated train set, the easy feature predicts the label too."
    return f"{told}."


def _comparison(column: Column, ranking: Ranking) -> str:
    best = f"{ranking.best} ({shown(column.of_cure[ranking.best])} %)"
    alone = joined(ranking.not_paired)
    not_compared = f" Not compared with it, because they share no seed: {alone}." if alone else ""
    means = [one.mean for one in column.of_cure.values()]
    is_first = "has the highest mean" if column.of_cure[ranking.best].mean == max(means) else "is first on shared seeds"
    if not ranking.rivals:
        return f"{best} {is_first}.{not_compared}" if alone else f"only {best} is measured."
    if not ranking.told:
        closest = ranking.rivals[0]
        return (
            f"{best} {is_first}, and no other cure is told from it. The next is {closest.name}, "
            f"{_distance(closest)}.{not_compared}"
        )
    next_told = ranking.told[0]
    lead = f"{points(next_told.lead.mean)} ± {points(next_told.lead.half_width)} points"
    if not ranking.not_told:
        every = "every other cure that shares a seed with it" if alone else "every other cure"
        return f"{best} is ahead of {every}: of {next_told.name}, the next, by {lead}.{not_compared}"
    names = joined(
        [
            f"{rival.name} ({points(rival.lead.mean) if rival.lead.mean >= 0 else _distance(rival)})"
            for rival in ranking.not_told
        ]
    )
    return (
        f"{best} is ahead of {len(ranking.told)} of {len(ranking.rivals)} cures: of "
        f"{next_told.name}, the closest of these, by {lead}. Not told from it: {names}.{not_compared}"
    )


def _distance(rival: Rival) -> str:
    """Return how far a rival is behind the best; cures of different seeds may be ahead of it where they share some."""
    if rival.lead.mean >= 0:
        return f"{points(rival.lead.mean)} points behind"
    return f"{points(-rival.lead.mean)} points ahead on shared seeds"


def above_chance(accuracy: float, chance: float | None) -> float:
    return accuracy - (chance or 0.0)


def kept_of_hard(setting: Setting, difficulty: str, cure: str, label: LabelSpace) -> float | None:
    """Return the accuracy above chance as a share of the best cure's at the easiest difficulty, on shared seeds.

    None if it is not measured, or if no cure reads the label at the easiest difficulty. The share is not that of the
    same cure, because a cure that never reads the label would keep all of it.
    """
    easiest = {one: found for one in setting.cures if (found := setting.readings(setting.easiest, one, label))}
    return _share(
        setting.readings(difficulty, cure, label),
        easiest[best_of(easiest)] if easiest else {},
        chances=(setting.chance(difficulty, label), setting.chance(setting.easiest, label)),
    )


def _share(
    here: Mapping[int, Reading], reference: Mapping[int, Reading], *, chances: tuple[float | None, float | None]
) -> float | None:
    """Return the accuracy above the first chance as a share of the reference above the second, on shared seeds.

    None if they share no seed, or if the reference is less than two of its intervals above chance.
    """
    shared = sorted(here.keys() & reference.keys())
    if not shared:
        return None
    of_reference = mean_of([reference[seed] for seed in shared])
    whole = above_chance(of_reference.mean, chances[1])
    if whole <= 2 * of_reference.half_width:
        return None
    return above_chance(mean_of([here[seed] for seed in shared]).mean, chances[0]) / whole


def kept_of_easy(column: Column, cure: str) -> float | None:
    """Return the accuracy above chance as a share of the ceiling's, or without one of the best cure's: `_share`."""
    if cure not in column.of_cure or column.ranking is None:
        return None
    setting, at = column.setting, column.difficulty
    here = setting.readings(at, cure, column.label)
    reference = setting.ceiling(at, column.label) or setting.readings(at, column.ranking.best, column.label)
    return _share(here, reference, chances=(column.chance, column.chance))


@dataclass(frozen=True)
class WorstGroup:
    """The mean over seeds of the accuracy in the worst group, and which group that is.

    of_equal: the mean over seeds of that accuracy if all groups were equally hard: `worst_of_equal` over all pairs;
        None if a single group counts in a run.
    usual: the classes and the number of test samples of the group that is the worst in more than half of the seeds;
        None if there is none.
    """

    accuracy: float
    of_equal: float | None
    usual: tuple[str, int] | None


def worst_group(setting: Setting, difficulty: str, cure: str, label: LabelSpace) -> WorstGroup | None:
    """Return the worst group of a label paired with any other label of the setting; None if none was large enough."""
    found, of_equal = [], []
    for run in setting.runs(difficulty, cure).values():
        pairs = [
            groups
            for groups in (run.trained[label].groups if label in run.trained else ())
            if set(groups.labels) <= set(setting.labels) and "linear" in groups.worst
        ]
        if pairs:
            found.append(min((groups.worst["linear"] for groups in pairs), key=lambda one: one.accuracy))
            of_equal.append(worst_of_equal(pairs, "linear"))
    if not found:
        return None
    ((usual, count),) = Counter((one.name, one.num_test) for one in found).most_common(1)
    expected = [each for each in of_equal if each is not None]
    return WorstGroup(
        statistics.fmean(one.accuracy for one in found),
        statistics.fmean(expected) if len(expected) == len(found) else None,
        usual if 2 * count > len(found) else None,
    )


def halving(difficulties: Sequence[float], accuracies: Sequence[float], *, chance: float) -> float | None:
    """Return the difficulty at which the accuracy above chance falls to half of the first, between points linearly.

    None if it does not fall so far.

    Examples:
        >>> round(halving([0, 10, 20], [0.9, 0.7, 0.1], chance=0.1), 1)
        13.3
    """
    half = (accuracies[0] - chance) / 2
    above = [accuracy - chance for accuracy in accuracies]
    for number in range(1, len(above)):
        if above[number] <= half < above[number - 1]:
            share = (above[number - 1] - half) / (above[number - 1] - above[number])
            return difficulties[number - 1] + share * (difficulties[number] - difficulties[number - 1])
    return None


def joined(names: Sequence[str]) -> str:
    """Return names in a list, with semicolons if a name holds a comma."""
    return ("; " if any("," in name for name in names) else ", ").join(names)


def points(value: float) -> str:
    """Return a difference of accuracies in percentage points."""
    return f"{100 * value:.1f}".replace("-", "−")


def shown(estimate: Estimate) -> str:
    """Return an accuracy in per cent with half of its 95 % interval."""
    if not math.isfinite(estimate.half_width):
        return f"{100 * estimate.mean:.1f}"
    return f"{100 * estimate.mean:.1f} ± {100 * min(estimate.half_width, 1.0):.1f}"
