"""Draw line charts as inline SVG. They follow the light or dark colours of the page. Equal input gives equal text."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy.stats import spearmanr

from trainer.observability.figures import to_png
from trainer.reports.comparison import last_rows
from trainer.reports.runs import Run
from trainer.reports.table import FEATURES, Measurement

# Readable on white and on near-black. If there are more encoders, colours are repeated.
COLORS = ("#3b82d6", "#e2703a", "#2f9e77", "#a862c9", "#b8912a", "#c94f6d", "#6b7f94", "#5ba3a8")
INK = "#010203"  # stands for the page's text colour until the SVG is written
LOSSES = {"train/loss": "Loss of the encoder", "train/viewmaker_loss": "Loss of the viewmaker"}
ONLINE = {"online_knn": "kNN", "online_ridge": "Ridge regression"}
MOST_POINTS = 300  # of a line; of a longer one, means of neighbours are drawn
MOST_LINES = 8  # of a chart over a setting; more configurations become points
_LOG_RATIO = 10.0  # values that span this or more have a logarithmic axis


@dataclass(frozen=True)
class Chart:
    """A chart as an `<svg>` element that can stand in a page as it is, and its title."""

    title: str
    svg: Markup


def color_of(number: int) -> str:
    return COLORS[number % len(COLORS)]


def curves(runs: Sequence[Run], rows: Sequence[Measurement], names: Mapping[str, str]) -> list[Chart]:
    """Draw the losses and the online probes by step: a line for each encoder. `names` has the encoder of each run."""
    encoders = list(dict.fromkeys(names.values()))
    drawn = []
    for metric, title in LOSSES.items():
        of_runs = [(names[run.name], run.by_step(metric)) for run in runs if run.name in names]
        drawn.append((title, of_runs))
    for label in dict.fromkeys(row.label for row in rows):
        for readout, method in ONLINE.items():
            by_run: dict[tuple[str, str], dict[int, float]] = {}
            for row in rows:
                if (row.label, row.readout) == (label, readout):
                    by_run.setdefault((row.encoder, row.run), {})[row.step] = 100 * row.value
            label_title = next(row.title for row in rows if row.label == label) or f"{label} label"
            title = f"{method} of the {label_title} while training, on some samples, %"
            drawn.append((title, [(encoder, points) for (encoder, _), points in by_run.items()]))
    found = []
    for title, of_runs in drawn:
        lines = []
        for number, encoder in enumerate(encoders):
            of_seeds = [points for name, points in of_runs if name == encoder and points]
            if steps := sorted(set.intersection(*map(set, of_seeds))) if of_seeds else []:
                y_SN = np.array([[points[step] for step in steps] for points in of_seeds])
                lines.append((color_of(number), np.array(steps), y_SN))
        if lines:
            found.append(chart(title, partial(_draw, lines=lines), x_label="training step"))
    return found


def _thinned(values_N: NDArray[Any]) -> list[float]:
    parts = np.array_split(values_N, min(len(values_N), MOST_POINTS))
    return [float(part.mean()) for part in parts]


def _draw(axes: Axes, lines: Sequence[tuple[str, NDArray[np.int64], NDArray[np.float64]]]) -> None:
    """Draw lines: the color, the steps (N,), and the values of all seeds (S, N), with a band of their deviation."""
    for color, step_N, y_SN in lines:
        x, mean = _thinned(step_N), np.array(_thinned(y_SN.mean(0)))
        axes.plot(x, mean, color=color, linewidth=1.6, marker="o" if len(x) < 3 else "", alpha=0.9)
        if len(y_SN) > 1:
            deviation = np.array(_thinned(y_SN.std(0, ddof=1)))
            axes.fill_between(x, mean - deviation, mean + deviation, color=color, alpha=0.18, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def sweep_charts(rows: Sequence[Measurement], axes: Sequence[str]) -> list[Chart]:
    """Draw the accuracy of each label over each setting of a sweep, by linear probe, or without one by online probes.

    Configurations that differ in this setting alone are a line, if there are few lines; otherwise all are points.
    """
    probed = [row for row in last_rows(rows) if row.readout == "linear" and row.reads == FEATURES]
    readings = probed or last_rows(row for row in rows if row.readout in ONLINE)
    if readings:
        readings = [row for row in readings if row.comparable == readings[0].comparable]
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for row in readings:
        groups.setdefault((row.label, row.readout), []).append(row)
    charts = []
    for axis in axes:
        values = list(dict.fromkeys(row.factors[axis] for row in readings if axis in row.factors))
        for (label, readout), of_group in groups.items():
            points: dict[tuple[str, ...], list[tuple[str, float]]] = {}
            for row in of_group:
                if axis in row.factors:
                    others = [key for key in axes if key != axis and key in row.factors]
                    line = tuple(f"{key.rpartition('.')[2]}={row.factors[key]}" for key in others)
                    points.setdefault(line, []).append((row.factors[axis], 100 * row.value))
            if len(values) > 1:
                method = ONLINE.get(readout, "Linear probe")
                title = f"{method} of the {of_group[0].title or f'{label} label'}, %, by {axis.rpartition('.')[2]}"
                charts.append(chart(title, partial(_over, points=points, values=values), x_label=axis))
    return charts


def _over(axes: Axes, points: Mapping[tuple[str, ...], Sequence[tuple[str, float]]], values: Sequence[str]) -> None:
    numbers = [number_of(value) for value in values]
    is_numeric = all(number is not None for number in numbers)
    place = {
        value: float(number or 0.0) if is_numeric else float(at)
        for at, (value, number) in enumerate(zip(values, numbers, strict=True))
    }
    is_line = len(points) <= MOST_LINES
    for number, (others, of_line) in enumerate(points.items()):
        at: dict[float, list[float]] = {}
        for value, accuracy in of_line:
            at.setdefault(place[value], []).append(accuracy)
        x = sorted(at)
        axes.plot(
            x,
            [statistics.fmean(at[one]) for one in x],
            "o-" if is_line else "o",
            color=color_of(number if is_line else 0),
            markersize=3.5,
            linewidth=1.6,
            alpha=0.9,
            label=", ".join(others),
        )
    if not is_numeric:
        axes.set_xticks(list(place.values()), [value if len(value) <= 18 else f"…{value[-17:]}" for value in place])
    elif min(place.values()) > 0 and max(place.values()) >= _LOG_RATIO * min(place.values()):
        axes.set_xscale("log")
        axes.tick_params(which="minor", color=INK, labelcolor=INK)
    if is_line and len(points) > 1:
        axes.legend(frameon=False, labelcolor=INK, fontsize=7.5)


def number_of(text: str) -> float | None:
    """Return a level of a factor as a number; None if it is a word."""
    try:
        return float(text)
    except ValueError:
        return None


def rank_scatter(panels: Mapping[str, Mapping[str, tuple[float, float]]], *, x_label: str, y_label: str) -> bytes:
    """Draw named points (x, y) as PNG, one panel for each title, which gets Spearman's correlation and its p."""
    figure = Figure(figsize=(3.2 * len(panels), 3.2), layout="constrained")
    for axes, (title, points) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        x, y = zip(*points.values(), strict=True)
        found = spearmanr(x, y)
        axes.plot(x, y, "o", color=COLORS[0], markersize=4)
        for name, place in points.items():
            axes.annotate(name, place, xytext=(4, 3), textcoords="offset points", fontsize=8)
        axes.set_title(f"{title}: rank correlation {found.statistic:.2f}, p {found.pvalue:.2g}", fontsize=8)
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.margins(0.15)
    return to_png(figure)


def chart(title: str, draw: Callable[[Axes], None], *, x_label: str) -> Chart:
    """Return a chart in the style of the page, into whose axes `draw` has drawn."""
    style: Any = {"svg.hashsalt": "report", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
    with mpl.rc_context(style):
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


def _inline(svg: str, title: str) -> Markup:
    """Return the `<svg>` element without metadata, with the size and the text colour of the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<g id=\"[^\"]*\">", "<g>", svg)  # ids that nothing uses, and that two charts would share
    svg = re.sub(r"(<svg[^>]*?) width=\"[^\"]*\"", r"\1", svg, count=1)
    label = f' role="img" aria-label="{escape(title)}"'
    svg = re.sub(r"(<svg[^>]*?) height=\"[^\"]*\"", lambda match: match[1] + label, svg, count=1)
    svg = re.sub(r" d=\"[^\"]*\"", lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), svg)
    return Markup(svg.replace(INK, "currentColor").strip())
