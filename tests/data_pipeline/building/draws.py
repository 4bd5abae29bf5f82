"""Keys of draws, noisy pictures, and whether draws are uniform, for tests of overlays."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys

# The chi-square value that uniform draws exceed once in 10,000 times, by degrees of freedom.
CHI_SQUARE = {1: 15.1, 2: 18.4, 3: 21.1, 5: 25.7, 6: 27.9, 9: 33.7, 15: 44.3, 25: 58.6, 31: 70.8, 99: 161.3}


def keys_of(index_B: Tensor | range | int, *, seed: int = 0, epoch: int = 0, view: int = 0) -> DrawKeys:
    """The keys of some samples, or of the first so many."""
    index_B = range(index_B) if isinstance(index_B, int) else index_B
    return DrawKeys(seed=seed, epoch=epoch, index_B=torch.as_tensor(index_B, dtype=torch.int64), view=view)


def random_pictures(num: int, *, seed: int = 0, shape: tuple[int, int, int] = (3, 32, 32)) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (num, *shape), dtype=np.uint8))


def chi_square(counts: np.ndarray, shares: np.ndarray | float) -> float:
    expected = counts.sum() * np.broadcast_to(shares, counts.shape)
    return float(((counts - expected) ** 2 / expected).sum())


def is_uniform(values: Tensor, num: int) -> bool:
    return chi_square(np.bincount(values.numpy(), minlength=num), 1 / num) < CHI_SQUARE[num - 1]
