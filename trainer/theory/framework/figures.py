"""Draw the figures of the experiments as PNG: panels of curves with bands, and maps of a quantity over a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure
from torch import Tensor

from trainer.observability.figures import to_png
from trainer.theory.framework.claim import t_bounds

Values = Sequence[float] | Tensor
COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
)  # distinct for colour-blind readers
_INK = "#333333"


@dataclass(frozen=True)
class Curve:
    """A line, or markers alone if `style` is "". The band from `low` to `high` is shaded. `color` indexes `COLORS`."""

    x: Values
    y: Values
    label: str = ""
    color: int = 0
    style: str = "-"
    marker: str = ""
    low: Values | None = None
    high: Values | None = None


def mean_curve(
    x: Values, values_SX: Tensor, label: str = "", color: int = 0, *, style: str = "-", marker: str = ""
) -> Curve:
    """Return the mean over seeds as a curve, with its 95 % t-intervals as a band."""
    mean_X, low_X, high_X = t_bounds(values_SX)
    return Curve(x, mean_X, label, color, style, marker, low_X, high_X)


@dataclass(frozen=True)
class Panel:
    """Curves in one pair of axes. `vertical` lists values of x to mark, such as the step at which the noise starts."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    vertical: Sequence[float] = field(default_factory=tuple)
    y_range: tuple[float | None, float | None] | None = None
    log_x: bool = False


@dataclass(frozen=True)
class Map:
    """A quantity over a grid, as (Y, X) values. Colours are centred on 0, or span the values."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    y: Sequence[float]
    values_YX: Tensor
    centred: bool = True


@dataclass(frozen=True)
class PanelGrid:
    """The panels of one figure, row by row. `panel_size` is the width and height in inches of 100 pixels."""

    panels: Sequence[Panel | Map]
    num_columns: int = 3
    panel_size: tuple[float, float] = (3.7, 2.9)


def draw(grid: PanelGrid) -> bytes:
    """Return a PNG of the panels."""
    panels, num_columns, (width, height) = grid.panels, grid.num_columns, grid.panel_size
    num_rows = -(-len(panels) // num_columns)
    figure = Figure(figsize=(width * num_columns, height * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    for panel, axis in zip(panels, axes.flat, strict=False):
        if isinstance(panel, Panel):
            _draw_curves(axis, panel)
        else:
            _draw_map(figure, axis, panel)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    return to_png(figure)


def _draw_curves(axis: Any, panel: Panel) -> None:
    for curve in panel.curves:
        x, color = _array(curve.x), COLORS[curve.color % len(COLORS)]
        if curve.low is not None and curve.high is not None:
            axis.fill_between(x, _array(curve.low), _array(curve.high), color=color, alpha=0.18, linewidth=0)
        style = {"linestyle": curve.style or "none", "marker": curve.marker, "markersize": 4}
        axis.plot(x, _array(curve.y), color=color, label=curve.label or None, **style)
    for x_mark in panel.vertical:
        axis.axvline(x_mark, color=_INK, linewidth=0.8, linestyle=":")
    if panel.y_range is not None:
        axis.set_ylim(*panel.y_range)
    if panel.log_x:
        axis.set_xscale("log")
        values = sorted({float(x) for curve in panel.curves for x in _array(curve.x)})
        if len(values) <= 8:  # label each value of a short sweep
            axis.set_xticks(values, [f"{value:g}" for value in values])
            axis.set_xticks([], minor=True)
    axis.grid(alpha=0.2, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    if any(curve.label for curve in panel.curves):
        axis.legend(fontsize=7, frameon=False)
    _name(axis, panel)


def _draw_map(figure: Figure, axis: Any, panel: Map) -> None:
    values_YX = panel.values_YX.double().numpy()
    norm = CenteredNorm() if panel.centred else None
    image = axis.imshow(
        values_YX, origin="lower", aspect="auto", norm=norm, cmap="RdBu_r" if panel.centred else "viridis"
    )
    for values, set_ticks in ((panel.x, axis.set_xticks), (panel.y, axis.set_yticks)):
        shown = range(0, len(values), max(1, -(-len(values) // 8)))
        set_ticks(list(shown), [f"{values[place]:g}" for place in shown])
    figure.colorbar(image, ax=axis).ax.tick_params(labelsize=7)
    if values_YX.size <= 64:
        for (row, column), value in np.ndenumerate(values_YX):
            shade = image.to_rgba(value)[:3]
            ink = "white" if 0.3 * shade[0] + 0.59 * shade[1] + 0.11 * shade[2] < 0.5 else _INK
            axis.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=7, color=ink)
    _name(axis, panel)


def _name(axis: Any, panel: Panel | Map) -> None:
    axis.set_title(panel.title, fontsize=9)
    axis.set_xlabel(panel.x_label, fontsize=8)
    axis.set_ylabel(panel.y_label, fontsize=8)
    axis.tick_params(labelsize=7, colors=_INK)


def _array(values: Values) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(values.cpu() if isinstance(values, Tensor) else values, dtype=np.float64)
