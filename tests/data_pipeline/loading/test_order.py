"""The order of an epoch, batches of it, and the permutation behind it."""

from __future__ import annotations

import tracemalloc
from itertools import chain
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BadSample
from data_pipeline.loading.order import BatchOrder, EpochOrders, ShardWindows
from data_pipeline.loading.permutation import KeyedPermutation
from tests.data_pipeline.loading.batches import whole_batches

EXAMPLES = settings(deadline=None, database=None, max_examples=30)
SHARD_SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=17)


def whole_order(num_samples: int, *, seed: int, epoch: int, **options: Any) -> NDArray[np.int64]:
    return EpochOrders(num_samples, seed, **options).of_epoch(epoch)(np.arange(num_samples))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, Any], int, int, int]:
    """The options of an order, the number of samples, a number of ranks, and a global batch size that suits them."""
    sizes = draw(SHARD_SIZES)
    num_samples = sum(sizes)
    world_size = draw(st.integers(1, min(4, num_samples)))
    per_rank = draw(st.integers(1, num_samples // world_size))
    shuffle_shards = draw(st.none() | st.integers(1, len(sizes)))
    options = {
        "shard_ends": np.cumsum(sizes),
        "shuffle_shards": shuffle_shards,
    }
    return options, num_samples, world_size, per_rank * world_size


@EXAMPLES
@given(world=worlds(), seed=st.integers(0, 2**31))
def test_global_batches_are_the_same_for_any_ranks_and_hold_no_key_twice(
    world: tuple[dict[str, Any], int, int, int], seed: int
) -> None:
    options, num_samples, world_size, size = world
    num_steps = num_samples // size

    def seen(world_size: int) -> list[list[int]]:
        orders = [
            BatchOrder(EpochOrders(num_samples, seed, **options), size, rank, world_size) for rank in range(world_size)
        ]
        return whole_batches(
            [[order.rows(0, step, bad={}).indices_R.tolist() for step in range(2 * num_steps)] for order in orders]
        )

    together = seen(world_size)
    assert {len(batch) for batch in together} == {size}
    for epoch in range(2):
        indices = [index for batch in together[epoch * num_steps : (epoch + 1) * num_steps] for index in batch]
        assert len(set(indices)) == len(indices) == num_steps * size
        assert set(indices) <= set(range(num_samples))
    assert together == seen(1)


@EXAMPLES
@given(world=worlds(), seed=st.integers(0, 99), data=st.data())
def test_bad_samples_are_replaced_alike_on_any_ranks(
    world: tuple[dict[str, Any], int, int, int], seed: int, data: st.DataObject
) -> None:
    options, num_samples, world_size, size = world
    indices = data.draw(st.sets(st.integers(0, num_samples - 1), max_size=num_samples))
    bad = {index: BadSample(index, "shard", "torn") for index in indices}
    for step in range(num_samples // size):
        clean = (
            BatchOrder(EpochOrders(num_samples, seed, **options), size, 0, 1).rows(0, step, bad={}).indices_R.tolist()
        )
        order = whole_order(num_samples, seed=seed, epoch=0, **options)
        by_row = [np.roll(order[row::size], -step).tolist() for row in range(size)]
        expected = [next((index for index in row if index not in indices), None) for row in by_row]
        hopeless = None in expected
        parts: list[list[int]] = []
        passed: list[BadSample] = []
        try:
            for rank in range(world_size):
                part = BatchOrder(EpochOrders(num_samples, seed, **options), size, rank, world_size).rows(
                    0, step, bad=bad
                )
                parts.append(part.indices_R.tolist())
                passed += part.bad
        except UserError:
            assert hopeless
            continue
        assert not hopeless
        batch = list(chain.from_iterable(parts))
        assert batch == expected
        assert len(set(batch)) == size
        assert not set(batch) & indices
        for was, now in zip(clean, batch, strict=True):
            assert was == now or was in indices
        assert {sample.index for sample in passed} >= set(clean) & indices
        assert all(sample.index in indices for sample in passed)


@EXAMPLES
@given(world=worlds(), resumed_on=st.sampled_from([1, 2, 8]), data=st.data())
def test_continued_on_other_ranks_sees_the_rest_of_the_epoch(
    world: tuple[dict[str, Any], int, int, int], resumed_on: int, data: st.DataObject
) -> None:
    options, num_samples, _, _ = world
    if num_samples < 8:
        return
    size = 8 * data.draw(st.integers(1, num_samples // 8))
    num_steps = num_samples // size
    stopped_at = data.draw(st.integers(0, num_steps))

    def seen(world_size: int, steps: range) -> list[int]:
        orders = [
            BatchOrder(EpochOrders(num_samples, 3, **options), size, rank, world_size) for rank in range(world_size)
        ]
        return [index for step in steps for order in orders for index in order.rows(0, step, bad={}).indices_R.tolist()]

    together = seen(4, range(stopped_at)) + seen(resumed_on, range(stopped_at, num_steps))
    assert together == seen(1, range(num_steps))


@EXAMPLES
@given(sizes=SHARD_SIZES, data=st.data())
def test_windows_hold_whole_shards_one_after_another(sizes: list[int], data: st.DataObject) -> None:
    ends = np.cumsum(sizes)
    num = data.draw(st.integers(1, len(sizes)))
    order = whole_order(int(ends[-1]), seed=1, epoch=4, shard_ends=ends, shuffle_shards=num)
    assert sorted(order.tolist()) == list(range(ends[-1]))
    shards = np.searchsorted(ends, order, side="right").tolist()
    windows = ShardWindows(ends, num, seed=1, epoch=4)
    assert sorted(windows.shards.tolist()) == list(range(len(sizes)))
    at = 0
    for number in range(len(windows)):
        window = windows.window(number).tolist()
        assert len(window) == num or number == len(windows) - 1
        num_samples = sum(sizes[shard] for shard in window)
        assert set(shards[at : at + num_samples]) == set(window)
        assert {windows.number_at(position) for position in range(at, at + num_samples)} == {number}
        at += num_samples
        assert windows.ends[number] == at


@pytest.mark.parametrize("shuffle_shards", [None, 1, 8])
def test_order_is_shuffled_anew_by_epoch_and_seed(shuffle_shards: int | None) -> None:
    stored = np.arange(20_000)
    ends = np.arange(20, 20_001, 20)
    orders = [
        whole_order(20_000, seed=seed, epoch=epoch, shard_ends=ends, shuffle_shards=shuffle_shards)
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    for number, order in enumerate(orders):
        assert abs(rank_correlation(stored, order)) < 0.1
        for other in orders[:number]:
            assert abs(rank_correlation(order, other)) < 0.1
    again = whole_order(20_000, seed=0, epoch=0, shard_ends=ends, shuffle_shards=shuffle_shards)
    np.testing.assert_array_equal(orders[0], again)


RECORDED = {
    (None, 1_000): [415, 987, 616, 310, 763, 915, 315, 96],
    (3, 1_000): [149, 133, 445, 193, 176, 418, 187, 195],
    (None, 50_000): [39570, 37421, 12860, 28414, 16176, 9668, 42638, 28831],
    (3, 50_000): [8046, 7825, 7460, 20301, 22340, 9394, 5115, 20475],
}


@pytest.mark.parametrize(("shuffle_shards", "num_samples"), RECORDED)
def test_the_order_never_changes(shuffle_shards: int | None, num_samples: int) -> None:
    """Runs that have begun go on with it, so its numbers are recorded here."""
    ends = np.arange(num_samples // 20, num_samples + 1, num_samples // 20)
    order = EpochOrders(num_samples, 3, ends, shuffle_shards).of_epoch(2)
    assert order(np.arange(8)).tolist() == RECORDED[shuffle_shards, num_samples]


def rank_correlation(order_a: NDArray[np.int64], order_b: NDArray[np.int64]) -> float:
    """Spearman's: the correlation of the ranks, which permutations of 0..N-1 are themselves."""
    return float(np.corrcoef(order_a, order_b)[0, 1])


# The permutation


@EXAMPLES
@given(size=st.integers(1, 3_000) | st.integers(4_090, 20_000), seed=st.integers(0, 2**63), data=st.data())
def test_a_permutation_holds_each_number_once_whatever_is_asked_together(
    size: int, seed: int, data: st.DataObject
) -> None:
    permutation = KeyedPermutation(size, seed, "a test", 5)
    whole = permutation(np.arange(size))
    assert sorted(whole.tolist()) == list(range(size))
    some = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    assert permutation(np.array(some, dtype=np.int64)).tolist() == whole[some].tolist()


@pytest.mark.parametrize("size", [2**31 - 1, 2**32, 10**12 + 7, 2**62 + 1, 2**63 - 1])
def test_a_permutation_of_very_many_numbers_stays_within_them(size: int) -> None:
    positions = np.unique(np.linspace(0, size - 1, 5_000).astype(np.uint64).clip(0, size - 1)).astype(np.int64)
    outcomes = KeyedPermutation(size, 0, "a test")(positions)
    assert len(set(outcomes.tolist())) == len(positions)
    assert 0 <= outcomes.min() < size // 100
    assert size - size // 100 < outcomes.max() < size


@pytest.mark.slow
@pytest.mark.parametrize("size", [4_097, 8_192])
def test_permutations_of_many_keys_look_random(size: int) -> None:
    """Over 2,000 keys: where numbers come, where pairs of neighbours come, and how far apart neighbours are.

    These are the smallest networks, the hardest to mix. A probability below one in 10,000 fails; two rounds do.
    """
    num_keys, num_bins = 2_000, 16
    orders = np.stack([KeyedPermutation(size, seed, "a test")(np.arange(32)) for seed in range(num_keys)])
    binned = orders * num_bins // size
    share = np.bincount(np.arange(size) * num_bins // size) / size
    for column in range(32):
        assert chisquare(np.bincount(binned[:, column], minlength=num_bins), num_keys * share).pvalue > 1e-4
    pairs = np.bincount((binned[:, ::2] * num_bins + binned[:, 1::2]).ravel(), minlength=num_bins**2)
    assert chisquare(pairs, 16 * num_keys * np.outer(share, share).ravel()).pvalue > 1e-4
    distances = (np.diff(orders, axis=1) % size) * num_bins // size
    assert chisquare(np.bincount(distances.ravel()), 31 * num_keys * share).pvalue > 1e-4


@pytest.mark.parametrize("shuffle_shards", [None, 4])
def test_the_first_batch_of_a_billion_samples_takes_no_memory_for_them(shuffle_shards: Literal[4] | None) -> None:
    """10^9 samples in 10^5 shards, at 90 % of an epoch: what is held is a few numbers for each shard."""
    num_samples, num_shards = 10**9, 10**5
    ends = np.arange(1, num_shards + 1, dtype=np.int64) * (num_samples // num_shards)
    order = BatchOrder(EpochOrders(num_samples, 0, ends, shuffle_shards), 4_096, 3, 4)
    tracemalloc.start()
    rows = order.rows(0, int(0.9 * order.num_steps_per_epoch), bad={})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows.key_epoch == 0
    assert len(set(rows.indices_R.tolist())) == 1_024
    assert peak < 8e6
    shards = np.unique(np.searchsorted(ends, rows.indices_R, side="right"))
    assert (len(shards) > 1_000) if shuffle_shards is None else (len(shards) <= 8)
