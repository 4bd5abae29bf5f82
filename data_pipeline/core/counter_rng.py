"""Draw counter-based random numbers, batched and on any device: draw `n` of a key is a pure function of (key, n).

An ordinary generator returns numbers in the order of the calls, so the overlay and the views of a sample would depend
on the other samples in its batch. Here every number is a hash of its key and counter (the SplitMix64
finaliser of Steele et al. 2014). A sample therefore gets the same draws in any batch, on any rank, on CPU and GPU.

`purpose` separates uses of the same keys: view policies use 0 to 99, overlays and crops use 100 and up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  #  0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  #  0x94D049BB133111EB
_TURN = 2 * math.pi * 2.0**-24
_CACHED_HASHES = 1 << 17  # hashes that a CPU turns into normal numbers at once: 1 MiB, which fits its cache


@dataclass(frozen=True)
class DrawKeys:
    """The key of every draw made for a batch: (seed, epoch, sample index, view).

    `Batch.draw_keys` makes those of a batch, with its step and, of a mixture, other numbers in place of the indices.
    `keys_of_rows` makes them for rows without an index.

    Attributes:
        seed, epoch, view: numbers shared by the batch; `view` numbers the draws of one sample in one epoch: 0 and 1
            for the two views of a step, 2 and 3 if an alternating update draws again.
        index_B: (B,) int64 dataset indices, on the device of the samples.
        is_next_B: (B,) bool on the same device; the rows that it marks draw for the view `view + 1`. None: no row does.
        recorded_epoch: a 0-d int64 tensor on the same device that replaces `epoch`, for a step that is recorded once
            and replayed in other epochs; None: `epoch` counts.
        step: the step of the run to which the batch belongs, for draws that all samples of a step share: a number, or
            a 0-d int64 tensor on the same device for a step that is recorded. None: the batch is of no step.
    """

    seed: int
    epoch: int
    index_B: torch.Tensor
    view: int
    is_next_B: torch.Tensor | None = None
    recorded_epoch: torch.Tensor | None = None
    step: int | torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.index_B.dtype == torch.int64
        assert self.index_B.dim() == 1
        assert self.is_next_B is None or self.is_next_B.shape == self.index_B.shape

    def two_views(self) -> DrawKeys:
        """Return keys of 2 B rows: the rows of this view, then the same rows of the next view."""
        assert self.is_next_B is None
        index_2B = self.index_B.repeat(2)
        is_next_2B = torch.arange(len(index_2B), device=index_2B.device) >= len(self.index_B)
        return dataclasses.replace(self, index_B=index_2B, is_next_B=is_next_2B)

    def rows(self, rows: slice) -> DrawKeys:
        """Return the keys of some rows."""
        is_next_B = None if self.is_next_B is None else self.is_next_B[rows]
        return dataclasses.replace(self, index_B=self.index_B[rows], is_next_B=is_next_B)

    def of_pair(self) -> DrawKeys:
        """Return keys that both views of a sample have in common: the views 2k and 2k + 1; each k has another key."""
        assert self.is_next_B is None or self.view % 2 == 0  # both views of a pair
        return dataclasses.replace(self, view=self.view & ~1, is_next_B=None)

    def of_step(self) -> DrawKeys:
        """Return the key, of one row, that all samples and both views of a step have in common on all ranks.

        If the batch is of no step, returns `of_pair` instead, a key for each row.
        """
        of_pair = self.of_pair()
        if self.step is None:
            return of_pair
        index_1 = torch.zeros_like(self.index_B[:1]) + self.step
        return dataclasses.replace(of_pair, epoch=0, index_B=index_1, recorded_epoch=None)


def keys_of_rows(inputs: torch.Tensor, *, seed: int, step: int, view: int = 0, first_row: int = 0) -> DrawKeys:
    """Return keys for a batch (B, ...) whose samples have no dataset index, for example in your own training loop.

    Each row, step, view and seed has its own draws. On several ranks, pass the number of rows of the ranks before this
    one as `first_row`; otherwise all ranks get the same draws.
    """
    index_B = torch.arange(first_row, first_row + len(inputs), device=inputs.device)
    return DrawKeys(seed=seed, epoch=step, index_B=index_B, view=view, step=step)


def uniform(keys: DrawKeys, num: int, *, purpose: int) -> torch.Tensor:
    """Return (B, num) float32 numbers in [0, 1) of 24 random bits each; `purpose` separates uses of the same keys."""
    bits = _hash(_key(keys, purpose), num)
    return _below_one(bits)


def uniforms(keys: DrawKeys, num: int, *, purposes: Sequence[int]) -> torch.Tensor:
    """Return (P, B, num) numbers: `uniform` for each of P purposes, with as many operations as for one."""
    bits = _hash(_mix(torch.cat([_start(keys, purpose) for purpose in purposes])), num)
    return _below_one(bits).view(len(purposes), -1, num)


def integers(keys: DrawKeys, num: int, high: int, *, purpose: int) -> torch.Tensor:
    """Return (B, num) int64 numbers in [0, high), uniform to within high / 2**32; `high` is below 2**31."""
    assert 0 < high < 1 << 31
    return _shift_right(_shift_right(_hash(_key(keys, purpose), num), 32) * high, 32)


def row_hashes(bytes_BN: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit hash of each row of bytes (B, N) uint8: (B,) int64, the same on every device.

    The sum of the bytes times fixed odd numbers, modulo 2**64, through the finaliser. Two rows that differ have the
    same sum with a probability of at most 2**-56 over the choice of the numbers.
    """
    odd_N = _hash(torch.zeros(1, dtype=torch.int64, device=bytes_BN.device), bytes_BN.shape[1])[0] | 1
    sum_B = torch.empty(len(bytes_BN), dtype=torch.int64, device=bytes_BN.device)
    size = max(1, _CACHED_HASHES // max(1, bytes_BN.shape[1]))
    for part_BN, part_B in zip(torch.split(bytes_BN, size), torch.split(sum_B, size), strict=True):
        part_B.copy_((part_BN.to(torch.int64) * odd_N).sum(dim=1))
    return _mix(sum_B + _GOLDEN)


def normal(keys: DrawKeys, num: int, *, purpose: int) -> torch.Tensor:
    """Return (B, num) float32 standard normal numbers, at most 5.77 in magnitude: the flattened `normal_pairs`."""
    return normal_pairs(keys, (num + 1) // 2, purpose=purpose).transpose(1, 2).flatten(1)[:, :num]


def normal_pairs(keys: DrawKeys, num: int, *, purpose: int) -> torch.Tensor:
    """Return (B, 2, num) float32 standard normal numbers, at most 5.77 in magnitude.

    One hash gives two numbers by the method of Box and Muller (1958): its upper 24 bits give the radius, its lower 24
    the angle. Devices agree up to the rounding of their logarithm and cosine.
    """
    key_B = _key(keys, purpose)
    pairs_B2N = torch.empty(len(key_B), 2, num, device=key_B.device)
    if not can_use_numpy(key_B):
        _box_muller(_hash(key_B, num), out_B2N=pairs_B2N)
    else:  # a few keys at a time: their numbers stay in the processor's cache
        size = max(1, _CACHED_HASHES // max(1, num))
        for part_B, part_B2N in zip(torch.split(key_B, size), torch.split(pairs_B2N, size), strict=True):
            _box_muller_by_numpy(_hash_by_numpy(part_B.numpy(), num), out_B2N=part_B2N.numpy())
    return pairs_B2N


def _box_muller(bits_BN: torch.Tensor, *, out_B2N: torch.Tensor) -> None:
    # 1 minus the upper bits is above 0, so it has a logarithm.
    radius_BN = _shift_right(bits_BN, 40).to(torch.float32).mul_(-(2.0**-24)).add_(1).log_().mul_(-2).sqrt_()
    angle_BN = bits_BN.bitwise_and_((1 << 24) - 1).to(torch.float32).mul_(_TURN)
    torch.mul(angle_BN.cos(), radius_BN, out=out_B2N[:, 0])
    torch.mul(angle_BN.sin_(), radius_BN, out=out_B2N[:, 1])


def _box_muller_by_numpy(bits_BN: NDArray[np.uint64], *, out_B2N: NDArray[np.float32]) -> None:
    """Do the same with NumPy, which takes a third of torch's time on a CPU for most of these operations."""
    angle_BN = _to_float(bits_BN.astype(np.uint32) & np.uint32((1 << 24) - 1))
    angle_BN *= np.float32(_TURN)
    radius_BN = _to_float(np.right_shift(bits_BN, np.uint64(40), out=bits_BN).astype(np.uint32))
    radius_BN *= np.float32(-(2.0**-24))
    radius_BN += np.float32(1)
    np.log(radius_BN, out=radius_BN)
    radius_BN *= np.float32(-2)
    np.sqrt(radius_BN, out=radius_BN)
    np.multiply(np.cos(angle_BN), radius_BN, out=out_B2N[:, 0])
    np.multiply(np.sin(angle_BN, out=angle_BN), radius_BN, out=out_B2N[:, 1])


def can_use_numpy(x: torch.Tensor) -> bool:
    """Return whether NumPy may compute on a tensor in place of torch; some operations take a quarter of the time.

    True for a tensor that is on a CPU, needs no gradient and has data (the fake tensors of `--plan` have none).
    """
    return x.device.type == "cpu" and not x.requires_grad and type(x) is torch.Tensor


def _to_float(numbers: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Convert numbers below 2**31 to float32. Reads them as signed integers, which takes a third of the time."""
    return numbers.view(np.int32).astype(np.float32)


def _key(keys: DrawKeys, purpose: int) -> torch.Tensor:
    return _mix(_start(keys, purpose))


def _start(keys: DrawKeys, purpose: int) -> torch.Tensor:
    """Return what `_mix` turns into the key of each row."""
    if keys.recorded_epoch is not None:
        view = keys.view if keys.is_next_B is None else keys.is_next_B + keys.view
        return keys.index_B + _mix_epoch(keys.seed, keys.recorded_epoch, view, purpose)
    offset = _mix_int(keys.seed, keys.epoch, keys.view, purpose)
    if keys.is_next_B is None:
        return keys.index_B + offset
    to_next = _signed(_mix_int(keys.seed, keys.epoch, keys.view + 1, purpose) - offset)
    return torch.add(keys.index_B + offset, keys.is_next_B, alpha=to_next)


def _hash(key_B: torch.Tensor, num: int) -> torch.Tensor:
    """Return (B, num) int64 hashes of the counters 1 to `num` under each key; all 64 bits are random."""
    if can_use_numpy(key_B):
        return torch.from_numpy(_hash_by_numpy(key_B.numpy(), num).view(np.int64))
    counter_N = torch.arange(1, num + 1, dtype=torch.int64, device=key_B.device)
    return _mix(torch.add(key_B[:, None], counter_N, alpha=_GOLDEN))


def _hash_by_numpy(key_B: NDArray[np.int64], num: int) -> NDArray[np.uint64]:
    """Return the same bits in half of torch's time: torch has no unsigned shift and no fast product of int64."""
    bits_BN = key_B.view(np.uint64)[:, None] + np.arange(1, num + 1, dtype=np.uint64) * _unsigned(_GOLDEN)
    shifted_BN = np.empty_like(bits_BN)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        np.bitwise_xor(bits_BN, np.right_shift(bits_BN, np.uint64(shift), out=shifted_BN), out=bits_BN)
        np.multiply(bits_BN, _unsigned(factor), out=bits_BN)
    return np.bitwise_xor(bits_BN, np.right_shift(bits_BN, np.uint64(31), out=shifted_BN), out=bits_BN)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = _shift_right(x, 30).bitwise_xor_(x).mul_(_MIX_1)
    x = _shift_right(x, 27).bitwise_xor_(x).mul_(_MIX_2)
    return _shift_right(x, 31).bitwise_xor_(x)


def _below_one(bits: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers in [0, 1) from the upper 24 bits of int64. A GPU casts and multiplies in one kernel."""
    # A Python number would make the product of torch's default type, which may be too short for 24 bits.
    return _shift_right(bits, 40) * torch.tensor(2.0**-24, dtype=torch.float32, device="cpu")


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right and fill with zeros; torch's own shift of int64 fills with the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _unsigned(number: int) -> np.uint64:
    return np.uint64(number & ((1 << 64) - 1))


def _mix_epoch(seed: int, epoch: torch.Tensor, view: int | torch.Tensor, purpose: int) -> torch.Tensor:
    """Do `_mix_int` for an epoch in a tensor."""
    state = _mix(epoch + _signed(_mix_int(seed) + _GOLDEN))
    state = _mix(state + view + _GOLDEN)
    return _mix(state + (purpose + _GOLDEN))


def _mix_int(*numbers: int) -> int:
    """Hash several integers to one signed 64-bit key, with the same finaliser in Python's integers."""
    mask = (1 << 64) - 1
    state = 0
    for number in map(int, numbers):  # a NumPy integer would overflow
        state = (state + number + (_GOLDEN & mask)) & mask
        state = ((state ^ (state >> 30)) * (_MIX_1 & mask)) & mask
        state = ((state ^ (state >> 27)) * (_MIX_2 & mask)) & mask
        state ^= state >> 31
    return _signed(state)


def _signed(number: int) -> int:
    """Return the int64 with the same lower 64 bits."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >= 1 << 63 else number
