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
from typing import Any, Literal, Self, TypeAlias

import torch
from pydantic import model_validator
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

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low <= self.high:
            raise ValueError(f"an interval needs low <= high, got {self.low} and {self.high}")
        return self


class Claim(Schema):
    """A claim in one sentence, and its source, such as "Tamkin et al. 2022, Theorem 4.1".

    `name` is unique within an experiment. The docs refer to it.
    """

    name: str
    statement: str
    source: str


class ClaimResult(Schema):
    """A claim, its measurement and the verdict on its prediction; made by `judge`.

    `measured` names the measured quantity, with its unit and the setting. The claim predicts a value of at least
    `at_least` and at most `at_most`. None means that there is no such bound.
    """

    claim: Claim
    measured: str
    interval: Interval
    at_least: float | None
    at_most: float | None
    verdict: Verdict


class ClaimRow(Schema):
    """One row of a table of claims: the claim, the quantity to measure, and the prediction for it.

    `name`, `statement` and `measured` may hold names in braces. `judge_rows` replaces them by words of the measurement.

    `measured` names the quantity, with its unit and the setting. The claim predicts that it is at least `at_least` and
    at most `at_most`; at least one of the two is given. A bound is a number, or the name of the word that holds the
    number, such as a tolerance of the settings.
    """

    name: str
    source: str
    statement: str
    measured: str
    at_least: float | str | None = None
    at_most: float | str | None = None


def read_claims(module: str) -> tuple[ClaimRow, ...]:
    """Read claims.yaml, a mapping from names to rows, from the folder of the Python file `module`."""
    table = parse_yaml(Path(module).with_name("claims.yaml").read_text(encoding="utf-8"))
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


Measurements: TypeAlias = Mapping[str, Measurement | Tensor | Interval | Intervals]
"""The measurement of each claim, by the name of the claim."""


def judge_rows(rows: Sequence[ClaimRow], measurements: Measurements, **words: object) -> list[ClaimResult]:
    """Judge the rows that have a measurement, in the order of the table.

    `words` are replacements for the names in braces of all rows. Intervals at several places add the words `place`, the
    place that decides, and `num_places`.
    """
    return [
        _judge_row(row, measured if isinstance(measured, Measurement) else Measurement(measured), words)
        for row in rows
        if (measured := measurements.get(row.name)) is not None
    ]


def _judge_row(row: ClaimRow, measurement: Measurement, shared: Mapping[str, object]) -> ClaimResult:
    words = {**shared, **measurement.words}
    at_least, at_most = (_bound(bound, words) for bound in (row.at_least, row.at_most))
    found = measurement.found
    if isinstance(found, Intervals):
        at = worst_place(found.low_P, found.high_P, at_least=at_least, at_most=at_most)
        words |= {"place": found.places[at], "num_places": len(found.places)}
        mean, low, high = (part[at].item() for part in (found.mean_P, found.low_P, found.high_P))
        found = Interval(value=mean, low=low, high=high, kind=found.kind)
    result = judge(
        Claim(name=row.name.format(**words), statement=row.statement.format(**words), source=row.source),
        t_interval(found) if isinstance(found, Tensor) else found,
        measured=row.measured.format(**words) + measurement.undecided,
        at_least=at_least,
        at_most=at_most,
    )
    return result.model_copy(update={"verdict": "not decidable here"}) if measurement.undecided else result


def _bound(bound: float | str | None, words: Mapping[str, object]) -> float | None:
    return float(str(words[bound])) if isinstance(bound, str) else bound


def judge(
    claim: Claim,
    interval: Interval,
    *,
    measured: str,
    at_least: float | None = None,
    at_most: float | None = None,
) -> ClaimResult:
    """Judge a claim: it holds if the whole interval agrees with it, and does not hold if the whole interval disagrees.

    Otherwise the measurement cannot decide. Raises `ValueError` if no bound is given.
    """
    verdict = decide(interval.low, interval.high, at_least=at_least, at_most=at_most)
    return ClaimResult(
        claim=claim, measured=measured, interval=interval, at_least=at_least, at_most=at_most, verdict=verdict
    )


def decide(low: float, high: float, *, at_least: float | None = None, at_most: float | None = None) -> Verdict:
    """Return the verdict on the prediction "from `at_least` to `at_most`" for a value between `low` and `high`.

    Raises `ValueError` if no bound is given, or `at_least` is above `at_most`.

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
    if least > most:
        raise ValueError(f"at_least {least} is above at_most {most}")
    if least <= low and high <= most:
        return "holds"
    if high < least or low > most:
        return "does not hold"
    return "not decidable here"


def t_interval(values_S: Tensor | Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Return the mean and Student's t-interval of independent values, one for each seed.

    Raises `ValueError` for fewer than two values.
    """
    values_S = torch.as_tensor(values_S, dtype=torch.float64)
    mean, low, high = (bound.item() for bound in t_bounds(values_S, confidence=confidence))
    return Interval(value=mean, low=low, high=high, kind=f"{100 * confidence:g} % t-interval, {len(values_S)} seeds")


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
        lines.append(f"{result.verdict.upper():<20}{result.claim.name} ({result.claim.source})")
        interval = result.interval
        found = (
            f"{result.measured}: {interval.value:.4g} ({interval.low:.4g} to {interval.high:.4g}, {interval.kind}); "
            f"predicted {prediction(result)}"
        )
        for text in (result.claim.statement, found):
            lines += textwrap.wrap(text, width=width, initial_indent=" " * 4, subsequent_indent=" " * 6)
    return "\n".join(lines)


def prediction(result: ClaimResult) -> str:
    """Return the prediction in words, such as "at least 0"."""
    low, high = result.at_least, result.at_most
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return f"at least {low:g}" if low is not None else f"at most {high:g}"
