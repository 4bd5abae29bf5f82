"""Draw the results of sweeps: a metric over each axis, with a line for each value of another axis.

The axes of a sweep are in the config of each of its runs (`tracking.axes`), so nothing is guessed from names. Runs that
differ in their seed alone are one point: their mean, with a band of ± their sample standard deviation, as in the other
charts. Runs on several datasets, or probed in several ways, are never in one figure; nor are runs that differ in a
setting that is no axis, such as two recipes that were swept over the same values.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from data_pipeline.core.schema import as_typed, value_at
from data_pipeline.core.sections import KIND
from trainer.config import RunConfig
from trainer.reports.config_identity import config_identity, identity_settings
from trainer.reports.curves import COLORS, INK, Chart, chart, color_of, metric_titles
from trainer.reports.findings import join_some
from trainer.reports.protocols import by_protocol, label_titles
from trainer.reports.runs import Arm, Run, datasets_of, labels_of

MAX_LINES: Final = 12  # of one panel; with more values of another axis, as in a random search, points have no lines
MAX_PANELS: Final = 12  # of one metric over one axis
_LOG_RATIO: Final = 10.0  # values that span this or more have a logarithmic axis
_SEED: Final = "seed"

Value = float | str


@dataclass(frozen=True)
class Axis:
    """A setting that a sweep varies: its dotted name, and its values in the runs, ascending or as they came.

    ends_like_another: whether another axis of the sweep has the same last word.
    """

    key: str
    values: tuple[Value, ...]
    ends_like_another: bool = False

    @property
    def title(self) -> str:
        """Return the last part of the dotted name that says something, or all of it if another axis ends like it."""
        name = self.key.removesuffix(f".{KIND}")
        return name if self.ends_like_another else name.rpartition(".")[2]

    @property
    def is_numeric(self) -> bool:
        return all(isinstance(value, float) for value in self.values)

    @property
    def is_logarithmic(self) -> bool:
        """Tell whether all values are positive numbers, the largest ten times the least or more."""
        numbers = [value for value in self.values if isinstance(value, float)]
        return self.is_numeric and min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_RATIO


@dataclass(frozen=True)
class SweepSection:
    """The figures of one sweep on one dataset. `notes` say what they leave out."""

    title: str
    charts: tuple[Chart, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Point:
    """A run of a sweep: its value on each axis, and its value of the metric."""

    at: Mapping[str, Value]
    y: float


@dataclass(frozen=True)
class Panel:
    """A small figure: a metric over `axis`. `lines` has a title and points (x, the values of all seeds) for each line.

    Without `is_joined`, each line is one point of a cloud. `limits` are the y limits that all panels of a metric share.
    """

    title: str
    axis: Axis
    legend: str
    lines: tuple[tuple[str, Mapping[Value, Sequence[float]]], ...]
    is_joined: bool
    limits: tuple[float, float]


def sweep_sections(arms: Sequence[Arm]) -> list[SweepSection]:
    """Return the figures of each sweep, with the probe protocol of most runs; none for runs that belong to no sweep.

    A sweep keeps its points that have the configuration and the seed of a run of another sweep. It may be extended by
    seeds with `--set seed=2` as well as with `--sweep seed=2`.
    """
    group = by_protocol(arms)[0]
    titles = label_titles(arms)
    sections = []
    datasets = datasets_of(group.arms)
    for dataset in datasets:
        by_sweep: dict[tuple[str, frozenset[str]], list[Run]] = {}
        for run in (run for arm in dataset.arms for run in (*arm.runs, *arm.repeated)):
            tracking = run.config.tracking
            if keys := frozenset(tracking.axes) - {_SEED}:
                by_sweep.setdefault((tracking.group or "", keys), []).append(run)
        for (name, keys), of_sweep in by_sweep.items():
            for beside, runs in _by_other_settings(_without_copies(of_sweep, keys), keys):
                axes = axes_of(runs)
                parts = (name or "sweep", beside, dataset.name if len(datasets) > 1 else "", group.title)
                if axes:
                    sections.append(_section(" · ".join(filter(None, parts)), runs, axes, _metrics(runs, titles)))
    return sections


def _without_copies(runs: Sequence[Run], axes: Iterable[str]) -> list[Run]:
    """Return the first of the runs that share configuration, seed and values of the axes."""
    first: dict[tuple[object, ...], Run] = {}
    for run in runs:
        config = run.config
        place = (config_identity(config), config.seed, *(value_of(config, axis) for axis in axes))
        first.setdefault(place, run)
    return list(first.values())


def _by_other_settings(runs: Sequence[Run], axes: Iterable[str]) -> list[tuple[str, list[Run]]]:
    """Group runs by the settings that are no axes, each group with a title that names those that differ."""
    sections = [axis.removesuffix(f".{KIND}") for axis in axes]  # a kind has settings of its own, so it is all of them
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        others = {
            key: value
            for key, value in identity_settings(run.config).items()
            if not any(key == section or key.startswith(f"{section}.") for section in sections)
        }
        grouped.setdefault(json.dumps(others), []).append(run)
    return list(zip(_titles([json.loads(others) for others in grouped]), grouped.values(), strict=True))


def _titles(configurations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return titles such as "num_epochs=4, views=viewmaker", of the settings that differ.

    Only settings that all have are named, and only the kind of a section whose kind differs, unless two titles would
    be the same.
    """
    keys = dict.fromkeys(key for settings in configurations for key in settings)
    first = configurations[0]
    differing = [key for key in keys if any(one.get(key) != first.get(key) for one in configurations)]
    kinds = [key.removesuffix(KIND) for key in differing if key.endswith(f".{KIND}")]
    short = [key for key in differing if key.endswith(f".{KIND}") or not key.startswith(tuple(kinds))]
    for named in ([key for key in short if all(key in one for one in configurations)], short, differing):
        titles = [
            ", ".join(f"{key.removesuffix(f'.{KIND}')}={as_typed(one[key])}" for key in named if key in one)
            for one in configurations
        ]
        if len(set(titles)) == len(titles):
            break
    return titles


