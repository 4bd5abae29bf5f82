"""Say in one number how much a shuffle within windows of shards differs from a shuffle of all samples.

In a window, two samples of one shard are near each other, so they meet in a global batch more often. If a shard holds
similar samples, such as one class, a batch then holds fewer kinds of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from data_pipeline.loading.order import ShardWindows


def shard_pair_ratio(
    shard_ends: NDArray[np.int64], shuffle_shards: int | None, *, seed: int, global_batch_size: int, epoch: int = 0
) -> float:
    """Return how often two samples of one shard meet in a global batch, as a multiple of that in a global shuffle.

    This is the ratio of two expectations over the shuffles: of the pairs of samples that have the same shard and the
    same batch, in an epoch whose shards are in the order of (seed, epoch). It is 1 for a global shuffle, and about
    (N - 1) / (W - 1) for windows of W of N samples that are larger than a batch. It is exact for shards of any sizes.

    `shard_ends`, (num_shards,) int64, holds the index after the last sample of each shard.
    """
    num_samples, size = int(shard_ends[-1]), global_batch_size
    num_read = num_samples // size * size  # the others are dropped
    windows = ShardWindows(shard_ends, shuffle_shards or len(shard_ends), seed=seed, epoch=epoch)
    sizes = np.diff(shard_ends, prepend=0)[windows.shards].astype(np.float64)
    first_shards = np.arange(0, len(sizes), shuffle_shards or len(sizes))
    shard_pairs = np.add.reduceat(_pairs(sizes), first_shards)
    ends = windows.ends
    starts = np.concatenate([[0], ends[:-1]])
    batch_pairs = _pairs_in_batches(np.minimum(starts, num_read), np.minimum(ends, num_read), size=size)
    window_pairs = _pairs((ends - starts).astype(np.float64))
    meeting = np.divide(batch_pairs, window_pairs, out=np.zeros_like(batch_pairs), where=window_pairs > 0)
    share = (num_read // size) * size * (size - 1) / max(1, num_samples * (num_samples - 1))  # of all pairs
    expected = float(shard_pairs.sum()) * share
    return float((shard_pairs * meeting).sum()) / expected if expected else 1.0


def _pairs_in_batches(starts: NDArray[np.int64], ends: NDArray[np.int64], *, size: int) -> NDArray[np.float64]:
    """Return the pairs of positions from start to end of each window that lie in the same batch."""
    first_whole = np.minimum(-(-starts // size) * size, ends)
    end_whole = np.maximum(ends // size * size, first_whole)
    num_whole = (end_whole - first_whole) // size
    pieces = _pairs((first_whole - starts).astype(np.float64)) + _pairs((ends - end_whole).astype(np.float64))
    return pieces + num_whole * (size * (size - 1) / 2)


def _pairs(nums: NDArray[np.float64]) -> NDArray[np.float64]:
    return nums * (nums - 1) / 2
