"""The page of the benchmark: what it shows, in which order, and in which words."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.probes.features import LabelSpace
from trainer.reports.paired import LEVEL, Estimate, mean_of
from trainer.reports.protocols import describe_protocol
from trainer.reports.suppression.blocks import Block, Cell, Picture, Row, Section, Table, Text, text
from trainer.reports.suppression.changes import changes_of_cures
from trainer.reports.suppression.figures import draw_rises, draw_setting
from trainer.reports.suppression.measured import Benchmark, Gaps, Setting
from trainer.reports.suppression.monitored import (
    MONITORS,
    Correlation,
    monitor_correlation,
    monitored_difficulty,
    monitors_of,
)
from trainer.reports.suppression.published import BITS, CHANCE, PUBLISHED, SOURCE, is_randbit, repeated
from trainer.reports.suppression.rises import Rise, Rises, rises_of
from trainer.reports.suppression.verdicts import (
    KEPT,
    LOST,
    Column,
    WorstGroup,
    column_of,
    halving,
    joined,
    kept_of_easy,
    kept_of_hard,
    sentence,
    shown,
    worst_group,
)

NONE = "–"  # in a cell without a number
MOST_NAMED = 12  # run directories in one command; for more, it takes all runs
_CHANGES = "What each cure changes"
_FEW_SEEDS = (
    " In brackets: fewer seeds than the column has. Cures are compared on the seeds that both have, so the best need "
    "not have the highest mean. ± of one seed does not hold the scatter of seeds, so it can be narrower than that of "
    "several."
)
_LEVEL = f"{100 * LEVEL:g} %"


@dataclass(frozen=True)
class Page:
    """The page: its title and its sections, the first of which has no title."""

    title: str
    sections: Sequence[Section]


def make_page(benchmark: Benchmark, *, study: str, paths: Sequence[Path]) -> Page:
    """Return the page of a study, such as "suppression_small", from the run directories `paths`."""
    columns = {
        setting.name: {
            (label, difficulty): column_of(setting, difficulty, label)
            for label in setting.labels
            for difficulty in setting.difficulties
        }
        for setting in benchmark.settings
    }
    middle = [column for of_setting in columns.values() for column in _at_middle(of_setting)]
    order = sorted(benchmark.cures, key=lambda cure: -_mean_lead(middle, cure))
    sections = [
        Section("", _introduction(benchmark)),
        Section("Every setting, every cure", _overview(columns, benchmark.settings, order)),
        *(Section(one.name, _of_setting(one, columns[one.name], order)) for one in benchmark.settings),
    ]
    sections.append(Section(_CHANGES, [_changes(benchmark.settings, order)]))
    sections.append(Section("Which feature rises first?", _rises(benchmark)))
    sections += [Section("Does a monitor without labels see it?", _monitors(benchmark, order))]
    sections += [
        Section(f"{setting.name} beside the published table", _published(setting))
        for setting in benchmark.settings
        if is_randbit(setting)
    ]
    sections.append(Section("What is missing", _missing(benchmark.gaps, study=study, paths=paths)))
    return Page("Feature suppression: settings and cures", sections)


def _introduction(benchmark: Benchmark) -> list[Block]:
    num_seeds = {
        sum(label in run.trained for run in runs.values())
        for setting in benchmark.settings
        for runs in setting.cells.values()
        for label in setting.labels
    }
    num_probed = sum(len(runs) for setting in benchmark.settings for runs in setting.cells.values())
    num_lacking = len({path for paths in benchmark.gaps.without_label.values() for path in paths})
    partly = f" ({num_lacking} more on some of their labels only)" if num_lacking else ""
    protocol = "" if benchmark.protocol is None else f" The probe: {describe_protocol(benchmark.protocol)}."
    return [
        text(
            "A sample shows two features, an easy one and a hard one, and each has a label. An encoder that is trained "
            "without labels can tell samples apart by the easy feature alone. Then it does not learn the hard one: the "
            "easy feature suppresses it. A linear classifier on the frozen encoder, the probe, reads each label; its "
            "test accuracy says how much of the feature the encoder kept."
        ),
        text(
            "A setting is a dataset with such features, at several difficulties: the more difficult, the stronger the "
            "easy feature. A cure is a way to train that is meant to keep the hard feature. What a cure changes, "
            f'besides what its name says, is in the table "{_CHANGES}".'
        ),
        Text(
            [
                "chance: one over the number of classes that the samples have.",
                "untrained: the probe on random weights. An encoder that is not told to be above it may have learned "
                "nothing about the label.",
                "raw pixels: the probe without an encoder.",
                "ceiling: the same encoder, trained with the label in the same steps. It is no upper bound: it can "
                "learn a few samples by heart, or take a correlated easy feature for the label, and then a cure may be "
                "above it.",
                "± is half of a 95 % interval over seeds and test samples.",
                "Two cures are told apart if the difference of their accuracies, paired over seeds and test "
                f"samples, is not chance at a level of {_LEVEL}, after Holm's correction over all pairs of cures. "
                "The rest is not told apart: more seeds or samples may do it.",
            ],
            "list",
        ),
        text(
            f"{num_probed - num_lacking} of {benchmark.num_runs} runs are measured{partly}, with "
            f"{_seeds(benchmark.settings)}.{protocol}"
            + (" With one seed, intervals and comparisons hold for this seed only." if 1 in num_seeds else "")
        ),
    ]


def _changes(settings: Sequence[Setting], order: Sequence[str]) -> Block:
    """Return a table of the settings of each cure, as its runs were trained with them."""
    found = changes_of_cures(settings)
    if found is None:
        return text("Fewer than two cures are measured, so there is nothing to compare.")
    plainest, changes = found
    rows = [
        Row(
            cure,
            [
                Cell(", ".join(changes[cure].everywhere) or NONE),
                Cell(", ".join(changes[cure].elsewhere) or NONE),
            ],
        )
        for cure in order
        if cure in changes
    ]
    return Table(
        ["cure", f"settings that differ from {plainest}", "and others, by setting"],
        rows,
        caption=f"From the configs of the runs. {plainest} is the cure with the fewest differences from the others"
        f"{_losses_of(plainest, settings)}. Of another kind of loss, view or encoder, only the settings that are not "
        "its defaults.",
    )


def _losses_of(cure: str, settings: Sequence[Setting]) -> str:
    """Return ", and trains with the loss KIND" for the runs of a cure; "" if there are none."""
    kinds = {
        run.config.objective.kind
        for setting in settings
        for (_, name), runs in setting.cells.items()
        if name == cure
        for run in runs.values()
    }
    return f", and trains with objective.kind={' or '.join(sorted(kinds))}" if kinds else ""


def _seeds(settings: Sequence[Setting]) -> str:
    """Return the seeds of the settings in words, and which setting has which if they differ."""
    names: dict[tuple[int, ...], list[str]] = {}
    for setting in settings:
        names.setdefault(setting.seeds, []).append(setting.name)
    parts = []
    for seeds, of_seeds in sorted(names.items(), key=lambda item: -len(item[0])):
        words = f"the seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        parts.append(words if len(names) == 1 else f"{words} ({', '.join(of_seeds)})")
    return " and ".join(parts)


Columns = Mapping[str, Mapping[tuple[LabelSpace, str], Column]]


def _overview(columns: Columns, settings: Sequence[Setting], cures: Sequence[str]) -> list[Block]:
    """Return the big table, in two parts: cures by hard labels and by easy labels, each at its middle difficulty."""
    blocks: list[Block] = []
    for kind in ("hard", "easy"):
        shown_columns = [
            columns[setting.name][label, setting.middle]
            for setting in settings
            for label in setting.labels
            if (label in setting.hard) == (kind == "hard")
        ]
        measured = [cure for cure in cures if any(cure in one.of_cure for one in shown_columns)]
        head = [
            f"{one.setting.name}{one.setting.at(one.difficulty)}: {one.setting.title(one.label)}"
            for one in shown_columns
        ]
        blocks.append(
            Table(
                [f"{kind} label, %", *head],
                [
                    *(Row(cure, [_accuracy(one, cure) for one in shown_columns]) for cure in measured),
                    *_references(shown_columns),
                ],
            )
        )
    hard = [column for of_setting in columns.values() for column in _at_middle(of_setting)]
    at_middle = [columns[one.name][label, one.middle] for one in settings for label in one.labels]
    has_few = any(_few_seeds(one, each) for one in at_middle for each in one.estimates)
    blocks.append(
        text(
            "Linear probe, test accuracy in %, mean over seeds, each setting at its middle difficulty. Bold: the "
            f"{'best' if has_few else 'highest mean'}. ≈: not told from it. ○: not told to be above the untrained "
            "encoder. Rows by how far a cure is above the mean of all cures, on average over the hard labels."
            + (_FEW_SEEDS if has_few else "")
        )
    )
    if hard:
        blocks += [
            text("On the hard labels:"),
            Text([f"{one.setting.name}. {sentence(one)}" for one in hard], "list"),
            text(_often_best([one for one in hard if one.is_learnable is not False])),
        ]
    return blocks


def _at_middle(columns: Mapping[tuple[LabelSpace, str], Column]) -> list[Column]:
    """Return the measured columns of the hard labels of a setting at its middle difficulty."""
    return [
        column
        for (label, difficulty), column in columns.items()
        if label in column.setting.hard and difficulty == column.setting.middle and column.of_cure
    ]


def _mean_lead(columns: Sequence[Column], cure: str) -> float:
    """Return the mean over columns of the accuracy less the mean accuracy of all cures; -1 if it is not measured.

    Leaves out labels that say nothing about cures.
    """
    leads = [
        one.of_cure[cure].mean - statistics.fmean(other.mean for other in one.of_cure.values())
        for one in columns
        if cure in one.of_cure and one.is_learnable is not False
    ]
    return statistics.fmean(leads) if leads else -1.0


def _often_best(columns: Sequence[Column]) -> str:
    """Return how often each cure is the best or not told from the best, of the columns in which it is measured."""
    counts: dict[str, tuple[int, int]] = {}
    for column in columns:
        for cure in column.of_cure:
            best, total = counts.get(cure, (0, 0))
            counts[cure] = (best + (column.mark(cure) in ("best", "tied")), total + 1)
    ranked = sorted((cure for cure in counts if counts[cure][0]), key=lambda cure: -counts[cure][0])
    often = joined([f"{cure} ({counts[cure][0]} of {counts[cure][1]})" for cure in ranked])
    return f"Best on a hard label, or not told from the best: {often or 'none'}."


def _accuracy(column: Column, cure: str) -> Cell:
    if cure not in column.of_cure:
        return Cell("" if cure not in column.setting.cures else NONE)
    is_floor = column.not_above_floor is not None and cure in column.not_above_floor
    estimate = column.of_cure[cure]
    return Cell(shown(estimate) + _few_seeds(column, estimate), column.mark(cure), is_floor)


def _few_seeds(column: Column, estimate: Estimate) -> str:
    """Return how many seeds an estimate has, if a cure of the column has more; else nothing."""
    return f" ({estimate.num_seeds} of {column.num_seeds} seeds)" if estimate.num_seeds < column.num_seeds else ""


def _references(columns: Sequence[Column]) -> list[Row]:
    def row(title: str, values: Sequence[Estimate | None]) -> Row:
        cells = [
            Cell(NONE if one is None else shown(one) + _few_seeds(column, one))
            for column, one in zip(columns, values, strict=True)
        ]
        return Row(title, cells, is_reference=True)

    chances = [Cell(NONE if one.chance is None else f"{100 * one.chance:.1f}") for one in columns]
    return [
        row("ceiling", [one.ceiling for one in columns]),
        row("untrained", [one.untrained for one in columns]),
        *([row("raw pixels", [one.pixels for one in columns])] if any(one.pixels for one in columns) else []),
        Row("chance", chances, is_reference=True),
    ]


def _of_setting(
    setting: Setting, columns: Mapping[tuple[LabelSpace, str], Column], order: Sequence[str]
) -> list[Block]:
    cures = [cure for cure in order if cure in setting.cures]
    hard, easy = (" and ".join(map(setting.title, labels)) for labels in (setting.hard, setting.easy))
    ends = [setting.with_unit(one) for one in (setting.easiest, setting.difficulties[-1])]
    name = re.sub(r"[^a-z0-9]+", "_", setting.name.casefold()).strip("_") or "setting"
    title = setting.name if setting.has_one else f"{setting.name}: accuracy over the difficulty"
    blocks: list[Block] = [
        text(f"Hard: {hard}. Easy: {easy}." + ("" if setting.has_one else f" From {ends[0]} to {ends[1]}.")),
        Picture(name, title, draw_setting(setting, columns, cures=order)),
    ]
    compared = [columns[label, at] for label in setting.labels for at in setting.difficulties]
    blocks.append(Text([sentence(one) for one in compared if one.of_cure or one.label in setting.hard], "list"))
    blocks += _kept(setting, columns, cures)
    if len(setting.labels) > 1 and (groups := _worst_groups(setting, cures)) is not None:
        blocks.append(groups)
    return blocks


def _kept(setting: Setting, columns: Mapping[tuple[LabelSpace, str], Column], cures: Sequence[str]) -> list[Block]:
    """Return a table of the shares that each cure keeps of both features, and who keeps both."""
    harder = setting.difficulties[1:]
    if not harder:
        return []
    shares: dict[tuple[str, LabelSpace, str], float | None] = {}
    for cure in cures:
        for at in harder:
            for label in setting.labels:
                shares[cure, label, at] = (
                    kept_of_hard(setting, at, cure, label)
                    if label in setting.hard
                    else kept_of_easy(columns[label, at], cure)
                )
    if all(share is None for share in shares.values()):
        return []
    head = [f"{setting.title(label)}{setting.at(at)}" for label in setting.labels for at in harder]
    rows = [Row(cure, [_share(shares[cure, label, at]) for label in setting.labels for at in harder]) for cure in cures]
    table = Table(
        ["kept, %", *head],
        rows,
        caption="Accuracy above chance, on the seeds that both have. Of the hard feature, as a share of that of the "
        f"best cure at {setting.with_unit(setting.easiest)}; of the easy feature, as a share of the ceiling, or of the "
        f"best cure if there is no ceiling. Bold: at least {100 * KEPT:.0f} %.",
    )
    return [table, Text([_who_keeps_both(setting, shares, at) for at in harder], "list")]


def _share(share: float | None) -> Cell:
    if share is None:
        return Cell(NONE)
    return Cell(f"{100 * share:.0f}".replace("-", "−"), "best" if share >= KEPT else "")


def _who_keeps_both(
    setting: Setting, shares: Mapping[tuple[str, LabelSpace, str], float | None], difficulty: str
) -> str:
    """Return a sentence on the cures of which a hard label is measured; shares that are None count for nothing."""

    def least_kept(cure: str, labels: Sequence[LabelSpace]) -> float | None:
        return min((one for label in labels if (one := shares[cure, label, difficulty]) is not None), default=None)

    where = setting.with_unit(difficulty)
    of_hard = {cure: share for cure in setting.cures if (share := least_kept(cure, setting.hard)) is not None}
    if not of_hard:
        return f"At {where}: not measured."
    lost = [cure for cure, share in of_hard.items() if share < LOST]
    both = [
        cure
        for cure, share in of_hard.items()
        if share >= KEPT and (of_easy := least_kept(cure, setting.easy)) is not None and of_easy >= KEPT
    ]
    told = f"At {where}, {len(lost)} of {len(of_hard)} cures lose more than half of the hard feature"
    least = f"at least {100 * KEPT:.0f} % of both features"
    if not both:
        return f"{told}; none keeps {least}."
    return f"{told}; {joined(both)} keep{'s' if len(both) == 1 else ''} {least}."


def _worst_groups(setting: Setting, cures: Sequence[str]) -> Table | None:
    at = setting.middle
    found = {(cure, label): worst_group(setting, at, cure, label) for cure in cures for label in setting.labels}
    if not any(found.values()):
        return None
    rows = []
    for cure in cures:
        cells = []
        for label in setting.labels:
            worst = found[cure, label]
            cells.append(Cell(NONE if worst is None else _worst(worst)))
        rows.append(Row(cure, cells))
    return Table(
        [f"worst group{setting.at(at)}", *(f"{setting.title(label)}, %" for label in setting.labels)],
        rows,
        caption="Test accuracy in the worst group, mean over seeds. A group is a class of one label with a class of "
        "another; in brackets the group that is the worst in more than half of the seeds (the first of several), and "
        "its number of test samples. The worst of many groups is low by chance alone: expected is what it would be if "
        "all groups were equally hard (the median). An accuracy near it says nothing of this group.",
    )


def _worst(worst: WorstGroup) -> str:
    expected = "the only one that counts" if worst.of_equal is None else f"expected {100 * worst.of_equal:.1f}"
    group = "differs between seeds" if worst.usual is None else f"{worst.usual[0]}, {worst.usual[1]} samples"
    return f"{100 * worst.accuracy:.1f}, {expected} ({group})"


def _rises(benchmark: Benchmark) -> list[Block]:
    """Return which label rises first: at every difficulty as numbers, at the hardest one as a picture."""
    found = [
        rises
        for setting in benchmark.settings
        for difficulty in setting.difficulties
        if (rises := rises_of(setting, difficulty)) is not None and rises.rises
    ]
    if not found:
        return [text("No run has online probes (probe.online_every_steps), so this is not measured.")]
    cures = joined(list(dict.fromkeys(one.cure for one in found)))
    first, lost = sum(one.easy_first for one in found), sum(one.loses_hard for one in found)
    blocks: list[Block] = [
        text(
            f"The online probe reads the features during the training of {cures}, by ridge regression on some samples. "
            "It begins with the untrained encoder, from which some labels can be read already. Training can make them "
            "worse. Ridge regression is fitted exactly, so it reads more than the probe does in its epochs, above all "
            "from random weights. A dot in the picture is half of the change."
        ),
        text(
            f"Of {len(found)} settings and difficulties, an easy label gains first in {first}, and a hard label is "
            f"read worse after the training than before it in {lost}."
        ),
    ]
    if at_hardest := [one for one in found if one.difficulty == one.setting.difficulties[-1]]:
        title = f"Accuracy of each label over the training of {cures}, at the hardest difficulty"
        blocks.append(Picture("rises", title, draw_rises(at_hardest)))
    blocks.append(
        Table(
            ["setting", "label", "untrained, %", "trained, %", "change"],
            [_rise_row(one, rise) for one in found for rise in one.rises],
            caption="Mean over seeds. The first to gain stands first. None: a change that is not told from chance."
            + (
                ""
                if all(rise.is_whole for one in found for rise in one.rises)
                else " With a step: the last that was read."
            ),
        )
    )
    return blocks


def _rise_row(rises: Rises, rise: Rise) -> Row:
    setting = rises.setting
    cells = [
        setting.title_and_kind(rise.label),
        f"{100 * rise.first:.1f}",
        f"{100 * rise.last:.1f}" + ("" if rise.is_whole else f" (step {max(rise.accuracy)})"),
        "none"
        if rise.half_at is None
        else f"half of the {'gain' if rise.gains else 'loss'} after {rise.half_at} steps",
    ]
    return Row(f"{setting.name}{setting.at(rises.difficulty)}", [Cell(cell) for cell in cells])


def _monitors(benchmark: Benchmark, order: Sequence[str]) -> list[Block]:
    at = {one.name: difficulty for one in benchmark.settings if (difficulty := monitored_difficulty(one)) is not None}
    settings = [setting for setting in benchmark.settings if setting.name in at]
    if not settings:
        return [
            text(
                "RankMe, LiDAR and alpha-ReQ judge features without labels. They are measured for no cure of these "
                "runs, or for too few; the command is at the end of the page."
            )
        ]
    found = {
        (setting.name, label, monitor): monitor_correlation(setting, monitor, label)
        for setting in settings
        for label in setting.labels
        for monitor in MONITORS
    }
    ranges = []
    for monitor, title in MONITORS.items():
        of_hard = [found[setting.name, label, monitor] for setting in settings for label in setting.hard]
        values = [one.value for one in of_hard if one is not None]
        ranges += [f"of {title} {_signed(min(values))} to {_signed(max(values))}"] if values else []
    blocks: list[Block] = [
        text(
            "RankMe, LiDAR and alpha-ReQ judge features without labels, by the dimensions that they fill. They see "
            "a collapse. An easy feature can fill dimensions while the hard one is lost, so they need not see "
            "suppression."
            + (f" Rank correlations with the accuracy on hard labels: {joined(ranges)}." if ranges else "")
        ),
        Table(
            ["rank correlation with the accuracy on", *MONITORS.values()],
            [
                Row(
                    f"{setting.name}: {setting.title_and_kind(label)}",
                    [_correlation(found[setting.name, label, monitor]) for monitor in MONITORS],
                )
                for setting in settings
                for label in setting.labels
            ],
            caption="Over the cures, within each difficulty. 1 would mean that the monitor orders them as the accuracy "
            "does. RankMe and LiDAR are said to be high for good features, and alpha-ReQ to be near 1: its nearness to "
            "1 is ranked. Bold: positive, and not chance for a single test over the cures.",
        ),
    ]
    return blocks + [_monitor_table(setting, at[setting.name], order) for setting in settings]


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")


def _correlation(found: Correlation | None) -> Cell:
    if found is None:
        return Cell(NONE)
    return Cell(
        f"{_signed(found.value)} ({found.num_cures} cures)", "best" if found.value > 0 and found.p < LEVEL else ""
    )


def _monitor_table(setting: Setting, difficulty: str, order: Sequence[str]) -> Table:
    label = setting.hard[0]
    rows: list[Row] = []
    num_seeds: set[int] = set()
    for cure in order:
        of_cure = monitors_of(setting, difficulty, cure)
        if of_cure:
            num_seeds.add(len(of_cure))
            numbers = [[value for one in of_cure if (value := getattr(one, name)) is not None] for name in MONITORS]
            cells = [Cell(f"{statistics.fmean(values):.2f}" if values else NONE) for values in numbers]
            readings = list(setting.readings(difficulty, cure, label).values())
            rows.append(Row(cure, [Cell(shown(mean_of(readings)) if readings else NONE), *cells]))
    return Table(
        [f"{setting.name}{setting.at(difficulty)}", f"{setting.title(label)}, %", *MONITORS.values()],
        rows,
        caption=f"Monitors of the pooled features, mean over the seeds that have them ({_from_to(num_seeds)} of "
        f"{len(setting.seeds)}); the accuracy is that of all seeds.",
    )


def _from_to(numbers: Collection[int]) -> str:
    """Return "1 to 3", or "3" if all are equal."""
    return " to ".join(dict.fromkeys(str(of(numbers)) for of in (min, max)))


def _published(setting: Setting) -> list[Block]:
    found = repeated(setting)
    if found is None:
        return [
            text(
                f"The published table ({SOURCE}) has the temperatures {', '.join(f'{one:g}' for one in PUBLISHED)}. No "
                "run of a published loss with one of them is measured."
            )
        ]
    rows = []
    for temperature, published in PUBLISHED.items():
        cells = [Cell(f"{one:.1f}") for one in published] + [Cell(_half(BITS, [one / 100 for one in published]))]
        rows.append(Row(f"published, temperature {temperature:g}", cells, is_reference=True))
        if temperature in found.cure:
            ours = {bits: one for (of, bits), one in found.found.items() if of == temperature}
            cells = [Cell(shown(ours[bits]) if bits in ours else NONE) for bits in BITS]
            cells.append(Cell(_half(sorted(ours), [ours[bits].mean for bits in sorted(ours)])))
            rows.append(Row(f"ours, {found.cure[temperature]}", cells))
    others = sorted({bits for _, bits in found.found} - set(BITS))
    more = [
        f"{found.cure[of]} at {bits} bits: {shown(one)} %." for (of, bits), one in found.found.items() if bits in others
    ]
    return [
        Table(
            ["digit, test accuracy in %", *(f"{bits} bits" for bits in BITS), "halved at"],
            rows,
            caption=f"Published: {SOURCE}. Halved at: the bits at which the accuracy above chance falls to half of the "
            "first, by a line between neighbours.",
        ),
        text(f"Ours differ: {'; '.join(found.differences)}. So compare the shape of the table, not its levels."),
        *([Text(more, "list")] if more else []),
    ]


def _half(bits: Sequence[int], accuracies: Sequence[float]) -> str:
    found = halving([float(one) for one in bits], accuracies, chance=CHANCE) if len(bits) > 1 else None
    return NONE if found is None else f"{found:.1f} bits"


def _missing(gaps: Gaps, *, study: str, paths: Sequence[Path]) -> list[Block]:
    where = shlex.join(map(str, paths))
    told, commands = [], []
    if gaps.absent_cells:
        more = len(gaps.absent_cells) - MOST_NAMED
        named = joined(gaps.absent_cells[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        told.append(f"No run of any seed, because the difficulty cannot have the cure or none was begun: {named}.")
    if gaps.num_absent or gaps.unfinished:
        told.append(
            f"{gaps.num_absent} runs of other settings x difficulties x cures x seeds have no directory, and "
            f"{len(gaps.unfinished)} are not finished."
        )
    if gaps.absent_cells or gaps.num_absent or gaps.unfinished:
        commands.append(f"python launch/slurm.py --executor local --study {shlex.quote(study)} --at-a-time 2")
    if gaps.unprobed:
        told.append(f"{len(gaps.unprobed)} finished runs have no probe of their last step.")
        commands.append(f"python -m trainer.probe {_some(gaps.unprobed, where)} --missing")
    for label, lacking in gaps.without_label.items():
        told.append(
            f"{len(lacking)} runs have no probe of {label} at their last step, although others of their setting and "
            "difficulty have one."
        )
        commands.append(f"python -m trainer.probe {_some(lacking, where)} --label {shlex.quote(label)} --missing")
    if gaps.without_untrained:
        told.append(
            f"{len(gaps.without_untrained)} times a setting, a difficulty and a seed have no probe of an untrained "
            "encoder."
        )
        commands.append(f"python -m trainer.probe {_some(gaps.without_untrained, where)} --untrained")
    if gaps.without_monitors:
        told.append(f"{len(gaps.without_monitors)} finished runs have no monitors.")
        commands.append(f"python -m trainer.analyze monitors {_some(gaps.without_monitors, where)}")
    told += [f"Left out: {problem}" for problem in gaps.problems]
    if not told:
        return [text("Nothing: every run of the settings, difficulties, cures and seeds is measured.")]
    return [Text(told, "list"), *([Text(list(dict.fromkeys(commands)), "code")] if commands else [])]


def _some(runs: Sequence[Path], where: str) -> str:
    """Return some run directories as they are, and for many the directories of the study."""
    return shlex.join(map(str, runs)) if len(runs) <= MOST_NAMED else where