def _share_a_place(runs: Sequence[Run], axes: Sequence[Axis]) -> list[Run]:
    """Return the runs with the axes of an earlier run and other settings, in the section of a kind that is an axis."""
    first: dict[tuple[Value, ...], str] = {}
    identities = [config_identity(run.config) for run in runs]
    places = [tuple(value_of(run.config, axis.key) for axis in axes) for run in runs]
    return [
        run
        for run, place, identity in zip(runs, places, identities, strict=True)
        if first.setdefault(place, identity) != identity
    ]


def axes_of(runs: Sequence[Run]) -> list[Axis]:
    """Return the axes that have two values or more in these runs, without the seed."""
    keys = dict.fromkeys(key for run in runs for key in run.config.tracking.axes if key != _SEED)
    axes = []
    for key in keys:
        values = list(dict.fromkeys(value_of(run.config, key) for run in runs))
        if len(values) > 1:
            numeric = all(isinstance(value, float) for value in values)
            axes.append(Axis(key, tuple(sorted(values) if numeric else values)))
    num_titled = Counter(axis.title for axis in axes)
    return [replace(axis, ends_like_another=num_titled[axis.title] > 1) for axis in axes]


def value_of(config: RunConfig, key: str) -> Value:
    """Return the value of a setting: a number as a float, anything else as a user would type it."""
    value: Any = value_at(config, key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return as_typed(value)


Metric = Callable[[Run], float | None]


def _metrics(runs: Sequence[Run], titles: Mapping[Any, str]) -> dict[str, Metric]:
    """Return the metrics to draw, by title: the linear probe of each label; without probes, the last logged values."""

    def probed(space: Any) -> Metric:
        def accuracy(run: Run) -> float | None:
            result = run.final_probe(space)
            return None if result is None else 100 * result.linear.accuracy

        return accuracy

    def logged(key: str) -> Metric:
        def last(run: Run) -> float | None:
            values = run.logged(key)
            return values[max(values)] if values else None

        return last

    labels = labels_of(runs)
    found = {f"Linear probe of the {titles[space]}, test accuracy in %": probed(space) for space in labels}
    measured = {title: metric for title, metric in found.items() if any(metric(run) is not None for run in runs)}
    if measured:
        return measured
    names = metric_titles(runs, titles)
    online = [key for key in names if key.startswith("probe/")]
    keys = [key for key in online if any(run.logged(key) for run in runs)] or ["train/loss"]
    return {f"{names[key]}, at the last logged step": logged(key) for key in keys}


def _section(title: str, runs: Sequence[Run], axes: Sequence[Axis], metrics: Mapping[str, Metric]) -> SweepSection:
    charts: list[Chart] = []
    notes: list[str] = []
    if twice := _share_a_place(runs, axes):
        names = [run.name for run in twice]
        notes.append(f"Left out, because other runs have their place with other settings: {', '.join(names)}.")
        runs = [run for run in runs if run.name not in names]
    early = [f"{run.name} at {run.probed_at}" for run in runs if run.probed_step and not run.is_probed_at_end]
    if early:
        notes.append(f"Not all probes are of the end of a training: {join_some(early)}.")
    unended = [f"{run.name} at {run.stands_at}" for run in runs if run.stands_at]
    if unended and not any(run.probed_step for run in runs):  # else the metrics are those of probes
        notes.append(f"Not all values are of the end of a training: {join_some(unended)}.")
    for metric_name, metric in metrics.items():
        points = [
            Point({axis.key: value_of(run.config, axis.key) for axis in axes}, y)
            for run in runs
            if (y := metric(run)) is not None and math.isfinite(y)
        ]
        if missing := len(runs) - len(points):
            notes.append(f"{metric_name}: {missing} of {len(runs)} runs have no value, and are left out.")
        if not points:
            continue
        for axis in axes:
            panels = panels_of(points, axis, [other for other in axes if other is not axis])
            if len(panels) > MAX_PANELS:
                left_out = len(panels) - MAX_PANELS
                notes.append(f"{metric_name} by {axis.title}: {left_out} of {len(panels)} panels are left out.")
            charts += [_draw(panel, metric_name) for panel in panels[:MAX_PANELS]]
    return SweepSection(title, tuple(charts), tuple(dict.fromkeys(notes)))


def panels_of(points: Sequence[Point], axis: Axis, others: Sequence[Axis]) -> list[Panel]:
    """Return the small figures of a metric over one axis.

    The other axis with the fewest values becomes the lines, and each combination of the rest a panel. If an axis has
    more than `MAX_LINES` values, as in a random search, all configurations are points in one panel.
    """
    ys = [point.y for point in points]
    margin = 0.06 * (max(ys) - min(ys)) or 0.5
    limits = (min(ys) - margin, max(ys) + margin)
    if any(len(other.values) > MAX_LINES for other in others):
        alone: dict[tuple[Value, ...], list[Point]] = {}
        for point in points:
            alone.setdefault(tuple(point.at.values()), []).append(point)
        cloud = tuple(("", _by_x(seeds, axis)) for seeds in alone.values())
        return [Panel("", axis, "", cloud, is_joined=False, limits=limits)]
    by_size = sorted(others, key=lambda other: len(other.values))
    lines_axis, rest = (by_size[0] if by_size else None), by_size[1:]
    panels = []
    for fixed in itertools.product(*(other.values for other in rest)):
        chosen = dict(zip((other.key for other in rest), fixed, strict=True))
        inside = [point for point in points if all(point.at[key] == value for key, value in chosen.items())]
        if lines_axis is None:
            lines = [("", _by_x(inside, axis))]
        else:
            lines = [
                (_shown(value), _by_x([point for point in inside if point.at[lines_axis.key] == value], axis))
                for value in lines_axis.values
            ]
        if inside:
            title = ", ".join(f"{other.title}={_shown(value)}" for other, value in zip(rest, fixed, strict=True))
            panels.append(Panel(title, axis, lines_axis.title if lines_axis else "", tuple(lines), True, limits))
    return panels


def _by_x(points: Sequence[Point], axis: Axis) -> dict[Value, list[float]]:
    found: dict[Value, list[float]] = {}
    for value in axis.values:
        ys = [point.y for point in points if point.at[axis.key] == value]
        if ys:
            found[value] = ys
    return found


def _shown(value: Value) -> str:
    return value if isinstance(value, str) else json.dumps(int(value) if value.is_integer() else value)


def _draw(panel: Panel, metric: str) -> Chart:
    axis = panel.axis
    place: dict[Value, float] = {
        value: value if isinstance(value, float) and axis.is_numeric else float(number)
        for number, value in enumerate(axis.values)
    }

    def draw(axes: Axes) -> None:
        colors = _colors(len(panel.lines) if panel.is_joined else 1)
        for number, (name, at) in enumerate(panel.lines):
            color = colors[number % len(colors)]
            x = [place[value] for value in at]
            mean = np.array([statistics.fmean(ys) for ys in at.values()])
            if panel.is_joined:
                axes.plot(x, mean, color=color, linewidth=1.6, marker="o", markersize=3.5, alpha=0.9, label=name)
            else:
                axes.plot(x, mean, color=color, linestyle="", marker="o", markersize=4, alpha=0.7)
            deviation = np.array([statistics.stdev(ys) if len(ys) > 1 else 0.0 for ys in at.values()])
            if deviation.any() and panel.is_joined:
                axes.fill_between(x, mean - deviation, mean + deviation, color=color, alpha=0.18, linewidth=0)
        if axis.is_logarithmic:
            axes.set_xscale("log")
            axes.tick_params(which="minor", color=INK, labelcolor=INK)
        elif not axis.is_numeric:
            axes.set_xticks(range(len(axis.values)), [_short(value) for value in axis.values])
        axes.set_ylim(*panel.limits)
        if panel.legend:
            legend = axes.legend(
                title=panel.legend,
                frameon=False,
                labelcolor=INK,
                fontsize=7.5,
                title_fontsize=7.5,
                loc="center left",
                bbox_to_anchor=(1.0, 0.5),
                handlelength=1.2,
                labelspacing=0.25,
            )
            legend.get_title().set_color(INK)

    title = f"{metric}, by {axis.title}" + (f"; {panel.title}" if panel.title else "")
    return chart(title, draw, x_label=axis.key)


def _colors(num: int) -> list[str]:
    """Return the colours of so many lines: those of the report, or steps of one scale if they do not suffice."""
    if num <= len(COLORS):
        return [color_of(number) for number in range(num)]
    return [to_hex(colormaps["plasma"](0.2 + 0.65 * number / (num - 1))) for number in range(num)]


def _short(value: Value) -> str:
    text = _shown(value)
    return text if len(text) <= 18 else f"…{text[-17:]}"
