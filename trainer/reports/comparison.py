"""Summarise the rows of the table: the accuracies of each encoder, and which differences are told from chance."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from trainer.probes.features import LabelSpace, label_order
from trainer.reports.paired import LEVEL, Estimate, Ranking, Reading, difference_of, holm, mean_of, rank
from trainer.reports.table import PIXELS, Measurement

READOUTS = ("linear", "knn")
Place: TypeAlias = tuple[LabelSpace, str]  # a label and a readout


@dataclass(frozen=True)
class Score:
    """A readout of one label over the seeds of an encoder.

    estimate: the mean with its 95 % interval, see `trainer.reports.paired`.
    deviation: the sample standard deviation over seeds (divisor n - 1); None for one seed.
    is_final: whether every checkpoint is the last one of a training that has ended.
    """

    estimate: Estimate
    deviation: float | None
    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    is_final: bool


@dataclass(frozen=True)
class WorstGroup:
    """The mean over seeds of the accuracy in the worst group; its classes and size if they are the same for all."""

    estimate: Estimate
    group: str
    num_samples: int


@dataclass(frozen=True)
class Encoder:
    """A configuration with its scores. `untrained` may be of another one that starts alike."""

    name: str
    trained: Mapping[Place, Score]
    untrained: Mapping[Place, Score]
    worst: Mapping[LabelSpace, WorstGroup]


@dataclass(frozen=True)
class Column:
    """A readout of a label: what its accuracies are compared with, and the ranking of the encoders.

    title: of the label.
    ranking: None without a trained encoder.
    """

    label: LabelSpace
    readout: str
    title: str
    num_neighbors: int | None
    chance: float
    majority: float
    pixels: Score | None
    ranking: Ranking | None

    @property
    def place(self) -> Place:
        return self.label, self.readout

    @property
    def method(self) -> str:
        """Return the readout in words, such as "linear probe" or "kNN (k = 200)"."""
        if self.readout == "linear":
            return "linear probe"
        return "kNN" if self.num_neighbors is None else f"kNN (k = {self.num_neighbors})"


@dataclass(frozen=True)
class Fall:
    """An accuracy that training has lowered: the untrained encoder is told to be above the trained one, by `lead`."""

    encoder: str
    column: Column
    lead: Estimate


@dataclass(frozen=True)
class Comparison:
    """Accuracies that may be compared: on one dataset, by one protocol of the probe."""

    dataset: str
    data: str
    reads: str
    protocol: str
    columns: tuple[Column, ...]
    encoders: tuple[Encoder, ...]
    falls: tuple[Fall, ...]

    @property
    def labels(self) -> list[list[Column]]:
        """Return the columns of each label."""
        return [list(columns) for _, columns in groupby(self.columns, key=lambda column: column.label)]


def compare(rows: Sequence[Measurement]) -> list[Comparison]:
    """Return the comparisons of the probes in a table, first the one with most trained accuracies."""
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for row in rows:
        if not row.readout.startswith("online"):
            groups.setdefault(row.comparable, []).append(row)
    with_encoders = {(protocol, data) for protocol, reads, data in groups if reads != PIXELS}
    found = []
    for (protocol, reads, data), of_group in groups.items():
        if reads == PIXELS and (protocol, data) in with_encoders:
            continue
        floors = groups.get((protocol, PIXELS, data), []) if reads != PIXELS else []
        found.append((sum(row.step > 0 for row in of_group), _comparison(of_group, floors)))
    return [comparison for _, comparison in sorted(found, key=lambda one: -one[0])]


def last_rows(rows: Iterable[Measurement]) -> list[Measurement]:
    """Return the rows of the last probed checkpoint of each run, without untrained encoders."""
    rows = [row for row in rows if row.step > 0]
    last: dict[str, int] = {}
    for row in rows:
        last[row.run] = max(row.step, last.get(row.run, 0))
    return [row for row in rows if row.step == last[row.run]]


def rows_by_seed(rows: Iterable[Measurement], readout: str) -> dict[int, Measurement]:
    """Return the rows of a readout by seed; of several of one seed, the first."""
    found: dict[int, Measurement] = {}
    for row in rows:
        if row.readout == readout:
            found.setdefault(row.seed, row)
    return found


def by_seed(rows: Iterable[Measurement], readout: str = "linear") -> dict[int, Reading]:
    """Return the readings of `rows_by_seed`."""
    return {seed: row.reading for seed, row in rows_by_seed(rows, readout).items()}


def score(rows: Iterable[Measurement], readout: str) -> Score | None:
    """Return the score of rows of one label, at one checkpoint of each run; None if none is of the readout."""
    found = list(rows_by_seed(rows, readout).values())
    if not found:
        return None
    values = [row.value for row in found]
    return Score(
        estimate=mean_of([row.reading for row in found]),
        deviation=statistics.stdev(values) if len(values) > 1 else None,
        seeds=tuple(row.seed for row in found),
        steps=tuple(sorted({row.step for row in found})),
        is_final=all(row.is_final for row in found),
    )


def _comparison(rows: Sequence[Measurement], floors: Sequence[Measurement]) -> Comparison:
    first, titles = rows[0], _titles(rows)
    encoders = dict.fromkeys(row.encoder for row in rows)
    rows = [*(row for row in rows if row.step == 0), *last_rows(rows)]
    columns = [
        _column(label, readout, rows, floors, title=titles[label])
        for label in label_order(titles)
        for readout in READOUTS
    ]
    return Comparison(
        first.dataset,
        first.data,
        first.reads,
        first.protocol,
        tuple(columns),
        tuple(_encoder(name, rows, columns) for name in encoders),
        tuple(_falls(encoders, rows, columns)),
    )


def _parts(encoder: str, label: LabelSpace, rows: Sequence[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """Return the rows of the untrained encoder, or of one that starts alike, and those of the trained encoder."""
    starts = {row.initial for row in rows if row.encoder == encoder}
    rows = [row for row in rows if row.label == label]
    alike = [row for row in rows if row.step == 0 and row.initial in starts]
    untrained = [row for row in alike if row.encoder == encoder] or alike
    return untrained, [row for row in rows if row.step > 0 and row.encoder == encoder]


def _encoder(name: str, rows: Sequence[Measurement], columns: Sequence[Column]) -> Encoder:
    parts = {column.label: _parts(name, column.label, rows) for column in columns}
    untrained, trained = (
        {
            column.place: found
            for column in columns
            if (found := score(parts[column.label][number], column.readout)) is not None
        }
        for number in (0, 1)
    )
    worst = {label: group for label, (_, after) in parts.items() if (group := _worst_group(after)) is not None}
    return Encoder(name, trained, untrained, worst)


def _worst_group(rows: Sequence[Measurement]) -> WorstGroup | None:
    groups = [row for row in rows if row.readout == "linear, worst group"]
    if not groups:
        return None
    named = {(row.group, row.num_samples) for row in groups}
    group, num = named.pop() if len(named) == 1 else ("differs between seeds", min(num for _, num in named))
    return WorstGroup(mean_of([row.reading for row in groups]), group, num)


def _falls(encoders: Iterable[str], rows: Sequence[Measurement], columns: Sequence[Column]) -> list[Fall]:
    """Return what training has lowered. Holm's correction is over all encoders and columns."""
    found = []
    for encoder in encoders:
        for column in columns:
            before, after = (by_seed(part, column.readout) for part in _parts(encoder, column.label, rows))
            if (lead := difference_of(before, after)) is not None:
                found.append(Fall(encoder, column, lead))
    adjusted = holm([one.lead.p for one in found])
    return [one for one, p in zip(found, adjusted, strict=True) if one.lead.mean > 0 and p < LEVEL]


