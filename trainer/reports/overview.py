"""The report of many runs: one table for each dataset to filter and sort, and sentences that fit hundreds of runs.

A row is a configuration: runs that differ only in their seed. Settings that differ are columns. All accuracies are
those of the probe protocol of most runs, so no table mixes two; a note names the runs of other protocols. Guarantees:
no step takes time that grows with the square of the number of runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from data_pipeline.core.schema import as_typed
from data_pipeline.core.sections import KIND
from trainer.probes.features import LabelSpace
from trainer.reports.curves import (
    MAX_POINTS,
    Chart,
    Line,
    color_of,
    line_chart,
    lines_of,
    metric_titles,
    num_averaged,
    thin,
)
from trainer.reports.findings import (
    join_some,
    measured_labels,
    outcome,
    probed_steps,
    say_of_each,
    score,
    untrained_arms,
    untrained_like,
)
from trainer.reports.paired import Reading, below_best
from trainer.reports.protocols import ProtocolArms, by_protocol, label_titles
from trainer.reports.runs import (
    Arm,
    DatasetArms,
    Difference,
    Run,
    config_differences,
    datasets_of,
    runs_of_arms,
)
from trainer.reports.tables import Grid, speed_notes

MOST_IN_FULL: Final = 40  # runs; a report of more has this form
MAX_SETTINGS: Final = 10  # columns of settings; those of a sweep come first
MAX_VIEWS: Final = 6  # configurations whose views are shown
_POINTS_OF_CHART: Final = 12_000
_FEWEST_POINTS: Final = 24  # of a line
_NO_COLUMN: Final = ("name", "seed", "tracking")
_BEST_OF_MANY: Final = (
    "The best of many is optimistic: it was chosen by the accuracy that is shown. Another configuration is below it if "
    "the difference is not chance at a level of 5 %, after Holm's correction, which counts all pairs of configurations "
    "because of this choice."
)


@dataclass(frozen=True)
class Cell:
    """A cell: its text (None means "not measured"), and the number or text by which a column is sorted."""

    text: str | None
    key: float | str | None = None


@dataclass(frozen=True)
class OverviewRow:
    """A configuration. `number` is that of its lines in the charts, and `path` the directory of its first run."""

    number: int
    name: str
    color: str
    path: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class OverviewTable:
    """The configurations on one dataset. `notes` say what the table leaves out."""

    title: str
    settings: tuple[str, ...]
    measures: tuple[str, ...]
    rows: tuple[OverviewRow, ...]
    notes: tuple[str, ...]

    @property
    def grid(self) -> Grid:
        """Return the table as text."""
        rows = [[row.name, *(cell.text for cell in row.cells)] for row in self.rows]
        return Grid(["configuration", *self.settings, *self.measures], rows)


def tables(arms: Sequence[Arm]) -> list[OverviewTable]:
    """Return one table for each dataset, the configurations with the best linear probe of the first label on top."""
    groups, titles = by_protocol(arms), label_titles(arms)
    datasets = datasets_of(groups[0].arms)
    return [_table(dataset, titles, groups, is_only=len(datasets) == 1) for dataset in datasets]


def _table(
    dataset: DatasetArms, titles: Mapping[LabelSpace, str], groups: Sequence[ProtocolArms], *, is_only: bool
) -> OverviewTable:
    """Return the table of a dataset, whose arms have the results of the first of `groups`."""
    title, others = groups[0].title, groups[1:]
    arms = dataset.arms
    spaces = measured_labels(arms)
    settings, left_out = _settings(arms)
    measures = [f"{titles[space]}, {method}" for space in spaces for method in ("linear", "kNN")]
    measures += ["probed at"] if spaces else []
    rows = []
    for number, arm, index in zip(dataset.numbers, arms, range(len(arms)), strict=True):
        elsewhere = [other.arms[number] for other in others]
        results = [cell for space in spaces for cell in _result_cells(arm, space, elsewhere)]
        if spaces:
            results.append(_probed_cell(arm))
        cells = [*(_setting_cell(row, index) for row in settings), *results, *_progress(arm)]
        rows.append(OverviewRow(number, arm.name, color_of(number), str(arm.runs[0].path), tuple(cells)))
    first = len(settings)
    if spaces:
        rows.sort(key=lambda row: -_number(row.cells[first].key))
    notes = [f"Settings that differ too, and have no column: {', '.join(left_out)}."] if left_out else []
    notes += [f"Accuracies are of a {title}."] if title and spaces else []
    notes += [note for other in others if (note := _left_out(other, dataset.numbers))]
    notes += speed_notes(arms)
    return OverviewTable(
        "" if is_only else dataset.name,
        tuple(row.key for row in settings),
        (*measures, "last loss", "step", "samples a second", "runs"),
        tuple(rows),
        tuple(notes),
    )


def _number(key: float | str | None) -> float:
    return key if isinstance(key, float) else float("-inf")


def _settings(arms: Sequence[Arm]) -> tuple[list[Difference], list[str]]:
    """Return the settings that become columns, those of sweeps first, and the names of those that do not."""
    axes = {axis for arm in arms for run in arm.runs for axis in run.config.tracking.axes}
    differing = [row for row in config_differences(arms) if row.key.partition(".")[0] not in _NO_COLUMN]
    differing.sort(key=lambda row: not any(axis == row.key or axis.startswith(f"{row.key}.") for axis in axes))
    return differing[:MAX_SETTINGS], [row.key for row in differing[MAX_SETTINGS:]]


def _setting_cell(row: Difference, index: int) -> Cell:
    values = row.values[index]
    if not values:
        return Cell("–", "")
    if "" in values:
        distinct = values[""]
        only: Any = distinct[0] if len(distinct) == 1 else None
        is_number = isinstance(only, int | float) and not isinstance(only, bool)
        text = " / ".join(map(as_typed, distinct))
        return Cell(text, float(only) if is_number else text)
    # A section of which the kinds have other settings: the kind, and what differs is in the config of the run.
    kind = " / ".join(map(as_typed, values.get(KIND, ["…"])))
    return Cell(kind, kind)


def _result_cells(arm: Arm, space: LabelSpace, elsewhere: Sequence[Arm]) -> list[Cell]:
    """Return the accuracies of an arm on a label; `elsewhere` is the arm with its results of other protocols."""
    probes = arm.trained(space)
    if not probes and any(other.trained(space) for other in elsewhere):
        return 2 * [Cell("another probe")]
    of_some = f" ({len(probes)} of {len(arm.runs)} runs)" if len(probes) < len(arm.runs) else ""
    scores = [score(probes, "linear"), score(probes, "knn")]
    return [Cell(None) if one is None else Cell(f"{one}{of_some}", one.mean) for one in scores]


def _left_out(other: ProtocolArms, numbers: Sequence[int]) -> str:
    """Return a sentence on the arms with results of a protocol that the table leaves out; empty if there are none."""
    names = [arm.name for arm in (other.arms[number] for number in numbers) if measured_labels([arm])]
    if not names:
        return ""
    return (
        f"Not in this table: the accuracies of a {other.title}, of {join_some(names)}. A report of at most "
        f"{MOST_IN_FULL} runs has a table for each probe."
    )


def _probed_cell(arm: Arm) -> Cell:
    steps = [float(run.probed_step) for run in arm.runs if run.probed_step is not None]
    return Cell(arm.probed_at or None, min(steps, default=None))


def _progress(arm: Arm) -> list[Cell]:
    """Return the last loss, the last step, the speed (medians over the seeds), and the number of runs."""
    runs = arm.runs
    losses = [values[max(values)] for run in runs if (values := run.logged("train/loss"))]
    steps = [float(run.metrics.last_step) for run in runs if run.metrics.last_step is not None]
    speeds = [value for run in runs for value in run.logged_on_one_machine("perf/samples_per_second")]
    finished = all("finished_step" in run.provenance for run in runs)
    step = None if not steps else f"{min(steps):.0f}{'' if finished else ' …'}"
    return [
        Cell(None) if not losses else Cell(f"{statistics.fmean(losses):.4g}", statistics.fmean(losses)),
        Cell(step, min(steps, default=None)),
        Cell(None) if not speeds else Cell(f"{statistics.median(speeds):,.0f}", statistics.median(speeds)),
        Cell(f"{len(runs)}", float(len(runs))),
    ]


def sentences(arms: Sequence[Arm]) -> list[str]:
    """Return for each protocol, dataset and label the best configuration, and how many cannot be told from it."""
    num_compared = max(sum(bool(measured_labels([arm])) for arm in group.arms) for group in by_protocol(arms))
    return [*say_of_each(arms, _sentences_of_one), *([_BEST_OF_MANY] if num_compared > 1 else [])]


def _sentences_of_one(arms: Sequence[Arm]) -> list[str]:
    titles = label_titles(arms)
    found = [f"On the {titles[space]}, {_best(arms, space)}" for space in measured_labels(arms)]
    return [*found, *probed_steps(arms)] if found else ["No trained encoder has been probed yet, so none is compared."]


def _best(arms: Sequence[Arm], space: LabelSpace) -> str:
    scores = [(one, arm) for arm in arms if (one := score(arm.trained(space), "linear"))]
    best, best_arm = max(scores, key=lambda pair: pair[0].mean)
    text = f"{best_arm.name} has {best} %"
    if len(scores) > 1:
        readings = [[Reading(value, one.num_test) for value in one.values] for one, _ in scores]
        rivals = len(scores) - 1 - len(below_best(dict(enumerate(readings))))
        text = f"the best of {len(scores)} configurations is {best_arm.name} with {best} %"
        text += f"; {rivals} cannot be told apart from it" if rivals else "; every other is below it"
    baselines = {like: score(arm.untrained(space), "linear") for like, arm in untrained_arms(arms, space).items()}
    known = [(one, base) for one, arm in scores if (base := baselines.get(untrained_like(arm)))]
    if known:
        above = sum(outcome(one, base) == "above" for one, base in known)
        of_all = f"{len(known)} are above their untrained encoder"
        of_some = f"the {len(known)} with a probed untrained encoder are above it"
        text += f", and {above} of {of_all if len(known) == len(scores) else of_some}"
    return f"{text}."


def charts(arms: Sequence[Arm]) -> list[Chart]:
    """Draw the training metrics. The lines of configuration N are in the group "armN", by which the page hides them."""
    titles = label_titles(arms)
    most = min(MAX_POINTS, max(_FEWEST_POINTS, _POINTS_OF_CHART // len(arms)))
    drawn = []
    for key, title in metric_titles(runs_of_arms(arms), titles).items():
        whole = [
            (number, line)
            for number, arm in enumerate(arms)
            for line in lines_of([run.logged(key) for run in arm.runs], color_of(number))
        ]
        if whole:
            lines = [_thinned(line, group=f"arm{number}", most=most) for number, line in whole]
            averaged = max(num_averaged(len(line.x), most=most) for _, line in whole)
            drawn.append(replace(line_chart(title, lines, x_label="training step"), num_averaged=averaged))
    return drawn


def _thinned(line: Line, *, group: str, most: int) -> Line:
    """Return a line of fewer points without its bands, which hundreds of lines would hide."""
    x, y = thin(line.x, line.y, most=most)
    return replace(line, x=x, y=y, deviation=None, group=group)


def shown_views(arms: Sequence[Arm], of: Sequence[OverviewTable]) -> list[Run]:
    """Return the first runs of the best configurations of each table that have a grid of views."""
    found = [arms[row.number].runs[0] for table in of for row in table.rows]
    return [run for run in found if run.views.png is not None][:MAX_VIEWS]


def is_large(arms: Sequence[Arm]) -> bool:
    """Tell whether a report has so many runs that it takes this form."""
    return len(runs_of_arms(arms)) > MOST_IN_FULL
