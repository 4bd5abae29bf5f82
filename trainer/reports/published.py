"""The tables of the papers: each cell has the name of the run that measures it, and the published number.

Each study of configs/studies.py has a table of the same name. The runs of its small form, NAME_small, have the same
names with the ending "-small", and fill the same cells. Invariant: every number here is in a paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

from data_pipeline.core.errors import UserError, nearest
from data_pipeline.core.imports import import_object
from trainer.config import RunConfig
from trainer.probes.features import LabelSpace

SMALL_STUDY, SMALL_RUN = "_small", "-small"
HUANG_SEEDS = 3  # of each mean and deviation in Huang et al. 2023; the deviation has the divisor n

Measure = Literal["linear", "knn_best"]


@dataclass(frozen=True)
class Value:
    """A published accuracy in per cent, with the deviation over seeds if the paper gives one."""

    mean: float
    deviation: float | None = None

    def __str__(self) -> str:
        mean = (
            f"{self.mean:.2f}" if round(self.mean, 1) != self.mean or self.deviation is not None else f"{self.mean:.1f}"
        )
        return mean if self.deviation is None else f"{mean} ± {self.deviation:.2f}"


@dataclass(frozen=True)
class Column:
    """A column of a table. Columns of one `group` stand together under its title, and show the same quantity."""

    group: str
    title: str
    label: LabelSpace = "base"


@dataclass(frozen=True)
class Cell:
    """The run that fills a cell, by the name in its config; `published` is None if the paper has no number."""

    run: str
    num_epochs: int
    published: Value | None


@dataclass(frozen=True)
class Contrast:
    """Two cells, each as (row, number of the column), and how the paper ranks them.

    sign: 1 if the first cell is higher, -1 if it is lower.
    points: the published difference; None if only its sign is published.
    """

    first: tuple[str, int]
    second: tuple[str, int]
    sign: Literal[1, -1]
    points: float | None


@dataclass(frozen=True)
class Study:
    """A published table.

    cells: by row and number of the column; the table may lack cells.
    num_train, batch_size, encoder: those of the paper. Only levels of runs that agree with them are compared.
    num_small_columns: the number of columns, from the left, of the small form; None: all.
    """

    name: str
    title: str
    source: str
    measure: Measure
    row_title: str
    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    cells: Mapping[tuple[str, int], Cell]
    contrasts: tuple[Contrast, ...]
    num_train: int
    batch_size: int
    encoder: str
    num_small_columns: int | None = None
    is_small: bool = False

    def command(self) -> str:
        """Return the command that trains all its runs."""
        return f"python launch/slurm.py --study studies:{self.name}"

    def recipes(self) -> dict[str, RunConfig]:
        """Return the configs of its runs, by their names.

        configs/ imports this package, so its studies are found by their import path.
        """
        runs: list[RunConfig] = import_object(f"configs.studies:{self.name}")()
        return {run.name: run for run in runs}


def study(name: str) -> Study:
    """Return the study of that name, with or without "studies:". Raises `UserError` with the nearest name."""
    name = name.removeprefix("studies:")
    known = [form for full in STUDIES for form in (full, full + SMALL_STUDY)]
    if name not in known:
        raise UserError(f'there is no study "{name}"{nearest(name, known)}')
    full = STUDIES[name.removesuffix(SMALL_STUDY)]
    return full if name == full.name else _small(full)


def _small(full: Study) -> Study:
    columns = full.columns[: full.num_small_columns]
    cells = {
        (row, number): replace(cell, run=cell.run + SMALL_RUN)
        for (row, number), cell in full.cells.items()
        if number < len(columns)
    }
    contrasts = tuple(contrast for contrast in full.contrasts if {contrast.first, contrast.second} <= set(cells))
    return replace(full, name=full.name + SMALL_STUDY, columns=columns, cells=cells, contrasts=contrasts, is_small=True)


def _table(
    *,
    columns: Sequence[tuple[Column, str]],
    rows: Mapping[str, str],
    row_runs: Mapping[str, str] | None = None,
    num_epochs: int | None = None,
    compare: Literal["along rows", "along columns"],
    further_pairs: Sequence[tuple[str, str]] = (),
    **fields: Any,
) -> Study:
    """Build a study from its table as text.

    columns: each with the name of its runs, in which {row} stands for the row.
    rows: by title, a word for each cell: a mean, mean±deviation, "?" if the paper has no number, "-" for no cell.
    row_runs: the text that replaces {row}, by row (default: the row's title).
    num_epochs: of all runs; None if the title of each row is the number.
    compare: each cell is compared with the one before it, in its row (within a group of columns) or in its column.
    further_pairs: rows that are compared too, in every column.
    fields: the other fields of the study.
    """
    cells = {
        (row, number): Cell(
            run=run.format(row=row if row_runs is None else row_runs[row]),
            num_epochs=int(row) if num_epochs is None else num_epochs,
            published=None if word == "?" else Value(*map(float, word.split("±"))),
        )
        for row, words in rows.items()
        for number, ((_, run), word) in enumerate(zip(columns, words.split(), strict=True))
        if word != "-"
    }
    titles, heads = tuple(rows), tuple(column for column, _ in columns)
    numbers = range(len(heads))
    if compare == "along rows":
        pairs = [
            ((row, number), (row, number - 1))
            for row in titles
            for number in numbers[1:]
            if heads[number].group == heads[number - 1].group
        ]
    else:
        pairs = [((above, number), (row, number)) for above, row in pairwise(titles) for number in numbers]
    pairs += [((row, number), (other, number)) for row, other in further_pairs for number in numbers]
    return Study(
        rows=titles,
        columns=heads,
        cells=MappingProxyType(cells),
        contrasts=_contrasts(cells, pairs),
        **fields,
    )


def _contrasts(
    cells: Mapping[tuple[str, int], Cell], pairs: Sequence[tuple[tuple[str, int], tuple[str, int]]]
) -> tuple[Contrast, ...]:
    """Return the pairs that differ by more than two standard errors, as far as the paper has both numbers."""
    contrasts = []
    for first, second in pairs:
        a, b = (cells[place].published if place in cells else None for place in (first, second))
        if a is None or b is None:
            continue
        error = math.hypot(a.deviation or 0.0, b.deviation or 0.0) / math.sqrt(HUANG_SEEDS - 1)
        points = round(a.mean - b.mean, 2)
        if abs(points) > 2 * error:
            contrasts.append(Contrast(first, second, 1 if points > 0 else -1, points))
    return tuple(contrasts)


_TAMKIN = "Tamkin et al. 2022"
_pictures = partial(_table, measure="linear", num_train=50_000, batch_size=256, encoder="resnet18_small")
_sounds = partial(_table, measure="linear", num_train=24_000, batch_size=128, encoder="resnet18")
_OBJECT_SETS = {"C+Shapes": "cifar10_shapes", "C+Digits": "cifar10_digits", "C+Letters": "cifar10_letters"}


def _both_labels(base: str, overlay: str, runs: Mapping[str, str]) -> list[tuple[Column, str]]:
    """Return a column for each policy and label; `runs` are the names of the runs by policy."""
    groups: tuple[tuple[str, LabelSpace], ...] = ((base, "base"), (overlay, "overlay"))
    return [(Column(group, policy, label), run) for group, label in groups for policy, run in runs.items()]


_TABLE_1 = _pictures(
    name="table1",
    title="Expert views and a viewmaker on pictures with two features",
    source=f"{_TAMKIN}, Table 1",
    row_title="data",
    columns=_both_labels("CIFAR-10", "object", {"expert views": "simclr-{row}", "viewmaker": "viewmaker-{row}"}),
    rows={
        "CIFAR-10": "86.2 84.5 - -",
        "C+Shapes": "76.0 79.8 100.0 100.0",
        "C+Digits": "58.8 69.3 86.7 94.3",
        "C+Letters": "74.8 71.9 94.1 96.9",
    },
    row_runs={"CIFAR-10": "cifar10"} | _OBJECT_SETS,
    num_epochs=200,
    compare="along rows",
    further_pairs=[(row, "CIFAR-10") for row in _OBJECT_SETS],  # the cost of an object
)
_TABLE_2 = _sounds(
    name="table2",
    title="Expert views and a viewmaker on spoken digits with a background",
    source=f"{_TAMKIN}, Table 2",
    row_title="data",
    columns=_both_labels(
        "speech", "sound", {policy: f"audio-{policy}{{row}}" for policy in ("spectral", "waveform", "viewmaker")}
    ),
    rows={
        "speech": "97.0 76.7 92.4 - - -",
        "sound": "- - - 32.64 100.0 100.0",
        "speech + sound": "10.1 53.6 60.8 47.2 43.3 97.0",
    },
    row_runs={"speech": "-spoken", "sound": "-noise", "speech + sound": ""},
    num_epochs=200,
    compare="along rows",
    further_pairs=[("speech + sound", "speech"), ("speech + sound", "sound")],  # the cost of mixing
)
_TABLE_3 = _pictures(
    name="table3",
    title="A viewmaker that may not change the object",
    source=f"{_TAMKIN}, Table 3",
    row_title="data",
    columns=_both_labels(
        "CIFAR-10", "object", {"viewmaker": "viewmaker-{row}", "masked viewmaker": "viewmaker-{row}-masked"}
    ),
    rows={
        "C+Shapes": "79.8 26.0 100.0 95.8",
        "C+Digits": "69.3 50.7 94.3 95.0",
        "C+Letters": "71.9 23.2 96.9 71.8",
    },
    row_runs=_OBJECT_SETS,
    num_epochs=200,
    compare="along rows",
)

_HUANG = "Huang et al. 2023"
_votes = partial(_table, measure="knn_best", num_train=50_000, batch_size=512, encoder="resnet18_small")
_METHODS = {"SimCLR": "simclr-huang", "Barlow Twins": "barlow_twins", "MoCo": "moco", "SimSiam": "simsiam"}


def _methods(ending: str) -> list[tuple[Column, str]]:
    """Return a column for each dataset and method; the names of their runs end with `ending`."""
    return [
        (Column(data, method), f"{run}-{dataset}{ending}")
        for data, dataset in {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}.items()
        for method, run in _METHODS.items()
    ]


_RICHNESS = _votes(
    name="richness",
    title="Richer views",
    source=f"{_HUANG}, richer views",
    row_title="transforms",
    columns=_methods("-{row}"),
    rows={
        "abcde": "89.76±.12 86.91±.09 90.12±.12 90.59±.11 57.74±.12 57.99±.29 64.19±.14 63.48±.16",
        "abcd": "88.48±.22 85.38±.37 89.69±.11 89.34±.09 55.43±.10 55.22±.25 62.50±.28 60.31±.41",
        "abc": "83.50±.14 82.00±.59 86.78±.07 85.38±.09 45.10±.25 50.40±.64 57.04±.21 51.42±.14",
        "ab": "63.23±.05 67.83±.94 75.12±.28 63.27±.30 28.01±.18 34.11±.59 40.18±.04 26.26±.30",
        "a": "62.74±.18 67.77±.69 74.94±.22 61.47±.74 27.95±.09 34.05±1.13 39.63±.31 25.90±.83",
    },
    num_epochs=800,
    compare="along columns",
    further_pairs=[("abcde", "a")],
    num_small_columns=len(_METHODS),
)
_COLOUR = _votes(
    name="colour",
    title="Strength of the colours",
    source=f"{_HUANG}, strength of the colours",
    row_title="strength",
    columns=_methods("-ad-strength{row}"),
    rows={
        "1": "82.75±.24 82.58±.25 86.68±.05 82.50±1.05 46.67±.42 50.39±1.09 58.50±.51 49.94±2.01",
        "0.5": "78.76±.18 81.88±.25 84.30±.14 81.80±.15 40.21±.05 48.76±.25 55.08±.09 46.27±.46",
        "0.25": "76.37±.11 79.64±.34 82.76±.09 78.80±.17 36.67±.08 46.22±.71 52.09±.18 42.02±.34",
        "0.125": "74.23±.16 77.96±.16 81.20±.12 76.09±.50 34.75±.20 44.72±.26 49.43±.16 36.26±.34",
    },
    num_epochs=800,
    compare="along columns",
    further_pairs=[("1", "0.125")],
    num_small_columns=len(_METHODS),
)
_TEMPERATURES = _votes(
    name="temperatures",
    title="Alignment and divergence weighted apart, against SimCLR",
    source=f'{_HUANG}, table of "Ours" (which names no data set; by its level CIFAR-10)',
    row_title="epochs",
    columns=[
        (Column("CIFAR-10", "SimCLR, temperature 1"), "simclr-t1-{row}epochs"),
        (Column("CIFAR-10", "SimCLR, temperature 0.5"), "simclr-t0.5-{row}epochs"),
        (Column("CIFAR-10", "split loss"), "split-t0.2-{row}epochs"),
    ],
    rows={"200": "76.8 80.4 83.0", "400": "80.6 84.1 86.2", "600": "84.3 87.4 88.7", "800": "86.8 89.4 90.3"},
    compare="along rows",
)

PAIRS = ("ab", "ac", "ad", "ae", "bc", "bd", "be", "cd", "ce", "de")
# The figure shows which pair is better, without numbers.
_BETTER_PAIRS = [("ad", other) for other in PAIRS if other != "ad"] + [("ac", "ae"), ("ac", "ab")]
_PAIRS = replace(
    _votes(
        name="pairs",
        title="Transforms composed in pairs",
        source=f"{_HUANG}, the figure of composed pairs, which has no numbers",
        row_title="transforms",
        columns=[(Column("CIFAR-10", "SimCLR"), "simclr-huang-cifar10-{row}-200epochs")],
        rows=dict.fromkeys(PAIRS, "?"),
        num_epochs=200,
        compare="along columns",
    ),
    contrasts=tuple(Contrast((better, 0), (other, 0), 1, None) for better, other in _BETTER_PAIRS),
)

STUDIES: Mapping[str, Study] = MappingProxyType(
    {table.name: table for table in (_TABLE_1, _TABLE_2, _TABLE_3, _RICHNESS, _COLOUR, _TEMPERATURES, _PAIRS)}
)