def _column(
    label: LabelSpace, readout: str, rows: Sequence[Measurement], floors: Sequence[Measurement], *, title: str
) -> Column:
    of_place = [row for row in rows if (row.label, row.readout) == (label, readout)]
    readings: dict[str, list[Measurement]] = {}
    for row in of_place:
        if row.step > 0:
            readings.setdefault(row.encoder, []).append(row)
    first = of_place[0]
    return Column(
        label=label,
        readout=readout,
        title=title,
        num_neighbors=first.num_neighbors,
        chance=first.chance or 0.0,
        majority=first.majority or 0.0,
        pixels=score((row for row in floors if row.label == label), readout),
        ranking=rank({name: by_seed(of_encoder, readout) for name, of_encoder in readings.items()}),
    )


def _titles(rows: Sequence[Measurement]) -> dict[LabelSpace, str]:
    """Return the title of each label, such as "digit"; its name if it has none, several, or that of another label."""
    found: dict[LabelSpace, set[str]] = {}
    for row in rows:
        found.setdefault(row.label, set()).add(row.title or f"{row.label} label")
    titles = {label: of_label.pop() if len(of_label) == 1 else f"{label} label" for label, of_label in found.items()}
    every = list(titles.values())
    return {label: title if every.count(title) == 1 else f"{label} label" for label, title in titles.items()}
