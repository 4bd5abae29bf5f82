"""Draw the accuracies of a setting: a panel for each label, in it a line over the difficulty for each cure.

A setting of one difficulty has a point for each cure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.observability.figures import to_png
from trainer.reports.suppression.measured import Setting, number_of
from trainer.reports.suppression.rises import Rises
from trainer.reports.suppression.verdicts import Column

# Twelve colours that can be told apart on white; further cures get them again with another line.
COLORS = (
    "#3b82d6", "#e2703a", "#2f9e77", "#a862c9", "#b8912a", "#c94f6d",
    "#1b4f8f", "#8a3d12", "#5ba3a8", "#6d2f8f", "#7a8a1f", "#e391a8",
)  # fmt: skip
STYLES = ("-", "--", ":", "-.")
MARKERS = "osD^vPX<>*"
HARD_COLORS, EASY_COLORS = ("#e2703a", "#c94f6d", "#b8912a"), ("#3b82d6", "#2f9e77", "#5ba3a8")
GREY = "#8a939c"
PANEL, SMALL_PANEL = (4.4, 3.4), (3.2, 2.7)  # inches
_MOST_PANELS = 4  # side by side
MEASURE = "linear probe, test accuracy in %"


def draw_setting(setting: Setting, columns: Mapping[tuple[str, str], Column], *, cures: Sequence[str]) -> bytes:
    """Return the figure of a setting as PNG. `columns` has the numbers by label and difficulty.

    `cures` are those of the whole page, so that a cure has the same line in every figure.
    """
    labels = [label for label in setting.labels if any(columns[label, one].of_cure for one in setting.difficulties)]
    with mpl.rc_context({"font.size": 9, "font.family": "sans-serif"}):
        height = max(PANEL[1], 0.2 * len(setting.cures) + 0.8)
        figure = Figure(figsize=(PANEL[0] * max(len(labels), 1) + 2.2, height), layout="constrained")
        panels = figure.subplots(1, max(len(labels), 1), squeeze=False, sharey=True)[0]
        for axes, label in zip(panels, labels, strict=False):
            of_label = [columns[label, difficulty] for difficulty in setting.difficulties]
            draw = _draw_points if setting.has_one else _draw_lines
            draw(axes, setting, of_label, cures)
            axes.set_title(setting.title_and_kind(label), fontsize=10)
        if not setting.has_one:
            panels[0].set_ylabel(MEASURE)
        handles: dict[str, Artist] = {}
        for axes in panels:
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(name, handle)
        if handles:
            figure.legend(list(handles.values()), list(handles), loc="outside right center", frameon=False, fontsize=8)
        return to_png(figure)


def draw_rises(found: Sequence[Rises]) -> bytes:
    """Return a figure as PNG with a panel for each setting: a line for each label over the steps of training."""
    num_columns = min(_MOST_PANELS, len(found))
    num_rows = -(-len(found) // num_columns)
    width, height = SMALL_PANEL
    with mpl.rc_context({"font.size": 9, "font.family": "sans-serif"}):
        figure = Figure(figsize=(width * num_columns, height * num_rows), layout="constrained")
        panels = list(figure.subplots(num_rows, num_columns, squeeze=False, sharey=True).flat)
        for axes, one in zip(panels, found, strict=False):
            for rise in sorted(one.rises, key=lambda rise: one.setting.labels.index(rise.label)):
                is_hard = rise.label in one.setting.hard
                ranks = one.setting.hard if is_hard else one.setting.easy
                color = (HARD_COLORS if is_hard else EASY_COLORS)[ranks.index(rise.label) % len(HARD_COLORS)]
                label = one.setting.title_and_kind(rise.label)
                values = [100 * accuracy for accuracy in rise.accuracy.values()]
                axes.plot(
                    list(rise.accuracy), values, "-" if is_hard else "--", color=color, linewidth=1.8, label=label
                )
                if rise.half_at is not None:
                    axes.plot(rise.half_at, 100 * rise.accuracy[rise.half_at], "o", color=color, markersize=5)
            axes.set_title(f"{one.setting.name}{one.setting.at(one.difficulty)}", fontsize=10)
            axes.set(ylim=(0, 102), xlabel="training step")
            axes.grid(alpha=0.25, linewidth=0.7)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=8)
        for axes in panels[len(found) :]:
            axes.set_axis_off()
        figure.supylabel("ridge regression, test accuracy in %", fontsize=9)
        return to_png(figure)


def _draw_lines(axes: Axes, setting: Setting, columns: Sequence[Column], cures: Sequence[str]) -> None:
    numbers = [number_of(difficulty) for difficulty in setting.difficulties]
    is_scale = all(number is not None for number in numbers)
    x = [float(number or 0.0) for number in numbers] if is_scale else [float(one) for one in range(len(numbers))]
    for number, cure in enumerate(cures):
        found = [(at, column.of_cure[cure]) for at, column in zip(x, columns, strict=True) if cure in column.of_cure]
        if not found:
            continue
        at = [one for one, _ in found]
        mean, width = (
            100 * np.array([getattr(estimate, name) for _, estimate in found]) for name in ("mean", "half_width")
        )
        color, style = COLORS[number % len(COLORS)], STYLES[number // len(COLORS) % len(STYLES)]
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(at, mean, style, color=color, marker=marker, markersize=4, linewidth=1.6, label=cure)
        low, high = np.maximum(mean - width, 0), np.minimum(mean + width, 100)
        axes.fill_between(at, low, high, color=color, alpha=0.1, linewidth=0)
    for (name, style), values in _references(columns).items():
        drawn = [(at, 100 * value) for at, value in zip(x, values, strict=True) if value is not None]
        if drawn:
            marker = "_" if len(drawn) == 1 else ""
            axes.plot(*zip(*drawn, strict=True), style, color=GREY, linewidth=1.4, label=name, marker=marker, zorder=1)
    if is_scale and min(x) > 0 and max(x) >= 10 * min(x):
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(x, setting.difficulties)
    if x[0] > x[-1]:
        axes.invert_xaxis()  # the easiest is on the left
    axes.set(xlabel=setting.unit or "difficulty", ylim=(0, 102))
    axes.grid(alpha=0.25, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_points(axes: Axes, setting: Setting, columns: Sequence[Column], cures: Sequence[str]) -> None:
    """Draw the accuracies of a setting of one difficulty: a row for each cure, in their order from above."""
    (column,) = columns
    order = [cure for cure in reversed(cures) if cure in setting.cures]
    for row, cure in enumerate(order):
        if (found := column.of_cure.get(cure)) is not None:
            color = COLORS[cures.index(cure) % len(COLORS)]
            axes.errorbar(100 * found.mean, row, xerr=100 * found.half_width, fmt="o", color=color, markersize=5)
    for (name, style), (value,) in _references(columns).items():
        if value is not None:
            axes.axvline(100 * value, linestyle=style, color=GREY, linewidth=1.4, label=name, zorder=1)
    axes.set_yticks(range(len(order)), order)
    axes.set(xlabel=MEASURE, xlim=(0, 102), ylim=(-0.6, len(order) - 0.4))
    axes.grid(alpha=0.25, linewidth=0.7, axis="x")
    axes.spines[["top", "right"]].set_visible(False)


def _references(columns: Sequence[Column]) -> Mapping[tuple[str, str], list[float | None]]:
    """Return the grey lines by name and style: for each of the columns a value, or None if it is not measured."""
    return {
        ("ceiling (trained with the label)", "-"): [one.ceiling.mean if one.ceiling else None for one in columns],
        ("untrained encoder", "--"): [one.untrained.mean if one.untrained else None for one in columns],
        ("raw pixels", "-."): [one.pixels.mean if one.pixels else None for one in columns],
        ("chance", ":"): [one.chance for one in columns],
    }
