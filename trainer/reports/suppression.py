"""The page of the suppression benchmark: which cure keeps the feature that the easy one suppresses.

A run finds its place by its factors (`tracking.factors`): setting, difficulty and cure. A setting is a dataset with
hard and easy labels, at several difficulties. An encoder of others is no cure and has no seeds; it stands beside the
cures, and takes no part in their comparisons. Invariant: a cell holds finished runs that were trained and probed on one
dataset, with one protocol, one for each seed.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from data_pipeline.building.suppression_settings import ENCODER
from data_pipeline.core.errors import UserError
from trainer.observability.figures import to_png
from trainer.probes.features import LabelSpace
from trainer.reports.charts import COLORS, number_of
from trainer.reports.comparison import by_seed
from trainer.reports.page import Table, accuracy, percent, points
from trainer.reports.paired import LEVEL, Estimate, Ranking, Reading, difference_of, leads_over, mean_of, rank
from trainer.reports.table import FEATURES, PIXELS, Measurement

BENCHMARK = "suppression"  # begins the names of its studies
CEILING = "ceiling: "  # begins the name of a cure that is none: the encoder trained with the label that follows
FACTORS = ("setting", "difficulty", "cure")
BESIDE = ("ceiling", "untrained", "raw pixels")  # beside every cure
NONE = "–"  # in a cell without a number
_FEW_LINES = 5  # cures of the second figure that have a colour
_BEST, _LOWER, _FLOOR = "#9cc9ae", "#e8eef4", "#ffffff"
_GREY, _INK = "#8a939c", "#1d2329"
_STYLE: Any = {"font.size": 8, "font.family": "sans-serif"}
_CELL = (0.62, 0.27)  # inches of a cell of the first figure


@dataclass(frozen=True)
class Setting:
    """A dataset in which the labels `easy` suppress the labels `hard`.

    difficulties: from the easiest for the hard labels; numbers are sorted.
    rows: by difficulty and cure; a cure may be a ceiling.
    """

    name: str
    unit: str
    hard: tuple[LabelSpace, ...]
    easy: tuple[LabelSpace, ...]
    difficulties: tuple[str, ...]
    rows: Mapping[tuple[str, str], Sequence[Measurement]]

    @property
    def middle(self) -> str:
        return self.difficulties[len(self.difficulties) // 2]

    @property
    def cures(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cure for _, cure in self.rows if not cure.startswith((CEILING, ENCODER))))

    @property
    def encoders(self) -> tuple[str, ...]:
        """Return the encoders of others."""
        return tuple(dict.fromkeys(cure for _, cure in self.rows if cure.startswith(ENCODER)))

    def of(self, difficulty: str, label: LabelSpace, cure: str | None = None) -> list[Measurement]:
        """Return the rows of a label at a difficulty, of one cure or of all of them."""
        return [
            row
            for (of, name), rows in self.rows.items()
            if of == difficulty and (cure is None or name == cure)
            for row in rows
            if row.label == label
        ]

    def title(self, label: LabelSpace, difficulty: str | None = None) -> str:
        """Return such as "RandBit, 5 bits: digit"; without a difficulty, or if there is only one, "RandBit: digit"."""
        titles = (row.title for rows in self.rows.values() for row in rows if row.label == label and row.title)
        at = "" if difficulty is None or len(self.difficulties) == 1 else f", {self._with_unit(difficulty)}"
        return f"{self.name}{at}: {next(titles, label)}"

    def _with_unit(self, difficulty: str) -> str:
        return f"{self.unit} {difficulty}" if self.unit == "correlation" else f"{difficulty} {self.unit}".strip()


@dataclass(frozen=True)
class Column:
    """The accuracies on one label of a setting at one difficulty.

    readings: the accuracy of each measured cure, by seed; `of_cure` are the means.
    of_untrained: the accuracy of the untrained encoder, by seed.
    of_encoder: the accuracy of each encoder of others.
    references: the accuracies beside those of cures that are measured, by their names in the figures: of encoders of
        others, and `BESIDE`.
    """

    setting: Setting
    difficulty: str
    label: LabelSpace
    readings: Mapping[str, Mapping[int, Reading]]
    of_cure: Mapping[str, Estimate]
    of_untrained: Mapping[int, Reading]
    of_encoder: Mapping[str, Reading]
    references: Mapping[str, Estimate]
    chance: float

    @cached_property
    def ranking(self) -> Ranking | None:
        """Return the best cure, compared with every other one; None without cures."""
        return rank(self.readings)

    @cached_property
    def floor(self) -> frozenset[str]:
        """Return the cures that are not told to be above the untrained encoder."""
        leads = leads_over(self.of_untrained, self.readings)
        return frozenset(cure for cure, lead in leads.items() if lead.mean <= 0 or lead.p >= LEVEL)

    @property
    def title(self) -> str:
        return self.setting.title(self.label, self.difficulty)

    def lead_over_best(self, encoder: str) -> Estimate | None:
        """Return the lead of an encoder of others over the best cure, paired over test samples; None without cures.

        The encoder is the same beside every seed of the cure, so the error holds the scatter of the cure's seeds.
        """
        if self.ranking is None:
            return None
        of_best = self.readings[self.ranking.best]
        return difference_of(dict.fromkeys(of_best, self.of_encoder[encoder]), of_best)

    def is_best(self, cure: str) -> bool:
        """Return whether a cure is the best, or not told from it."""
        if self.ranking is None or cure not in self.of_cure:
            return False
        return cure == self.ranking.best or cure in [rival.name for rival in self.ranking.not_told]


def suppression_page(
    rows: Sequence[Measurement], *, published: Sequence[Mapping[str, str]] = ()
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return what the template of the page gets, and the figures as PNG by name.

    published: lines with setting, difficulty, cure, label, mean and source.

    Raises `UserError` if no row has the factors, or if two configurations fill one place.
    """
    settings, left_out = settings_of(rows)
    columns = [
        column_of(setting, setting.middle, label)
        for kind in ("hard", "easy")
        for setting in settings
        for label in getattr(setting, kind)
    ]
    columns = [column for column in columns if column.of_cure or column.of_encoder]
    hard = [column for column in columns if column.label in column.setting.hard and column.of_cure]
    cures = list(dict.fromkeys(cure for column in columns for cure in column.of_cure))
    order = sorted(cures, key=lambda cure: -_mean_lead(hard, cure))
    found = {
        "settings": settings,
        "cures": order,
        "best": _best_table(hard),
        "often": _often_best(hard, order),
        "others": _encoders_table(columns),
        "published": _published_table(settings, published),
        "sources": list(dict.fromkeys(line["source"] for line in published)),
        "left_out": left_out,
    }
    figures = {"accuracies": draw_overview(columns, order)} if columns else {}
    if any(len(setting.difficulties) > 1 for setting in settings):
        figures["difficulties"] = draw_difficulties(settings, order)
    return found, figures


