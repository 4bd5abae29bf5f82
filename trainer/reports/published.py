"""The tables of the papers: for each study its cells, each with the run that measures it and the published number.

Each study of configs/studies.py has an entry of the same name. The runs of its small form, NAME_small, have the same
names with the ending "-small", and stand in the same cells. Invariant: every number here is in a paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from data_pipeline.core.errors import UserError, nearest
from trainer.probes.features import LabelSpace

SMALL_STUDY, SMALL_RUN = "_small", "-small"
HUANG_SEEDS = 3  # behind each mean and deviation of Huang et al. 2023, a population's (divisor n)

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
    """A column of a table. Columns of one `group` stand together under its title and show the same quantity."""

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
    """Two cells, each as (row, column), of which the paper says that the first is higher or lower.

    `points` is the published difference, None where only its sign is published, in `sign`.
    """

    first: tuple[str, int]
    second: tuple[str, int]
    sign: Literal[1, -1]
    points: float | None


@dataclass(frozen=True)
class Study:
    """A table. `cells` are by row and number of the column; a cell that is not there is not in the table.

    `num_train`, `batch_size` and `encoder` are what a run needs for its level to be set against a published one.
    `num_small_columns`: so many from the left has the small form; None: all.
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


def _neighbours(
    rows: Sequence[str],
    columns: Sequence[Column],
    cells: Mapping[tuple[str, int], Cell],
    along: Literal["row", "column"],
) -> tuple[Contrast, ...]:
    """Return the contrast of each cell with the one before it: in its row, within a group, or in its column."""
    places = [(row, number) for row in rows for number in range(len(columns)) if (row, number) in cells]
    if along == "row":
        pairs = [
            ((row, number), (row, number - 1))
            for row, number in places
            if (row, number - 1) in cells and columns[number].group == columns[number - 1].group
        ]
    else:
        before = dict(zip(rows[1:], rows, strict=False))
        pairs = [
            ((before[row], number), (row, number))
            for row, number in places
            if row in before and (before[row], number) in cells
        ]
    return _contrasts(cells, pairs)


def _contrasts(
    cells: Mapping[tuple[str, int], Cell], pairs: Sequence[tuple[tuple[str, int], tuple[str, int]]]
) -> tuple[Contrast, ...]:
    """Return the pairs that differ by more than two standard errors, as far as the paper gives them."""
    contrasts = []
    for first, second in pairs:
        a, b = cells[first].published, cells[second].published
        if a is None or b is None:
            continue
        error = math.hypot(a.deviation or 0.0, b.deviation or 0.0) / math.sqrt(HUANG_SEEDS - 1)
        points = round(a.mean - b.mean, 2)
        if abs(points) > 2 * error:
            contrasts.append(Contrast(first, second, 1 if points > 0 else -1, points))
    return tuple(contrasts)


_TAMKIN = "Tamkin et al. 2022"
_PICTURE, _OBJECT = "CIFAR-10", "object"
_OBJECT_SETS = {"C+Shapes": "cifar10_shapes", "C+Digits": "cifar10_digits", "C+Letters": "cifar10_letters"}


def _both_labels(base: str, overlay: str, titles: Sequence[str]) -> tuple[Column, ...]:
    return tuple(Column(base, title, "base") for title in titles) + tuple(
        Column(overlay, title, "overlay") for title in titles
    )


def _table1() -> Study:
    # expert views and viewmaker on CIFAR-10, then on the object
    numbers: dict[str, tuple[float | None, ...]] = {
        "CIFAR-10": (86.2, 84.5, None, None),
        "C+Shapes": (76.0, 79.8, 100.0, 100.0),
        "C+Digits": (58.8, 69.3, 86.7, 94.3),
        "C+Letters": (74.8, 71.9, 94.1, 96.9),
    }
    columns = _both_labels(_PICTURE, _OBJECT, ("expert views", "viewmaker"))
    datasets = {"CIFAR-10": "cifar10"} | _OBJECT_SETS
    cells = {
        (row, number): Cell(f"{('simclr', 'viewmaker')[number % 2]}-{datasets[row]}", 200, Value(value))
        for row, values in numbers.items()
        for number, value in enumerate(values)
        if value is not None
    }
    costs_of_object = [((row, number), ("CIFAR-10", number)) for row in _OBJECT_SETS for number in (0, 1)]
    return Study(
        name="table1",
        title="Expert views and a viewmaker on pictures with two features",
        source=f"{_TAMKIN}, Table 1",
        measure="linear",
        row_title="data",
        rows=tuple(numbers),
        columns=columns,
        cells=MappingProxyType(cells),
        contrasts=_neighbours(tuple(numbers), columns, cells, "row") + _contrasts(cells, costs_of_object),
        num_train=50_000,
        batch_size=256,
        encoder="resnet18_small",
    )


