"""Counter-based draws: uniform, uncorrelated, and a function of the key alone."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from data_pipeline.core import counter_rng
from data_pipeline.core.counter_rng import DrawKeys, integers, normal, normal_pairs, uniform, uniforms
from tests.trainer.views.kolmogorov import ks_p_value

KEYS = DrawKeys(seed=3, epoch=5, index_B=torch.arange(400), view=1)
GOLDEN_NORMALS = [[1.655105, 0.334297, -2.678616], [-0.128332, -1.346959, -0.824324]]  # of the samples 0 and 7


def test_the_hash_is_splitmix64() -> None:
    """SplitMix64 of the seed 0 starts with these numbers (published with the generator by Vigna)."""
    from data_pipeline.core.counter_rng import _GOLDEN, _mix

    state_N = torch.arange(1, 4, dtype=torch.int64) * _GOLDEN
    values = [value & (2**64 - 1) for value in _mix(state_N).tolist()]
    assert values == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_numpys_hash_and_normals_are_torchs() -> None:
    """A CPU draws by NumPy, other devices by torch."""
    from data_pipeline.core.counter_rng import _GOLDEN, _box_muller, _hash, _key, _mix

    key_B, num_pairs = _key(KEYS, 3), 1_000
    bits_BN = _mix(key_B[:, None] + torch.arange(1, num_pairs + 1) * _GOLDEN)
    assert torch.equal(_hash(key_B, num_pairs), bits_BN)
    with mock.patch.object(counter_rng, "can_use_numpy", return_value=False):
        assert torch.equal(_hash(key_B, num_pairs), bits_BN)
    upper_bits_BN = bits_BN.numpy().view(np.uint64) >> np.uint64(40)
    assert np.array_equal(uniform(KEYS, num_pairs, purpose=3).double().numpy(), upper_bits_BN * 2.0**-24)
    pairs_B2N = torch.empty(len(key_B), 2, num_pairs)
    _box_muller(bits_BN, out_B2N=pairs_B2N)
    torch.testing.assert_close(normal_pairs(KEYS, num_pairs, purpose=3), pairs_B2N, rtol=1e-5, atol=1e-6)
    in_turn = normal(KEYS, 2 * num_pairs, purpose=3)
    torch.testing.assert_close(torch.stack([in_turn[:, ::2], in_turn[:, 1::2]], dim=1), pairs_B2N, rtol=1e-5, atol=1e-6)


def test_numpys_integers_are_keys_like_pythons() -> None:
    for recorded_epoch in (None, torch.tensor(7)):
        python = dataclasses.replace(KEYS, recorded_epoch=recorded_epoch, seed=2**40)
        of_numpy: dict[str, Any] = {"seed": np.int64(2**40), "epoch": np.int64(5), "view": np.int32(1)}
        numpy = dataclasses.replace(python, **of_numpy)
        assert torch.equal(uniform(numpy, 3, purpose=3), uniform(python, 3, purpose=3))


def test_normals_are_what_they_were() -> None:
    """Runs that were recorded stay what they are."""
    numbers = normal(dataclasses.replace(KEYS, index_B=torch.tensor([0, 7])), 3, purpose=94)
    torch.testing.assert_close(numbers, torch.tensor(GOLDEN_NORMALS), rtol=1e-5, atol=1e-6)


def test_draws_are_uniform_over_counters_and_over_every_part_of_the_key() -> None:
    assert ks_p_value(uniform(KEYS, 100, purpose=0).flatten().numpy()) > 1e-3
    over_index = uniform(dataclasses.replace(KEYS, index_B=torch.arange(20_000)), 1, purpose=0)
    assert ks_p_value(over_index.flatten().numpy()) > 1e-3
    one = torch.tensor([7])
    for name in ("seed", "epoch", "view"):
        keys = [
            dataclasses.replace(KEYS, index_B=one, **{name: number})  # type: ignore[arg-type]
            for number in range(400)
        ]
        assert ks_p_value(torch.cat([uniform(key, 1, purpose=0) for key in keys]).flatten().numpy()) > 1e-3, name
    over_purpose = torch.cat([uniform(dataclasses.replace(KEYS, index_B=one), 1, purpose=p) for p in range(400)])
    assert ks_p_value(over_purpose.flatten().numpy()) > 1e-3


def test_draws_lie_below_one_and_reach_both_ends() -> None:
    numbers = uniform(KEYS, 1000, purpose=0)
    assert numbers.dtype == torch.float32
    assert 0 <= numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() < 1


@pytest.mark.parametrize("part", ["counter", "index_B", "epoch", "seed", "view", "purpose"])
def test_neighbouring_keys_are_uncorrelated(part: str) -> None:
    a = uniform(KEYS, 250, purpose=0)
    match part:
        case "counter":
            a, b = a[:, :-1], a[:, 1:]
        case "index_B":
            a, b = a[:-1], a[1:]
        case "purpose":
            b = uniform(KEYS, 250, purpose=1)
        case _:
            b = uniform(dataclasses.replace(KEYS, **{part: getattr(KEYS, part) + 1}), 250, purpose=0)
    num = a.numel()
    assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < 4 / num**0.5
    repeats = torch.isin(a.flatten()[:1000], b.flatten()[:1000]).sum()
    assert part in {"counter", "index_B"} or repeats < 5  # of 24 bits: by chance 0.06 are expected


def test_a_draw_does_not_depend_on_the_batch_or_on_how_many_are_drawn() -> None:
    whole = uniform(KEYS, 64, purpose=2)
    part = dataclasses.replace(KEYS, index_B=torch.tensor([399, 17]))
    assert torch.equal(uniform(part, 10, purpose=2), whole[[399, 17], :10])
    assert torch.equal(integers(part, 10, 26, purpose=2), integers(KEYS, 64, 26, purpose=2)[[399, 17], :10])


@pytest.mark.parametrize("num", [1, 50])
def test_two_views_at_once_are_each_of_them(num: int) -> None:
    both = uniform(KEYS.two_views(), num, purpose=2)
    one_by_one = [uniform(dataclasses.replace(KEYS, view=view), num, purpose=2) for view in (1, 2)]
    assert torch.equal(both, torch.cat(one_by_one))
    assert torch.equal(uniform(KEYS.two_views().rows(slice(390, 420)), num, purpose=2), both[390:420])


def test_several_purposes_at_once_are_each_of_them() -> None:
    for keys in (KEYS, KEYS.two_views()):
        together = uniforms(keys, 7, purposes=[4, 9])
        assert torch.equal(together, torch.stack([uniform(keys, 7, purpose=purpose) for purpose in (4, 9)]))


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (3, 2**40), (2**63 + 5, 5)])
def test_an_epoch_in_a_tensor_draws_the_same(seed: int, epoch: int) -> None:
    for keys in (KEYS, KEYS.two_views()):
        now = dataclasses.replace(keys, seed=seed, epoch=epoch)
        recorded = dataclasses.replace(now, epoch=-1, recorded_epoch=torch.tensor(epoch))
        assert torch.equal(uniform(recorded, 9, purpose=6), uniform(now, 9, purpose=6))


@pytest.mark.parametrize("high", [1, 26, 1_000])
def test_integers_are_uniform_and_reach_both_ends(high: int) -> None:
    numbers = integers(KEYS, 250, high, purpose=100)
    assert numbers.dtype == torch.int64
    assert numbers.shape == (400, 250)
    counts = np.bincount(numbers.flatten().numpy())
    assert len(counts) == high
    expected = numbers.numel() / high
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = high - 1
    assert abs(chi_square - degrees) <= 4 * (2 * degrees) ** 0.5  # it has this mean and deviation


def test_integers_are_the_leading_bits_of_the_same_hash() -> None:
    """`integers` uses 32 bits and `uniform` 24, so large ranges are covered as evenly as small ranges."""
    numbers = integers(KEYS, 250, 1 << 24, purpose=100)
    assert torch.equal(numbers, (uniform(KEYS, 250, purpose=100).double() * 2**24).to(torch.int64))
    large = integers(KEYS, 250, (1 << 31) - 1, purpose=100)
    assert 0 <= large.min() < 1e6
    assert (1 << 31) - 1e6 < large.max() < (1 << 31) - 1
    assert ks_p_value((large / 2**31).flatten().numpy()) > 1e-3


def test_normals_have_the_normal_law_with_its_tails() -> None:
    numbers = normal(KEYS, 501, purpose=0)
    assert numbers.dtype == torch.float32
    assert numbers.shape == (400, 501)
    flat = numbers.flatten().double()
    assert ks_p_value(torch.special.ndtr(flat).numpy()) > 1e-3
    for threshold in (2.0, 3.0, 4.0):
        expected = flat.numel() * 2 * float(torch.special.ndtr(torch.tensor(-threshold, dtype=torch.float64)))
        assert abs(float((flat.abs() > threshold).sum()) - expected) < 4 * expected**0.5
    assert flat.abs().max() < 5.77
    over_index = normal(dataclasses.replace(KEYS, index_B=torch.arange(20_000)), 1, purpose=0)
    assert ks_p_value(torch.special.ndtr(over_index.flatten().double()).numpy()) > 1e-3


@pytest.mark.parametrize("part", ["pair", "index_B", "epoch", "seed", "view", "purpose"])
def test_neighbouring_normals_are_independent(part: str) -> None:
    """The two of a pair share a radius: neither they nor their squares may be correlated."""
    whole = normal(KEYS, 250, purpose=0).double()
    match part:
        case "pair":
            a, b = whole[:, 0::2], whole[:, 1::2]
        case "index_B":
            a, b = whole[:-1], whole[1:]
        case "purpose":
            a, b = whole, normal(KEYS, 250, purpose=1).double()
        case _:
            other = dataclasses.replace(KEYS, **{part: getattr(KEYS, part) + 1})
            a, b = whole, normal(other, 250, purpose=0).double()
    for power in (1, 2):
        correlation = np.corrcoef(a.pow(power).flatten(), b.pow(power).flatten())[0, 1]
        assert abs(correlation) < 4 / a.numel() ** 0.5, power


def test_a_normal_does_not_depend_on_the_batch_or_on_how_many_are_drawn() -> None:
    whole = normal(KEYS, 64, purpose=2)
    for num in (1, 9, 10):
        some = normal(dataclasses.replace(KEYS, index_B=torch.tensor([399, 17])), num, purpose=2)
        assert some.shape == (2, num)
        torch.testing.assert_close(some, whole[[399, 17], :num], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_torchs_default_type_changes_no_draw(dtype: torch.dtype) -> None:
    expected = uniform(KEYS, 1000, purpose=0), uniforms(KEYS, 9, purposes=[1, 2])
    torch.set_default_dtype(dtype)
    try:
        found = uniform(KEYS, 1000, purpose=0), uniforms(KEYS, 9, purposes=[1, 2])
    finally:
        torch.set_default_dtype(torch.float32)
    for numbers, same in zip(found, expected, strict=True):
        assert numbers.dtype == torch.float32
        assert torch.equal(numbers, same)


def test_ambient_random_state_is_neither_read_nor_changed() -> None:
    torch.manual_seed(1)
    first, state = uniform(KEYS, 10, purpose=0), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(first, uniform(KEYS, 10, purpose=0))
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())
