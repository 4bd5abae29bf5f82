"""Paired differences over seeds and samples, and Holm's correction, on planted truths."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from trainer.reports.paired import (
    Reading,
    _Prior,
    _prior,
    _Variances,
    best_of,
    difference_of,
    holm,
    leads_over,
    mean_of,
    rank,
)

Table = NDArray[np.bool_]


def readings(table_SN: Table, *, with_samples: bool = True) -> dict[int, Reading]:
    return {
        seed: Reading(float(row.mean()), len(row), row if with_samples else None) for seed, row in enumerate(table_SN)
    }


def tables(
    rng: np.random.Generator, leads: list[float], *, num_seeds: int = 3, num_samples: int = 500, of_seeds: float = 0.01
) -> list[Table]:
    """Return a table of right samples (S, N) for each lead: shared ease of the samples, and luck of each seed."""
    ease_N = rng.normal(0.5, 0.2, num_samples)
    luck_AS = rng.normal(0, of_seeds, (len(leads), num_seeds))
    share_ASN = ease_N + luck_AS[:, :, None] + np.array(leads)[:, None, None]
    return list(rng.random(share_ASN.shape) < share_ASN.clip(0.01, 0.99))


@pytest.mark.parametrize("of_seeds", [0.0, 0.03])
def test_without_a_difference_one_in_twenty_is_found_at_the_most(of_seeds: float) -> None:
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(150):
        a, b = map(readings, tables(rng, [0, 0], of_seeds=of_seeds))
        difference = difference_of(a, b)
        assert difference is not None
        found += difference.p < 0.05
    assert found <= 15  # 7.5 are expected, with a deviation of 2.7


def test_a_planted_difference_is_found_and_lies_in_its_interval() -> None:
    rng = np.random.default_rng(1)
    found, inside = 0, 0
    for _ in range(80):
        a, b = map(readings, tables(rng, [0.15, 0]))
        difference = difference_of(a, b)
        assert difference is not None
        found += difference.p < 0.05
        inside += abs(difference.mean - 0.15) < difference.half_width
    assert found > 60
    assert inside > 70


def test_pairs_of_samples_tell_apart_what_two_accuracies_do_not() -> None:
    rng = np.random.default_rng(2)
    right_N = rng.random(1000) < 0.5
    better_N = right_N.copy()
    better_N[np.flatnonzero(~right_N)[:25]] = True  # 2.5 points, and never worse
    with_samples = difference_of(readings(better_N[None]), readings(right_N[None]))
    without = difference_of(readings(better_N[None], with_samples=False), readings(right_N[None], with_samples=False))
    assert with_samples is not None
    assert without is not None
    assert with_samples.mean == pytest.approx(0.025)
    assert without.mean == pytest.approx(0.025)
    assert with_samples.p < 1e-5
    assert without.p > 0.2
    # McNemar's test of 25 samples against 0: (25 - 0) / sqrt(25 + 0) standard errors, here with n - 1.
    assert with_samples.mean / with_samples.error == pytest.approx(5, abs=0.1)


def test_the_scatter_of_seeds_widens_the_interval() -> None:
    num = 1000
    of_seed = [np.arange(num) < count for count in (300, 500, 700)]
    steady = mean_of(list(readings(np.array([of_seed[1]] * 3)).values()))
    scattered = mean_of(list(readings(np.array(of_seed)).values()))
    assert steady.mean == scattered.mean == 0.5
    assert steady.half_width == pytest.approx(1.96 * (0.25 / num) ** 0.5, rel=0.01)
    assert scattered.half_width > 0.4  # 4.3 standard errors of 0.2 / sqrt(3)


def test_only_common_seeds_are_compared() -> None:
    right_N = np.arange(100) < 50
    one = Reading(0.5, 100, right_N)
    assert difference_of({0: one, 1: one}, {2: one}) is None
    difference = difference_of({0: one, 1: Reading(0.9, 100)}, {0: one, 2: one})
    assert difference is not None
    assert (difference.mean, difference.num_seeds, difference.p) == (0, 1, 1)


def test_holm_is_that_of_a_hand_computation() -> None:
    # Sorted: 0.005 x 4, 0.01 x 3, 0.03 x 2, 0.04 x 1, and none below the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_best_is_told_from_those_that_are_planted_lower() -> None:
    rng = np.random.default_rng(4)
    names = ["low", "best", "almost", "lower"]
    found = rank(
        {name: readings(table) for name, table in zip(names, tables(rng, [-0.3, 0.1, 0.099, -0.2]), strict=True)}
    )
    assert found is not None
    assert found.best in {"best", "almost"}
    assert [one.name for one in found.not_told] == [({"best", "almost"} - {found.best}).pop()]
    assert [one.name for one in found.told] == ["lower", "low"]
    assert found.told[0].lead.mean == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize(("of_seeds", "num_seeds"), [(0.0, 3), (0.03, 3), (0.03, 1)])
def test_of_equal_cures_one_is_rarely_told_from_the_best(of_seeds: float, num_seeds: int) -> None:
    """The scatter of a single seed is not 0, although it cannot be measured: it is that of the other cures."""
    rng = np.random.default_rng(5)
    false = 0
    for _ in range(60):
        drawn = tables(rng, [0.0] * 6, num_samples=200, of_seeds=of_seeds)
        cures = {str(number): readings(table) for number, table in enumerate(drawn)}
        found = rank(cures | {"0": {seed: cures["0"][seed] for seed in range(num_seeds)}})
        assert found is not None
        false += bool(found.told)
    assert false <= 8  # 3 are expected at the most, with a deviation of 1.7


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_leads_over_an_equal_base_are_rarely_told_and_a_planted_one_is(num_seeds: int) -> None:
    rng = np.random.default_rng(9)
    false, found = 0, 0
    for _ in range(40):
        base, *others = map(readings, tables(rng, [0.0] * 6 + [0.1], num_samples=300, of_seeds=0.02))
        others[0] = {seed: one for seed, one in others[0].items() if seed < num_seeds}
        leads = leads_over(base, {str(number): one for number, one in enumerate(others)} | {"none": {}})
        assert list(leads) == ["0", "1", "2", "3", "4", "5"]
        assert leads["5"].mean == pytest.approx(difference_of(others[5], base).mean)  # type: ignore[union-attr]
        false += leads["0"].p < 0.05
        found += leads["5"].p < 0.05
    assert false <= 6
    assert found >= 30


def test_many_cures_together_tell_what_one_pair_does_not() -> None:
    """Two degrees of freedom are few: the scatter of seeds is known better from ten cures than from two."""
    rng = np.random.default_rng(6)
    alone, together = 0, 0
    for _ in range(20):
        cures = {str(number): readings(table) for number, table in enumerate(tables(rng, [0.12] + [0.0] * 9))}
        pair, column = rank({name: cures[name] for name in ("0", "1")}), rank(cures)
        assert pair is not None
        assert column is not None
        assert column.best == "0"
        alone += len(pair.told)
        together += "1" in {one.name for one in column.told}
    assert together > alone


def test_alike_scatters_count_as_one_and_unlike_ones_as_none() -> None:
    rng = np.random.default_rng(7)

    def prior(variance_P: NDArray[np.float64]) -> _Prior:
        drawn_P = variance_P * rng.chisquare(4, len(variance_P)) / 4
        found = _prior([_Variances(0, 0, variance / 5, 0, 5, 100) for variance in drawn_P])
        assert found is not None
        return found

    alike = prior(np.full(500, 2.0))
    assert alike.variance == pytest.approx(2, rel=0.1)
    assert alike.degrees > 50
    scaled = prior(2 * 8 / rng.chisquare(8, 500))  # the prior of Smyth 2004 itself, with 8 degrees of freedom
    assert scaled.degrees == pytest.approx(8, rel=0.4)
    assert scaled.variance == pytest.approx(2, rel=0.15)
    assert prior(np.geomspace(1e-4, 1e4, 500)).degrees < 1
    assert _prior([_Variances(0, 0, 1, 0, 3, 100)] * 2) is None
    assert _prior([_Variances(0, 0, 0, 0, 3, 100)] * 5) is None


def test_the_best_is_ahead_on_shared_seeds_and_cures_of_equal_seeds_go_by_their_means() -> None:
    def cure(**accuracies: float) -> dict[int, Reading]:
        return {int(seed.removeprefix("s")): Reading(accuracy, 100) for seed, accuracy in accuracies.items()}

    few, many = cure(s0=0.5), cure(s0=0.4, s1=0.9)
    assert best_of({"few": few, "many": many}) == "few"
    assert best_of({"few": few | cure(s1=0.7), "many": many}) == "many"
    found = rank({"a": cure(s0=0.5, s1=0.5), "b": cure(s1=0.4, s2=0.6), "c": cure(s2=0.5, s0=0.6), "d": cure(s3=0.9)})
    assert found is not None
    assert "d" not in [rival.name for rival in found.rivals]
    assert min(rival.lead.mean for rival in found.rivals) < 0  # each is behind one other, so one must be


def test_without_cures_nobody_is_best_and_one_cure_has_no_rival() -> None:
    assert rank({"plain": {}}) is None
    found = rank({"plain": {0: Reading(0.5, 10)}, "none": {}, "other seed": {1: Reading(0.4, 10)}})
    assert found is not None
    assert (found.best, found.rivals) == ("plain", ())


@pytest.mark.parametrize("with_samples", [True, False])
@pytest.mark.parametrize("num_right", [0, 1, 90, 100])
def test_the_error_of_a_mean_is_that_of_four_more_samples(num_right: int, *, with_samples: bool) -> None:
    right_N = np.arange(100) < num_right
    found = mean_of(list(readings(right_N[None], with_samples=with_samples).values()))
    assert found.mean == right_N.mean()
    more_N = np.concatenate([right_N, [True, True, False, False]]).astype(float)
    assert found.error == pytest.approx((more_N.var(ddof=1) / len(more_N)) ** 0.5, rel=1e-12 if with_samples else 0.01)


def test_an_encoder_that_gets_every_sample_right_in_every_seed_has_an_error() -> None:
    # The exact upper limit of a share of which 0 of n samples were seen is about 3.7 / n (Clopper and Pearson).
    found = mean_of(list(readings(np.ones((3, 2000), dtype=bool)).values()))
    assert found.mean == 1
    assert 1 / 2000 < found.half_width < 3.7 / 2000


@pytest.mark.parametrize("share", [0.5, 0.97, 0.998])
def test_the_true_accuracy_lies_in_its_interval_also_near_one(share: float) -> None:
    rng = np.random.default_rng(3)
    inside = 0
    for _ in range(200):
        found = mean_of(list(readings(rng.random((1, 1000)) < share).values()))
        inside += abs(found.mean - share) <= found.half_width
    assert inside > 184  # 190 are expected