def _table2() -> Study:
    # spectral, waveform, viewmaker on the digit, then on the background
    numbers: dict[str, tuple[float | None, ...]] = {
        "speech": (97.0, 76.7, 92.4, None, None, None),
        "sound": (None, None, None, 32.64, 100.0, 100.0),
        "speech + sound": (10.1, 53.6, 60.8, 47.2, 43.3, 97.0),
    }
    policies, endings = ("spectral", "waveform", "viewmaker"), {"speech": "-spoken", "sound": "-noise"}
    columns = _both_labels("speech", "sound", policies)
    cells = {
        (row, number): Cell(f"audio-{policies[number % 3]}{endings.get(row, '')}", 200, Value(value))
        for row, values in numbers.items()
        for number, value in enumerate(values)
        if value is not None
    }
    mixed = "speech + sound"
    costs_of_mixing = [((mixed, number), (row, number)) for row, number in cells if row != mixed]
    return Study(
        name="table2",
        title="Expert views and a viewmaker on spoken digits with a background",
        source=f"{_TAMKIN}, Table 2",
        measure="linear",
        row_title="data",
        rows=tuple(numbers),
        columns=columns,
        cells=MappingProxyType(cells),
        contrasts=_neighbours(tuple(numbers), columns, cells, "row") + _contrasts(cells, costs_of_mixing),
        num_train=24_000,
        batch_size=128,
        encoder="resnet18",
    )


def _table3() -> Study:
    # viewmaker and masked viewmaker on CIFAR-10, then on the object
    numbers = {
        "C+Shapes": (79.8, 26.0, 100.0, 95.8),
        "C+Digits": (69.3, 50.7, 94.3, 95.0),
        "C+Letters": (71.9, 23.2, 96.9, 71.8),
    }
    columns = _both_labels(_PICTURE, _OBJECT, ("viewmaker", "masked viewmaker"))
    cells = {
        (row, number): Cell(f"viewmaker-{_OBJECT_SETS[row]}{('', '-masked')[number % 2]}", 200, Value(value))
        for row, values in numbers.items()
        for number, value in enumerate(values)
    }
    return Study(
        name="table3",
        title="A viewmaker that may not change the object",
        source=f"{_TAMKIN}, Table 3",
        measure="linear",
        row_title="data",
        rows=tuple(numbers),
        columns=columns,
        cells=MappingProxyType(cells),
        contrasts=_neighbours(tuple(numbers), columns, cells, "row"),
        num_train=50_000,
        batch_size=256,
        encoder="resnet18_small",
    )


_HUANG = "Huang et al. 2023"
_METHODS = {"SimCLR": "simclr-huang", "Barlow Twins": "barlow_twins", "MoCo": "moco", "SimSiam": "simsiam"}
_DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}
_METHOD_COLUMNS = tuple(Column(data, method) for data in _DATA for method in _METHODS)

_RICHNESS = """
abcde 89.76±.12 86.91±.09 90.12±.12 90.59±.11 57.74±.12 57.99±.29 64.19±.14 63.48±.16
abcd 88.48±.22 85.38±.37 89.69±.11 89.34±.09 55.43±.10 55.22±.25 62.50±.28 60.31±.41
abc 83.50±.14 82.00±.59 86.78±.07 85.38±.09 45.10±.25 50.40±.64 57.04±.21 51.42±.14
ab 63.23±.05 67.83±.94 75.12±.28 63.27±.30 28.01±.18 34.11±.59 40.18±.04 26.26±.30
a 62.74±.18 67.77±.69 74.94±.22 61.47±.74 27.95±.09 34.05±1.13 39.63±.31 25.90±.83
"""
_COLOUR = """
1 82.75±.24 82.58±.25 86.68±.05 82.50±1.05 46.67±.42 50.39±1.09 58.50±.51 49.94±2.01
0.5 78.76±.18 81.88±.25 84.30±.14 81.80±.15 40.21±.05 48.76±.25 55.08±.09 46.27±.46
0.25 76.37±.11 79.64±.34 82.76±.09 78.80±.17 36.67±.08 46.22±.71 52.09±.18 42.02±.34
0.125 74.23±.16 77.96±.16 81.20±.12 76.09±.50 34.75±.20 44.72±.26 49.43±.16 36.26±.34
"""


