"""Summarise the rows of the table: the accuracies of each encoder, and which differences are told from chance."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainer.probes.features import LabelSpace, label_order
from trainer.reports.paired import Estimate, Ranking, Reading, mean_of, rank
from trainer.reports.table import PIXELS, Measurement


@dataclass(frozen=True)
class Score:
    """The linear probe of one label over the seeds of an encoder.

    estimate: the mean with its 95 % interval, see `trainer.reports.paired`.
    deviation: the sample standard deviation over seeds (divisor n - 1); None for one seed.
    knn: the mean accuracy of kNN; None if it was not measured.
    is_final: whether every checkpoint is the last one of a training that has ended.
    """

    estimate: Estimate
    deviation: float | None
    knn: float | None
    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    is_final: bool


@dataclass(frozen=True)
class WorstGroup:
    """The mean over seeds of the accuracy in the worst group; its classes and size if they are the same for all."""

    accuracy: float
    group: str
    num_samples: int


@dataclass(frozen=True)
class Encoder:
    """A configuration with its scores by label. `untrained` may be of another one that starts alike."""

    name: str
    trained: Mapping[LabelSpace, Score]
    untrained: Mapping[LabelSpace, Score]
    worst: Mapping[LabelSpace, WorstGroup]


@dataclass(frozen=True)
class Label:
    """What the accuracies on a label are compared with, and the ranking of the encoders; None without a trained one."""

    name: LabelSpace
    title: str
    chance: float
    majority: float
    pixels: Score | None
    ranking: Ranking | None


@dataclass(frozen=True)
class Comparison:
    """Accuracies that may be compared: on one dataset, by one protocol of the probe."""

    dataset: str
    data: str
    reads: str
    protocol: str
    labels: tuple[Label, ...]
    encoders: tuple[Encoder, ...]


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


def linear_by_seed(rows: Iterable[Measurement]) -> dict[int, Measurement]:
    """Return the rows of linear probes by seed; of several of one seed, the first."""
    found: dict[int, Measurement] = {}
    for row in rows:
        if row.readout == "linear":
            found.setdefault(row.seed, row)
    return found


def by_seed(rows: Iterable[Measurement]) -> dict[int, Reading]:
    """Return the readings of `linear_by_seed`."""
    return {seed: row.reading for seed, row in linear_by_seed(rows).items()}


def score(rows: Sequence[Measurement]) -> Score | None:
    """Return the score of rows of one label, at one checkpoint of each run; None if none is of a linear probe."""
    linear = [*linear_by_seed(rows).values()]
    if not linear:
        return None
    values = [row.value for row in linear]
    knn = [row.value for row in rows if row.readout == "knn"]
    return Score(
        estimate=mean_of([row.reading for row in linear]),
        deviation=statistics.stdev(values) if len(values) > 1 else None,
        knn=statistics.fmean(knn) if knn else None,
        seeds=tuple(row.seed for row in linear),
        steps=tuple(sorted({row.step for row in linear})),
        is_final=all(row.is_final for row in linear),
    )


def _comparison(rows: Sequence[Measurement], floors: Sequence[Measurement]) -> Comparison:
    last = last_rows(rows)
    labels = label_order(row.label for row in rows)
    encoders = [_encoder(name, rows, last, labels) for name in dict.fromkeys(row.encoder for row in rows)]
    first = rows[0]
    return Comparison(
        first.dataset,
        first.data,
        first.reads,
        first.protocol,
        tuple(_label(label, rows, last, floors, titles=_titles(rows)) for label in labels),
        tuple(encoders),
    )


def _encoder(
    name: str, rows: Sequence[Measurement], last: Sequence[Measurement], labels: Sequence[LabelSpace]
) -> Encoder:
    starts = {row.initial for row in rows if row.encoder == name}
    trained, untrained, worst = {}, {}, {}
    for label in labels:
        own = [row for row in last if row.encoder == name and row.label == label]
        if (found := score(own)) is not None:
            trained[label] = found
        alike = [row for row in rows if row.step == 0 and row.label == label and row.initial in starts]
        if (found := score([row for row in alike if row.encoder == name] or alike)) is not None:
            untrained[label] = found
        if groups := [row for row in own if row.readout == "linear, worst group"]:
            named = {(row.group, row.num_samples) for row in groups}
            group, num = named.pop() if len(named) == 1 else ("differs between seeds", min(num for _, num in named))
            worst[label] = WorstGroup(statistics.fmean(row.value for row in groups), group, num)
    return Encoder(name, trained, untrained, worst)


def _label(
    label: LabelSpace,
    rows: Sequence[Measurement],
    last: Sequence[Measurement],
    floors: Sequence[Measurement],
    *,
    titles: Mapping[LabelSpace, str],
) -> Label:
    readings: dict[str, list[Measurement]] = {}
    for row in last:
        if row.label == label:
            readings.setdefault(row.encoder, []).append(row)
    first = next(row for row in rows if row.label == label and row.chance is not None)
    return Label(
        name=label,
        title=titles[label],
        chance=first.chance or 0.0,
        majority=first.majority or 0.0,
        pixels=score([row for row in floors if row.label == label]),
        ranking=rank({name: by_seed(of_encoder) for name, of_encoder in readings.items()}),
    )


def _titles(rows: Sequence[Measurement]) -> dict[LabelSpace, str]:
    """Return the title of each label, such as "digit"; its name if it has none, several, or that of another label."""
    found: dict[LabelSpace, set[str]] = {}
    for row in rows:
        found.setdefault(row.label, set()).add(row.title or f"{row.label} label")
    titles = {label: of_label.pop() if len(of_label) == 1 else f"{label} label" for label, of_label in found.items()}
    every = list(titles.values())
    return {label: title if every.count(title) == 1 else f"{label} label" for label, title in titles.items()}
