"""Permute the numbers 0 to N - 1 under a key, a few at a time: the memory does not grow with N.

A Feistel network permutes all numbers of b bits, 2**b >= N. An outcome of N or more is put through it again until it is
below N (cycle walking; Black and Rogaway 2002), which takes two passes on average at most. Up to 4,096 numbers are
permuted by a table.

Shapes: X positions asked for.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.randomness import generator, key_words

_MAX_TABLE: Final = 4_096
# Four rounds pass chi-square tests of positions, pairs and neighbours over thousands of keys, and two do not.
_NUM_ROUNDS: Final = 8
# The SplitMix64 finaliser's multipliers (Steele et al. 2014).
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)


class KeyedPermutation:
    """A permutation of 0 to `size` - 1 (below 2**63) that (seed, purpose, numbers) decide alone.

    Guarantees: the same on every platform. Two calls for disjoint positions give disjoint outcomes.
    """

    def __init__(self, size: int, seed: int, purpose: str, *numbers: int) -> None:
        assert 0 <= size < 1 << 63
        self._size = size
        if size <= _MAX_TABLE:
            self._table = generator(seed, purpose, *numbers).permutation(size).astype(np.int64, copy=False)
            return
        num_bits = (size - 1).bit_length()
        self._num_left, self._num_right = num_bits // 2, num_bits - num_bits // 2
        self._keys = key_words(_NUM_ROUNDS, seed, purpose, *numbers)

    def __len__(self) -> int:
        return self._size

    def __call__(self, positions_X: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the outcomes of some positions, (X,) int64 from 0 to `size` - 1, in their order."""
        if self._size <= _MAX_TABLE:
            return self._table[positions_X]
        outcomes = self._all_bits(positions_X.astype(np.uint64))
        outside = np.flatnonzero(outcomes >= self._size)
        while len(outside):
            again = self._all_bits(outcomes[outside])
            outcomes[outside] = again
            outside = outside[again >= self._size]
        return outcomes.astype(np.int64)

    def _all_bits(self, numbers_X: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Permute all numbers of the network's bits: in turn, each half is changed by a hash of the other."""
        shift = np.uint64(self._num_right)
        left_X, right_X = numbers_X >> shift, numbers_X & np.uint64((1 << self._num_right) - 1)
        for key_left, key_right in zip(self._keys[::2], self._keys[1::2], strict=True):
            left_X ^= _hash(right_X, key_left, num_bits=self._num_left)
            right_X ^= _hash(left_X, key_right, num_bits=self._num_right)
        return (left_X << shift) | right_X


def _hash(numbers_X: NDArray[np.uint64], key: np.uint64, *, num_bits: int) -> NDArray[np.uint64]:
    mixed_X = (numbers_X ^ key) * _MIX_1
    mixed_X ^= mixed_X >> np.uint64(29)
    mixed_X *= _MIX_2
    return mixed_X >> np.uint64(64 - num_bits)