def _huang_table(name: str, title: str, table: str, *, row_title: str, ending: str) -> Study:
    """`ending` of the runs' names, with {row} in it."""
    lines = {words[0]: words[1:] for line in table.strip().splitlines() if (words := line.split())}
    runs = [f"{method}-{data}" for data in _DATA.values() for method in _METHODS.values()]
    cells = {
        (row, number): Cell(runs[number] + ending.format(row=row), 800, Value(*map(float, word.split("±"))))
        for row, words in lines.items()
        for number, word in enumerate(words)
    }
    rows = tuple(lines)
    ends = [((rows[0], number), (rows[-1], number)) for number in range(len(_METHOD_COLUMNS))]
    return Study(
        name=name,
        title=title,
        source=f"{_HUANG}, {title.lower()}",
        measure="knn_best",
        row_title=row_title,
        rows=rows,
        columns=_METHOD_COLUMNS,
        cells=MappingProxyType(cells),
        contrasts=_neighbours(rows, _METHOD_COLUMNS, cells, "column") + _contrasts(cells, ends),
        num_train=50_000,
        batch_size=512,
        encoder="resnet18_small",
        num_small_columns=len(_METHODS),
    )


def _temperatures() -> Study:
    numbers = {200: (76.8, 80.4, 83.0), 400: (80.6, 84.1, 86.2), 600: (84.3, 87.4, 88.7), 800: (86.8, 89.4, 90.3)}
    runs = {"SimCLR, temperature 1": "simclr-t1", "SimCLR, temperature 0.5": "simclr-t0.5", "split loss": "split-t0.2"}
    columns = tuple(Column(_PICTURE, title) for title in runs)
    cells = {
        (str(epochs), number): Cell(f"{run}-{epochs}epochs", epochs, Value(values[number]))
        for epochs, values in numbers.items()
        for number, run in enumerate(runs.values())
    }
    rows = tuple(map(str, numbers))
    return Study(
        name="temperatures",
        title="Alignment and divergence weighted apart, against SimCLR",
        source=f'{_HUANG}, table of "Ours" (which names no data set; by its level CIFAR-10)',
        measure="knn_best",
        row_title="epochs",
        rows=rows,
        columns=columns,
        cells=MappingProxyType(cells),
        contrasts=_neighbours(rows, columns, cells, "row"),
        num_train=50_000,
        batch_size=512,
        encoder="resnet18_small",
    )


PAIRS = ("ab", "ac", "ad", "ae", "bc", "bd", "be", "cd", "ce", "de")


def _pairs() -> Study:
    columns = (Column(_PICTURE, "SimCLR"),)
    cells = {(pair, 0): Cell(f"simclr-huang-cifar10-{pair}-200epochs", 200, None) for pair in PAIRS}
    order = [("ad", other) for other in PAIRS if other != "ad"] + [("ac", "ae"), ("ac", "ab")]
    return Study(
        name="pairs",
        title="Transforms composed in pairs",
        source=f"{_HUANG}, the figure of composed pairs, which has no numbers",
        measure="knn_best",
        row_title="transforms",
        rows=PAIRS,
        columns=columns,
        cells=MappingProxyType(cells),
        contrasts=tuple(Contrast((first, 0), (second, 0), 1, None) for first, second in order),
        num_train=50_000,
        batch_size=512,
        encoder="resnet18_small",
    )


STUDIES: Mapping[str, Study] = MappingProxyType(
    {
        table.name: table
        for table in (
            _table1(),
            _table2(),
            _table3(),
            _huang_table("richness", "Richer views", _RICHNESS, row_title="transforms", ending="-{row}"),
            _huang_table(
                "colour", "Strength of the colours", _COLOUR, row_title="strength", ending="-ad-strength{row}"
            ),
            _temperatures(),
            _pairs(),
        )
    }
)
