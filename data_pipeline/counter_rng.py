"""Counter-based random numbers, batched and on any device: draw `n` of a key is a pure function of (key, n).

An ordinary generator hands out numbers in the order they are asked for, so the overlay and the views of a sample would
depend on which other samples share its batch. Here every number is a hash of its key and counter (the SplitMix64
finaliser of Steele et al. 2014), so a sample gets the same draws in any batch, on any rank, on CPU and GPU.

`purpose` separates uses of the same keys: view policies use 0 to 99, what is drawn on a sample uses 100 and up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  #  0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  #  0x94D049BB133111EB


@dataclass(frozen=True)
class DrawKeys:
    """The key of every draw made for a batch: (seed, epoch, sample index, view).

    Attributes:
        seed, epoch, view: numbers shared by the batch; `view` numbers the draws of one sample in one epoch: 0 and 1
            for the two views of a step, 2 and 3 where an alternating update draws again.
        index_B: (B,) int64 dataset indices, on the device of the samples.
    """

    seed: int
    epoch: int
    index_B: torch.Tensor
    view: int

    def __post_init__(self) -> None:
        assert self.index_B.dtype == torch.int64
        assert self.index_B.dim() == 1


def uniform(keys: DrawKeys, num: int, *, purpose: int) -> torch.Tensor:
    """(B, num) float32 numbers in [0, 1), 24 random bits each; `purpose` separates uses of the same keys."""
    bits = _hash(keys, num, purpose)
    return (_shift_right(bits, 40)).to(torch.float32) * 2.0**-24


def integers(keys: DrawKeys, num: int, high: int, *, purpose: int) -> torch.Tensor:
    """(B, num) int64 numbers in [0, high), uniform to within high / 2**32; `high` is below 2**31."""
    assert 0 < high < 1 << 31
    return _shift_right(_shift_right(_hash(keys, num, purpose), 32) * high, 32)


def normal(keys: DrawKeys, num: int, *, purpose: int) -> torch.Tensor:
    """(B, num) float32 numbers of the standard normal law, at most 5.77 in magnitude.

    By Box and Muller (1958) from one hash for each two of them: its upper 24 bits are the radius, its lower 24 the
    angle. Devices agree to the rounding of their logarithm and cosine.
    """
    bits = _hash(keys, (num + 1) // 2, purpose)
    share = _shift_right(bits, 40).to(torch.float32).mul_(-(2.0**-24)).add_(1)  # above 0, so that it has a logarithm
    angle = bits.bitwise_and_((1 << 24) - 1).to(torch.float32).mul_(2 * math.pi * 2.0**-24)
    pairs = share.new_empty(*share.shape, 2)
    if share.device.type == "cpu":  # NumPy takes a third of torch's time for each of these
        radius, turn, of_pairs = share.numpy(), angle.numpy(), pairs.numpy()
        np.sqrt(np.multiply(np.log(radius, out=radius), -2, out=radius), out=radius)
        np.multiply(np.cos(turn), radius, out=of_pairs[..., 0])
        np.multiply(np.sin(turn, out=turn), radius, out=of_pairs[..., 1])
    else:
        share.log_().mul_(-2).sqrt_()  # the radius from here on
        torch.mul(angle.cos(), share, out=pairs[..., 0])
        torch.mul(angle.sin_(), share, out=pairs[..., 1])
    return pairs.flatten(1)[:, :num]


def _hash(keys: DrawKeys, num: int, purpose: int) -> torch.Tensor:
    key_B = _mix(keys.index_B + _mix_int(keys.seed, keys.epoch, keys.view, purpose))
    counter_N = torch.arange(1, num + 1, dtype=torch.int64, device=key_B.device) * _GOLDEN
    return _mix(key_B[:, None] + counter_N[None, :])


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = _shift_right(x, 30).bitwise_xor_(x).mul_(_MIX_1)
    x = _shift_right(x, 27).bitwise_xor_(x).mul_(_MIX_2)
    return _shift_right(x, 31).bitwise_xor_(x)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's is arithmetic on int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_int(*numbers: int) -> int:
    """One signed 64-bit key from several integers, by the same finaliser in Python's integers."""
    mask = (1 << 64) - 1
    state = 0
    for number in numbers:
        state = (state + number + (_GOLDEN & mask)) & mask
        state = ((state ^ (state >> 30)) * (_MIX_1 & mask)) & mask
        state = ((state ^ (state >> 27)) * (_MIX_2 & mask)) & mask
        state ^= state >> 31
    return state - (1 << 64) if state >= 1 << 63 else state
