"""Claims and their verdicts: the sentence of a paper, its prediction, and the interval that was measured.

An experiment has a table of claims (claims.yaml, `ClaimRow`) and measures some of them (`Measurement`). `judge_rows`
joins the two.

Shapes: S seeds, P places. A place is a point of a grid, a loss or a setting; one claim can be made at several places.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, TypeAlias

import torch
from scipy.stats import t as student_t
from torch import Tensor

from data_pipeline.core.plain_text import parse_yaml
from data_pipeline.core.schema import Schema

Verdict = Literal["holds", "does not hold", "not decidable here"]


class Interval(Schema):
    """A measured value with bounds `low` and `high`; `kind` names the bounds, e.g. "95 % t-interval, 10 seeds"."""

    value: float
    low: float
    high: float
    kind: str


class ClaimResult(Schema):
    """A claim in one sentence with its source, its measurement, and the verdict on its prediction.

    `name` is unique within an experiment. The docs refer to it. `measured` names the measured quantity, with its unit
    and the setting. The claim predicts a value of at least `at_least` and at most `at_most`. None means that there is
    no such bound.
    """

    name: str
    statement: str
    source: str
    measured: str
    interval: Interval
    at_least: float | None
    at_most: float | None
    verdict: Verdict


class ClaimRow(Schema):
    """One row of a table of claims: the claim, the quantity to measure, and the prediction for it.

    `name`, `statement` and `measured` may hold names in braces. `judge_rows` replaces them by words of the measurement.
    At least one of the bounds `at_least` and `at_most` is given. A bound is a number, or the name of the word that
    holds the number.
    """

    name: str
    source: str
    statement: str
    measured: str
    at_least: float | str | None = None
    at_most: float | str | None = None


def read_claims(experiment: str) -> tuple[ClaimRow, ...]:
    """Read the claims.yaml of an experiment, a mapping from names to rows."""
    path = Path(__file__).parents[1] / experiment / "claims.yaml"
    table = parse_yaml(path.read_text(encoding="utf-8"))
    return tuple(ClaimRow.parse({"name": name, **row}, where=f"claim {name}") for name, row in table.items())


@dataclass(frozen=True)
class Intervals:
    """Intervals at P places, which hold together. A claim is judged at the place that speaks most against it."""

    mean_P: Tensor
    low_P: Tensor
    high_P: Tensor
    kind: str
    places: Sequence[str]


@dataclass(frozen=True)
class Measurement:
    """The measurement for one claim.

    Attributes:
        found: one value for each seed, (S,); or an interval; or intervals at several places.
        words: replacements for the names in braces of the row.
        undecided: the reason why nothing can be concluded, which is added to the description. "" if there is none.
    """

    found: Tensor | Interval | Intervals
    words: Mapping[str, object] = field(default_factory=dict)
    undecided: str = ""


Measurements: TypeAlias = Mapping[str, Measurement | Sequence[Measurement]]
"""The measurement of each claim, by the name of its row. A row can be measured several times."""


def judge_rows(rows: Sequence[ClaimRow], measurements: Measurements, **words: object) -> list[ClaimResult]:
    """Judge the rows that have a measurement, in the order of the table.

    A claim holds if the whole interval agrees with it, and does not hold if the whole interval disagrees. Otherwise the
    measurement cannot decide. `words` are replacements for the names in braces of all rows. Intervals at several places
    add the words `place`, the place that decides, and `num_places`.
    """
    results = []
    for row in rows:
        found = measurements.get(row.name, ())
        for measurement in [found] if isinstance(found, Measurement) else found:
            results.append(_judge_row(row, measurement, {**words, **measurement.words}))
    return results


def _judge_row(row: ClaimRow, measurement: Measurement, words: dict[str, object]) -> ClaimResult:
    at_least, at_most = (
        float(str(words[bound])) if isinstance(bound, str) else bound for bound in (row.at_least, row.at_most)
    )
    found = measurement.found
    if isinstance(found, Intervals):
        at = worst_place(found.low_P, found.high_P, at_least=at_least, at_most=at_most)
        words |= {"place": found.places[at], "num_places": len(found.places)}
        mean, low, high = (part[at].item() for part in (found.mean_P, found.low_P, found.high_P))
        found = Interval(value=mean, low=low, high=high, kind=found.kind)
    interval = t_interval(found) if isinstance(found, Tensor) else found
    verdict = decide(interval.low, interval.high, at_least=at_least, at_most=at_most)
    return ClaimResult(
        name=row.name.format(**words),
        statement=row.statement.format(**words),
        source=row.source,
        measured=row.measured.format(**words) + measurement.undecided,
        interval=interval,
        at_least=at_least,
        at_most=at_most,
        verdict="not decidable here" if measurement.undecided else verdict,
    )


def decide(low: float, high: float, *, at_least: float | None = None, at_most: float | None = None) -> Verdict:
    """Return the verdict on the prediction "from `at_least` to `at_most`" for a value between `low` and `high`.

    Raises `ValueError` if no bound is given.

    Examples:
        >>> decide(0.1, 0.2, at_least=0.0)
        'holds'
        >>> decide(-0.1, 0.2, at_least=0.0)
        'not decidable here'
        >>> decide(-0.2, -0.1, at_least=0.0)
        'does not hold'
    """
    if at_least is None and at_most is None:
        raise ValueError("a claim predicts a least value, a greatest value, or both; got neither")
    least = -math.inf if at_least is None else at_least
    most = math.inf if at_most is None else at_most
    if least <= low and high <= most:
        return "holds"
    return "does not hold" if high < least or low > most else "not decidable here"


def t_interval(values_S: Tensor) -> Interval:
    """Return the mean and Student's 95 % t-interval of independent values, one for each seed.

    Raises `ValueError` for fewer than two values.
    """
    mean, low, high = (bound.item() for bound in t_bounds(values_S))
    return Interval(value=mean, low=low, high=high, kind=f"95 % t-interval, {len(values_S)} seeds")


def t_bounds(values_S: Tensor, *, confidence: float = 0.95) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and the low and high bound over the first dimension of (S, ...) values; (...) each.

    Raises `ValueError` for fewer than two values, because a single value has no spread.
    """
    num = len(values_S)
    if num < 2:
        raise ValueError(f"an interval needs at least 2 values, got {num}")
    values_S = values_S.double()
    mean = values_S.mean(0)
    half = float(student_t.ppf(0.5 + confidence / 2, num - 1)) * values_S.std(0) / math.sqrt(num)
    return mean, mean - half, mean + half