def settings_of(rows: Sequence[Measurement]) -> tuple[list[Setting], list[str]]:
    """Return the settings, and the runs that have no place or other data or another protocol than most."""
    placed = [row for row in rows if all(name in row.factors for name in FACTORS) and row.readout == "linear"]
    if not placed:
        raise UserError(
            f"no run has the factors {', '.join(FACTORS)} (tracking.factors) of a suppression study; leave out --study"
        )
    counted = [row for row in placed if row.is_final or row.step == 0]
    protocol = Counter(row.protocol for row in counted).most_common(1)
    counted = [row for row in counted if row.protocol == protocol[0][0]]
    by_setting: dict[str, list[Measurement]] = {}
    for row in counted:
        by_setting.setdefault(row.factors["setting"], []).append(row)
    settings = [_setting(name, of_setting) for name, of_setting in by_setting.items()]
    kept = {row.run for setting in settings for of_cell in setting.rows.values() for row in of_cell}
    return settings, sorted({row.run for row in rows} - kept)


def _setting(name: str, rows: Sequence[Measurement]) -> Setting:
    usual: dict[str, Counter[str]] = {}
    places: dict[tuple[str, str, int], str] = {}
    for row in rows:
        difficulty, cure = row.factors["difficulty"], row.factors["cure"]
        usual.setdefault(difficulty, Counter())[row.data] += row.step > 0
        if places.setdefault((difficulty, cure, row.seed), row.run) != row.run:
            other = places[difficulty, cure, row.seed]
            raise UserError(
                f"{other} and {row.run} are both {name} at {difficulty} with {cure} and seed {row.seed}; leave one out"
            )
    cells: dict[tuple[str, str], list[Measurement]] = {}
    for row in rows:
        if row.data == usual[row.factors["difficulty"]].most_common(1)[0][0]:
            cells.setdefault((row.factors["difficulty"], row.factors["cure"]), []).append(row)
    first = rows[0].factors
    return Setting(
        name=name,
        unit=first.get("unit", ""),
        hard=_labels(first.get("hard", "base")),
        easy=_labels(first.get("easy", "overlay")),
        difficulties=_sorted(rows),
        rows=cells,
    )


