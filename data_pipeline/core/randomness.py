"""Make NumPy generators that depend on (seed, purpose, numbers) alone, not on state, order or process."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return a counter-based generator for one purpose, e.g. `generator(seed, "overlay", index, repeat)`.

    `purpose` is part of the key, so that two uses of the same numbers never share a stream. Philox is fully specified
    (Salmon et al. 2011), so its bits are the same on every platform.
    """
    return np.random.Generator(_philox(seed, purpose, numbers))


def shuffled_in_rounds(labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Return a shuffle of the numbers 0 to N - 1, for N labels of -1 or more: (N,) int64.

    It goes in rounds. Each round has one number of every label that has numbers left, so that every beginning of the
    shuffle is balanced.
    """
    shuffled = rng.permutation(len(labels))
    by_label = np.argsort(labels[shuffled], kind="stable")
    counts = np.bincount(labels + 1)
    rounds = np.empty(len(labels), dtype=np.int64)
    rounds[by_label] = np.arange(len(labels)) - np.repeat(counts.cumsum() - counts, counts)
    return shuffled[np.argsort(rounds, kind="stable")]


def key_words(num: int, seed: int, purpose: str, *numbers: int) -> NDArray[np.uint64]:
    """Return (num,) uint64 random words for a hash: the first that the generator of the same arguments is made of."""
    return _philox(seed, purpose, numbers).random_raw(num)


def _philox(seed: int, purpose: str, numbers: tuple[int, ...]) -> np.random.Philox:
    return np.random.Philox(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *numbers]))
