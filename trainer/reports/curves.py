"""Draw line charts as inline SVG. They follow the light or dark colours of the page. Equal input gives equal text."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.probes.curve import online_labels
from trainer.probes.features import LabelSpace, label_order
from trainer.probes.result import ProbeResult
from trainer.reports.protocols import ProtocolArms, by_protocol, label_titles
from trainer.reports.runs import Arm, Run, labels_of, runs_of_arms

# Readable on white and on near-black. If there are more arms, colours are repeated.
COLORS = ("#3b82d6", "#e2703a", "#2f9e77", "#a862c9", "#b8912a", "#c94f6d", "#6b7f94", "#5ba3a8")
INK = "#010203"  # stands for the page's text colour until the SVG is written
_GROUP = "group-"  # begins the id of a line with a group, until the id becomes a class

# The metrics that are drawn if a run has them, with their titles. `metric_titles` adds those of the online probe.
METRICS = {
    "train/loss": "Encoder loss",
    "train/viewmaker_loss": "Viewmaker loss",
    "train/alignment": "Alignment of the two views (cosine)",
}
MAX_POINTS = 300
_SEEN = 0.02  # of the height of a chart: a band of the values of a point is drawn if it is higher
_MOST_HIGHER = 0.5  # of the height of a chart without these bands, by which they may extend it on each side


def color_of(number: int) -> str:
    """Return the colour of an arm by its number in the report."""
    return COLORS[number % len(COLORS)]


@dataclass(frozen=True)
class Line:
    """A line of a chart, dashed for the untrained encoder. `deviation` becomes a band around a mean over seeds.

    `group` is the class of the line in the SVG, by which a script can find it.
    """

    x: Sequence[float]
    y: Sequence[float]
    color: str
    style: Literal["-", "--"] = "-"
    deviation: Sequence[float] | None = None
    group: str = ""


Points = Mapping[int, float]  # y by x, of one run


@dataclass(frozen=True)
class Chart:
    """A chart as an `<svg>` element that can stand in a page as it is, and its title.

    num_averaged: the most values whose mean is one drawn point; 1 if every value is drawn.
    has_extremes: whether bands show the smallest and the largest of these values.
    """

    title: str
    svg: Markup
    num_averaged: int = 1
    has_extremes: bool = False


def metric_titles(runs: Sequence[Run], titles: Mapping[LabelSpace, str]) -> dict[str, str]:
    """Return the metrics that are drawn with their titles, which name the labels by `titles`."""
    logged = label_order(space for run in runs for space in online_labels(run.metrics.names))
    knn = {f"probe/{space}/knn": titles.get(space, f"{space} label") for space in logged}
    return METRICS | {key: f"kNN of the {title} while training, on some samples" for key, title in knn.items()}


def charts(arms: Sequence[Arm]) -> list[Chart]:
    """Draw the training metrics by step, and the probe accuracies by epoch of the probe and by checkpoint.

    Each probe protocol has its own charts. If the seeds of an arm have points at the same x, the chart shows their mean
    with its deviation, and after the last x of the shortest seed a line for each longer one. Otherwise it has a line
    for each seed.
    """
    titles = label_titles(arms)
    colored = [(arm, color_of(number)) for number, arm in enumerate(arms)]
    drawn = [
        line_chart(title, lines, x_label="training step")
        for key, title in metric_titles(runs_of_arms(arms), titles).items()
        if (
            lines := [line for arm, color in colored for line in lines_of([run.logged(key) for run in arm.runs], color)]
        )
    ]
    for group in by_protocol(arms):
        drawn += _probe_charts(group, titles)
    return drawn


def _probe_charts(group: ProtocolArms, titles: Mapping[LabelSpace, str]) -> list[Chart]:
    """Draw the probes of one protocol, in the colours of the whole report."""
    drawn = []
    colored = [(arm, color_of(number)) for number, arm in enumerate(group.arms)]
    note = f"; {group.title}" if group.title else ""
    for space in labels_of(runs_of_arms(group.arms)):
        fits: list[Line] = []
        for arm, color in colored:
            fits += lines_of([_fit(probe) for probe in arm.untrained(space)], color, style="--")
            fits += lines_of([_fit(probe) for probe in arm.trained(space)], color)
        if fits:
            title = f"Linear probe of the {titles[space]}, test accuracy in %{note}"
            drawn.append(line_chart(title, fits, x_label="probe epoch"))
        growth = [line for arm, color in colored for line in lines_of([_growth(run, space) for run in arm.runs], color)]
        if growth:
            title = f"Linear probe of the {titles[space]} by checkpoint, %{note}"
            drawn.append(line_chart(title, growth, x_label="training step"))
    return drawn


def lines_of(runs: Sequence[Points], color: str, *, style: Literal["-", "--"] = "-") -> list[Line]:
    """Return one line with the mean of the runs if they share most x, else a line for each run.

    A run that goes on after the last shared x has a line of its own from there.
    """
    runs = [points for points in runs if points]
    if not runs:
        return []
    common = sorted(set.intersection(*(set(points) for points in runs)))
    if len(runs) == 1 or 2 * len(common) < max(map(len, runs)):
        return [_line_of(points, color, style) for points in runs]
    y_CN = np.array([[points[x] for x in common] for points in runs])
    mean = Line(common, y_CN.mean(0).tolist(), color, style, y_CN.std(0, ddof=1).tolist())
    rests = [{x: y for x, y in points.items() if x >= common[-1]} for points in runs]
    return [mean, *(_line_of(rest, color, style) for rest in rests if len(rest) > 1)]


def _line_of(points: Points, color: str, style: Literal["-", "--"]) -> Line:
    return Line(sorted(points), [points[x] for x in sorted(points)], color, style)


def line_chart(title: str, lines: Sequence[Line], *, x_label: str) -> Chart:
    """Draw the lines in one chart. A line of more than `MAX_POINTS` points is thinned.

    A faint band then holds all of its values. It may be cut at the edge of the chart, so that a line beside a high peak
    is no flat line.
    """

    def draw(axes: Axes) -> None:
        for line in lines:
            x, y = thin(line.x, line.y)
            marker = "o" if len(x) < 3 else ""
            (drawn,) = axes.plot(x, y, color=line.color, linestyle=line.style, linewidth=1.6, marker=marker, alpha=0.9)
            drawn.set_gid(_GROUP + line.group if line.group else None)
            if line.deviation is not None:
                deviation = np.array(thin(line.x, line.deviation)[1])
                band = axes.fill_between(x, y - deviation, y + deviation, color=line.color, alpha=0.18, linewidth=0)
                band.set_gid(_GROUP + line.group if line.group else None)
        _draw_extremes(axes, [line for line in lines if num_averaged(len(line.x)) > 1])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))

    drawn = chart(title, draw, x_label=x_label)
    averaged = max((num_averaged(len(line.x)) for line in lines), default=1)
    return replace(drawn, num_averaged=averaged, has_extremes=averaged > 1)


def _draw_extremes(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw bands from the smallest to the largest value of each two points of the lines, if they can be seen and fit.

    A corner for each two points keeps a page small. The bands make the range of the chart larger by at most
    `_MOST_HIGHER` of it on each side, and are cut where they are higher. A line most of whose band would be higher than
    the chart has none, because it would only be a background.
    """
    low, high = axes.get_ylim()
    height = high - low
    bottom, top = low, high
    for line in lines:
        x, _ = thin(line.x, line.y, most=MAX_POINTS // 2)
        parts = np.array_split(np.asarray(line.y, dtype=np.float64), len(x))
        lowest, highest = np.array([part.min() for part in parts]), np.array([part.max() for part in parts])
        if np.median(highest - lowest) > (1 + 2 * _MOST_HIGHER) * height:
            continue
        is_seen = highest - lowest > _SEEN * height
        is_seen |= np.roll(is_seen, 1) | np.roll(is_seen, -1)  # a single point has no width
        # Its edge shows the peak of a single step, which is narrower than a pixel.
        axes.fill_between(x, lowest, highest, where=is_seen.tolist(), color=line.color, alpha=0.2, linewidth=0.8)
        bottom, top = min(bottom, lowest.min()), max(top, highest.max())
    axes.set_ylim(max(bottom, low - _MOST_HIGHER * height), min(top, high + _MOST_HIGHER * height))


def chart(title: str, draw: Callable[[Axes], None], *, x_label: str) -> Chart:
    """Return a chart in the style of the page, into whose axes `draw` has drawn."""
    with mpl.rc_context(
        {"svg.hashsalt": "report", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
    ):
        figure = Figure(figsize=(4.6, 2.5), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_xlabel(x_label, color=INK)
        axes.tick_params(colors=INK, length=3)
        axes.grid(color=INK, alpha=0.12, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set(color=INK, alpha=0.4)
        axes.margins(x=0.02)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Chart(title, _inline(file.getvalue(), title))


def thin(x: Sequence[float], y: Sequence[float], *, most: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """Return at most `most` points: the means of consecutive groups of nearly equal size."""
    if len(x) <= most:
        return list(x), list(y)
    return tuple(  # type: ignore[return-value]  # mypy does not count the two
        [float(part.mean()) for part in np.array_split(np.asarray(values, dtype=np.float64), most)] for values in (x, y)
    )


def num_averaged(num_points: int, *, most: int = MAX_POINTS) -> int:
    """Return the size of the largest group whose mean `thin` makes one point; 1 if it changes nothing."""
    return max(1, math.ceil(num_points / most))


def _fit(probe: ProbeResult) -> Points:
    return {epoch: 100 * accuracy for epoch, accuracy in enumerate(probe.linear.accuracy_by_epoch, 1)}


def _growth(run: Run, space: LabelSpace) -> Points:
    """Return the accuracy by checkpoint, after the last epoch of each probe; empty for two checkpoints or fewer."""
    points: Points = {
        step: 100 * probes[space].linear.accuracy for step, probes in run.probes.items() if space in probes
    }
    return points if len(points) > 2 else {}


def _inline(svg: str, title: str) -> Markup:
    """Return the `<svg>` element without metadata, with the size and the text colour of the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(rf"<g id=\"{_GROUP}([^\"]*)\">", r'<g class="\1">', svg)
    svg = re.sub(r"<g id=\"[^\"]*\">", "<g>", svg)  # ids that nothing uses, and that two charts would share
    svg = re.sub(r"(<svg[^>]*?) width=\"[^\"]*\"", r"\1", svg, count=1)
    label = f' role="img" aria-label="{escape(title)}"'
    svg = re.sub(r"(<svg[^>]*?) height=\"[^\"]*\"", lambda match: match[1] + label, svg, count=1)
    svg = re.sub(r' d="([^"]*)"', lambda match: f' d="{_short(match[1])}"', svg)
    return Markup(svg.replace(INK, "currentColor").strip())


def _short(path: str) -> str:
    """Return a path of an SVG in half as many characters: a hundredth of a point cannot be seen.

    Examples:
        >>> _short("M 0 180.125 \\nL 331.256789 -3 \\nz\\n")
        'M0 180.12L331.25 -3z'
    """
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", re.sub(r"(\.\d\d)\d+", r"\1", path))