def _labels(text: str) -> tuple[LabelSpace, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _sorted(rows: Sequence[Measurement]) -> tuple[str, ...]:
    """Return the difficulties, rising, or falling if the factor `easiest` is the last of them or above."""

    def order(text: str) -> tuple[bool, float, str]:
        number = number_of(text)
        return number is None, number or 0.0, text

    rising = sorted({row.factors["difficulty"] for row in rows}, key=order)
    easiest = next((row.factors["easiest"] for row in rows if "easiest" in row.factors), rising[0])
    return tuple(reversed(rising) if order(easiest) >= order(rising[-1]) else rising)


def column_of(setting: Setting, difficulty: str, label: LabelSpace) -> Column:
    """Return the accuracies on a label at a difficulty."""

    def readings(*, reads: str = FEATURES, is_trained: bool, cure: str | None = None) -> dict[int, Reading]:
        rows = setting.of(difficulty, label, cure)
        return by_seed(row for row in rows if row.reads == reads and (row.step > 0) == is_trained)

    cures = {cure: of_cure for cure in setting.cures if (of_cure := readings(is_trained=True, cure=cure))}
    untrained = readings(is_trained=False)
    references = {name: readings(is_trained=True, cure=name) for name in setting.encoders} | {
        "ceiling": readings(is_trained=True, cure=CEILING + label),
        "untrained": untrained,
        "raw pixels": readings(reads=PIXELS, is_trained=False),
    }
    return Column(
        setting=setting,
        difficulty=difficulty,
        label=label,
        readings=cures,
        of_cure={cure: mean_of(list(of_cure.values())) for cure, of_cure in cures.items()},
        of_untrained=untrained,
        of_encoder={name: one for name in setting.encoders for one in references[name].values()},
        references={name: mean_of(list(of_name.values())) for name, of_name in references.items() if of_name},
        chance=next((row.chance or 0.0 for row in setting.of(difficulty, label)), 0.0),
    )


def _mean_lead(columns: Sequence[Column], cure: str) -> float:
    """Return the mean over columns of the accuracy less the mean of all cures; -1 if it is not measured."""
    leads = [
        one.of_cure[cure].mean - statistics.fmean(other.mean for other in one.of_cure.values())
        for one in columns
        if cure in one.of_cure
    ]
    return statistics.fmean(leads) if leads else -1.0


def _best_table(columns: Sequence[Column]) -> Table:
    rows = []
    for column in columns:
        ranking = column.ranking
        assert ranking is not None
        ahead = f"{len(ranking.told)} of {len(ranking.rivals)}"
        lead = f", by {points(ranking.told[0].lead)}" if ranking.told else ""
        floors = [percent(column.references[name].mean) if name in column.references else NONE for name in BESIDE]
        is_floor = " (not above untrained)" if ranking.best in column.floor else ""
        rows.append(
            [column.title, ranking.best + is_floor, accuracy(column.of_cure[ranking.best]), ahead + lead, *floors]
        )
    return Table("", ["hard label", "best cure", "%", "told below it", "ceiling", "untrained", "pixels"], rows)


def _often_best(columns: Sequence[Column], cures: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return for each cure on how many labels it is the best or not told from it, and on how many it is measured."""
    counts = [
        (
            cure,
            sum(one.is_best(cure) and cure not in one.floor for one in columns),
            sum(cure in one.of_cure for one in columns),
        )
        for cure in cures
    ]
    return sorted((one for one in counts if one[1]), key=lambda one: -one[1])


def _encoders_table(columns: Sequence[Column]) -> Table | None:
    """Return the accuracies of encoders of others beside the best cure; None if there are none."""
    rows = []
    for column in columns:
        ranking = column.ranking
        best = [NONE, NONE] if ranking is None else [ranking.best, accuracy(column.of_cure[ranking.best])]
        for encoder in column.of_encoder:
            lead = column.lead_over_best(encoder)
            name = encoder.removeprefix(ENCODER)
            ours = accuracy(column.references[encoder])
            rows.append([column.title, name, ours, *best, NONE if lead is None else points(lead)])
    return Table("", ["label", "encoder", "%", "best cure", "%", "difference"], rows) if rows else None


def _published_table(settings: Sequence[Setting], published: Sequence[Mapping[str, str]]) -> Table | None:
    """Return the published accuracies beside ours; None if no run repeats one."""
    by_name = {setting.name: setting for setting in settings}
    ours: dict[tuple[str, str], dict[str, str]] = {}
    for line in published:
        setting = by_name.get(line["setting"])
        rows = [] if setting is None else setting.of(line["difficulty"], line["label"], line["cure"])
        readings = list(by_seed(row for row in rows if row.step > 0).values())
        text = f"{accuracy(mean_of(readings)) if readings else NONE} ({float(line['mean']):.1f})"
        ours.setdefault((line["setting"], line["cure"]), {})[line["difficulty"]] = text
    measured = {key: cells for key, cells in ours.items() if any(not cell.startswith(NONE) for cell in cells.values())}
    if not measured:
        return None
    difficulties = list(dict.fromkeys(one for cells in measured.values() for one in cells))
    lines = [[", ".join(key), *(cells.get(one, "") for one in difficulties)] for key, cells in measured.items()]
    return Table("", ["ours (published), %", *difficulties], lines)


def draw_overview(columns: Sequence[Column], cures: Sequence[str]) -> bytes:
    """Return a figure as PNG: the accuracy of each cure on each label, coloured by what is told from chance."""
    encoders = dict.fromkeys(name for column in columns for name in column.of_encoder)
    references = (*encoders, *BESIDE)
    num_rows, width, height = len(cures) + len(references) + 1, *_CELL
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width * len(columns) + 2.2, height * num_rows + 2.1), layout="constrained")
        axes = figure.add_subplot()
        for x, column in enumerate(columns):
            for y, cure in enumerate(cures):
                if (found := column.of_cure.get(cure)) is not None:
                    is_floor = cure in column.floor
                    color = _FLOOR if is_floor else _BEST if column.is_best(cure) else _LOWER
                    axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=color, linewidth=0))
                    axes.text(x, y, percent(found.mean), ha="center", va="center", color=_GREY if is_floor else _INK)
            for y, name in enumerate(references, len(cures)):
                if (found := column.references.get(name)) is not None:
                    axes.text(x, y, percent(found.mean), ha="center", va="center", color=_INK, style="italic")
            axes.text(x, num_rows - 1, percent(column.chance), ha="center", va="center", color=_INK, style="italic")
        num_hard = sum(column.label in column.setting.hard for column in columns)
        axes.axvline(num_hard - 0.5, color=_INK, linewidth=1)
        axes.axhline(len(cures) - 0.5, color=_INK, linewidth=0.6)
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(num_rows - 0.5, -0.5))
        axes.set_yticks(range(num_rows), [*cures, *references, "chance"])
        axes.xaxis.tick_top()
        axes.set_xticks(range(len(columns)), [column.title for column in columns], rotation=40, ha="left")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel(
            "Hard labels, then easy labels. Green: best, or not told from it. Blue: told to be below. "
            "White: not told to be above the untrained encoder."
        )
        return to_png(figure)


def draw_difficulties(settings: Sequence[Setting], cures: Sequence[str]) -> bytes:
    """Return a figure as PNG: the accuracy on the hard labels over the difficulty. The first cures have a colour."""
    shown = [(setting, label) for setting in settings if len(setting.difficulties) > 1 for label in setting.hard]
    encoders = dict.fromkeys(name for setting in settings for name in setting.encoders)
    styles = {"ceiling": "--", "untrained": ":"}
    styles |= {name: f"-.{marker}" for name, marker in zip(encoders, itertools.cycle("sD^vP*"), strict=False)}
    num_columns = min(3, len(shown))
    num_rows = -(-len(shown) // num_columns)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(3.7 * num_columns, 2.8 * num_rows + 0.7), layout="constrained")
        panels = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
        for axes, (setting, label) in zip(panels, shown, strict=False):
            columns = [column_of(setting, difficulty, label) for difficulty in setting.difficulties]
            _draw_lines(axes, columns, cures, styles)
        for axes in panels[len(shown) :]:
            axes.set_axis_off()
        drawn = [axes.get_legend_handles_labels() for axes in panels]
        handles = {name: handle for of_panel in drawn for handle, name in zip(*of_panel, strict=True)}
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False)
        figure.supylabel("linear probe, test accuracy in %")
        return to_png(figure)


def _draw_lines(axes: Axes, columns: Sequence[Column], cures: Sequence[str], styles: Mapping[str, str]) -> None:
    places = range(len(columns))
    for number, cure in reversed(list(enumerate(cures))):
        found = [
            (at, column.of_cure[cure]) for at, column in zip(places, columns, strict=True) if cure in column.of_cure
        ]
        if not found:
            continue
        is_first = number < _FEW_LINES
        color = COLORS[number] if is_first else _GREY
        label = cure if is_first else "other cures" if number == len(cures) - 1 else None
        mean = [100 * one.mean for _, one in found]
        axes.plot(
            [at for at, _ in found],
            mean,
            color=color,
            linewidth=1.8 if is_first else 0.8,
            alpha=1 if is_first else 0.5,
            label=label,
        )
        if is_first:
            half = [100 * min(one.half_width, 1.0) for _, one in found]
            axes.errorbar([at for at, _ in found], mean, half, color=color, fmt="o", markersize=3.5, linewidth=1)
    for name, style in styles.items():
        values = [
            (at, 100 * of[name].mean) for at, of in enumerate(column.references for column in columns) if name in of
        ]
        if values:
            axes.plot(*zip(*values, strict=True), style, markersize=4, color=_INK, linewidth=1.2, label=name)
    axes.set_title(columns[0].setting.title(columns[0].label), fontsize=9)
    axes.set_xticks(list(places), [column.difficulty for column in columns])
    axes.set(xlabel=columns[0].setting.unit or "difficulty", ylim=(0, 102))
    axes.grid(alpha=0.25, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
