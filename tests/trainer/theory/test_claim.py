from __future__ import annotations

import pytest
import torch
from scipy import stats

from trainer.theory.framework.claim import (
    ClaimRow,
    Interval,
    Intervals,
    Measurement,
    Measurements,
    claim_table,
    decide,
    exact_interval,
    judge_rows,
    moment_bounds,
    t_bounds,
    worst_place,
)


@pytest.mark.parametrize(
    ("low", "high", "at_least", "at_most", "verdict"),
    [
        (0.0, 1.0, 0.0, None, "holds"),
        (-1e-9, 1.0, 0.0, None, "not decidable here"),
        (-1.0, -1e-9, 0.0, None, "does not hold"),
        (0.0, 1.1, None, 1.0, "not decidable here"),
        (-0.1, 0.1, -0.2, 0.2, "holds"),
        (-0.3, 0.3, -0.2, 0.2, "not decidable here"),
        (0.3, 0.4, -0.2, 0.2, "does not hold"),
        (2.0, 2.0, 2.0, 2.0, "holds"),
    ],
)
def test_the_whole_interval_decides_the_verdict(
    low: float, high: float, at_least: float | None, at_most: float | None, verdict: str
) -> None:
    assert decide(low, high, at_least=at_least, at_most=at_most) == verdict


def test_an_interval_needs_two_values() -> None:
    with pytest.raises(ValueError, match="at least 2 values, got 1"):
        t_bounds(torch.tensor([1.0]))


def test_the_t_interval_equals_scipys() -> None:
    values = [0.3, -1.2, 2.5, 0.9, 0.1]
    expected = stats.t.interval(0.99, df=4, loc=stats.tmean(values), scale=stats.sem(values))
    _, low, high = t_bounds(torch.tensor(values), confidence=0.99)
    assert (low.item(), high.item()) == pytest.approx(expected, rel=1e-6)


def test_moment_bounds_are_the_normal_interval_of_the_mean() -> None:
    values_N = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.3
    low, high = moment_bounds(values_N.mean(), (values_N**2).mean(), num=400)
    expected = stats.norm.interval(0.95, loc=values_N.mean().item(), scale=stats.sem(values_N.numpy()))
    assert (low.item(), high.item()) == pytest.approx(expected)


def test_the_worst_place_has_the_verdict_of_all_places() -> None:
    low_P, high_P = torch.tensor([0.1, -0.5, 0.3]), torch.tensor([0.2, 0.4, 0.5])
    assert worst_place(low_P, high_P, at_least=0) == 1
    assert worst_place(low_P, high_P, at_most=0.45) == 2
    surely_below = torch.tensor([-9.0, -0.2, 0.1]), torch.tensor([9.0, -0.1, 0.2])
    assert worst_place(*surely_below, at_least=0) == 1, "a place that refutes outweighs one that is only uncertain"


def row(name: str, **bounds: float | str) -> ClaimRow:
    values = {"name": name, "source": "Somebody 1999", "statement": "{thing} is small.", "measured": "metres"}
    return ClaimRow.parse({**values, **bounds}, where="test")


def test_rows_are_judged_with_their_words_and_the_table_shows_them() -> None:
    rows = [
        row("gained", at_least=0),
        row("off", at_most="limit"),
        row("at {place}", at_least=0),
        row("undecided", at_least=-1, at_most=9),
        row("not measured", at_least=0),
    ]
    everywhere = Intervals(torch.zeros(2), torch.tensor([0.0, -1]), torch.ones(2), "a guess", ["home", "work"])
    measured: Measurements = {
        "undecided": [Measurement(Interval(value=3, low=0, high=4, kind="a guess"), undecided="; too few")],
        "gained": Measurement(torch.tensor([1.0, 1.1, 0.9])),
        "off": Measurement(exact_interval(0.5, kind="largest of 3"), {"limit": 0.1}),
        "at {place}": Measurement(everywhere),
    }
    results = judge_rows(rows, measured, thing="Noise")
    assert [(result.name, result.verdict) for result in results] == [
        ("gained", "holds"),
        ("off", "does not hold"),
        ("at work", "not decidable here"),
        ("undecided", "not decidable here"),
    ]
    assert {result.statement for result in results} == {"Noise is small."}
    table = claim_table(results)
    assert "HOLDS               gained (Somebody 1999)" in table
    assert "metres: 1 (0.7516 to 1.248, 95 % t-interval, 3 seeds); predicted at least 0" in table
    assert "metres; too few: 3 (0 to 4, a guess); predicted -1 to 9" in table
