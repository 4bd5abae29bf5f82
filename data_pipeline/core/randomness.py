"""Make generators of random numbers that depend on (seed, purpose, numbers) alone, not on state, order or process."""

from __future__ import annotations

import zlib

import numpy as np


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return a counter-based generator for one purpose, e.g. `generator(seed, "overlay", index, repeat)`.

    `purpose` is part of the key, so that two uses of the same numbers never share a stream. Philox is specified by its
    paper (Salmon et al. 2011), so its bits are the same on every platform.
    """
    entropy = [seed, zlib.crc32(purpose.encode()), *numbers]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
