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


def key_words(num: int, seed: int, purpose: str, *numbers: int) -> NDArray[np.uint64]:
    """Return (num,) uint64 random words for a hash: the first that the generator of the same arguments is made of."""
    words: NDArray[np.uint64] = _philox(seed, purpose, numbers).random_raw(num)
    return words


def _philox(seed: int, purpose: str, numbers: tuple[int, ...]) -> np.random.Philox:
    return np.random.Philox(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *numbers]))