def at_places(values_SP: Tensor, places: Sequence[str], *, of: str) -> Intervals:
    """Return 95 % t-intervals over the seeds at each place, which hold for all places together.

    `of` is the plural of what a place is, such as "losses".

    Raises `ValueError` for fewer than two seeds.
    """
    mean_P, low_P, high_P = t_bounds(values_SP, confidence=simultaneous(0.95, len(places)))
    return Intervals(
        mean_P, low_P, high_P, f"95 % t-interval for all {len(places)} {of}, {len(values_SP)} seeds", places
    )


def mean_entries(name: str, values_S: Tensor) -> dict[str, Any]:
    """Return two entries of a table: the mean over seeds, and the bounds of its 95 % t-interval, a list of two."""
    mean, low, high = t_bounds(values_S)
    return {name: mean.item(), f"{name}_95": [low.item(), high.item()]}


def moment_bounds(
    mean_P: Tensor, mean_square_P: Tensor, *, num: int, confidence: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Return the low and high bound of means over many (`num`) independent values, from their first two moments.

    Assumes a normal distribution of the mean. For bounds that hold at P places together, pass
    `simultaneous(confidence, P)`.
    """
    variance_P = (mean_square_P - mean_P**2).clamp(min=0) / (num - 1)
    half_P = NormalDist().inv_cdf(0.5 + confidence / 2) * variance_P.sqrt()
    return mean_P - half_P, mean_P + half_P


def simultaneous(confidence: float, num: int) -> float:
    """Return the confidence that each of `num` intervals needs, so that all hold with `confidence` (Bonferroni)."""
    return 1 - (1 - confidence) / num


def worst_place(low_P: Tensor, high_P: Tensor, *, at_least: float | None = None, at_most: float | None = None) -> int:
    """Return the number of the place whose interval speaks most against the bounds.

    Its verdict is the verdict on all places. It is a place at which the claim does not hold, if there is one. Otherwise
    it is a place at which the claim is not decidable, if there is one.
    """
    least = -math.inf if at_least is None else at_least
    most = math.inf if at_most is None else at_most
    surely_P = torch.maximum(least - high_P, low_P - most)
    perhaps_P = torch.maximum(least - low_P, high_P - most)
    return int((surely_P if bool((surely_P > 0).any()) else perhaps_P).argmax())


def exact_interval(value: float, *, kind: str) -> Interval:
    """Return the interval of a value without uncertainty, such as the largest of all deviations."""
    return Interval(value=value, low=value, high=value, kind=kind)


def claim_table(results: Sequence[ClaimResult], *, width: int = 110) -> str:
    """Return a text for the terminal: the verdict, sentence and measurement of each claim."""
    lines = []
    for result in results:
        lines.append(f"{result.verdict.upper():<20}{result.name} ({result.source})")
        interval = result.interval
        found = (
            f"{result.measured}: {interval.value:.4g} ({interval.low:.4g} to {interval.high:.4g}, {interval.kind}); "
            f"predicted {prediction(result)}"
        )
        for text in (result.statement, found):
            lines += textwrap.wrap(text, width=width, initial_indent=" " * 4, subsequent_indent=" " * 6)
    return "\n".join(lines)


def prediction(result: ClaimResult) -> str:
    """Return the prediction in words, such as "at least 0"."""
    low, high = result.at_least, result.at_most
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return f"at least {low:g}" if low is not None else f"at most {high:g}"
