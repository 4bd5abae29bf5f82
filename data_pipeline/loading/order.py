"""Which samples a rank reads at each step, as a pure function of (seed, step).

The order of an epoch is one seeded permutation of all N samples, or of windows of shards for a dataset that is fetched
while it is read. It is cut into N // G global batches of G samples; rank r of W takes the r-th part of each.

Guarantees: a global batch does not depend on the number of ranks, and no sample comes twice in it. A resumed run reads
nothing that it skips.

Shapes: B batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import BadSample


def num_steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Return the number of whole global batches in an epoch, at least one.

    Each epoch drops the samples that are left over; they are others each time. Raises `UserError` if the dataset does
    not fill one global batch.
    """
    if not 1 <= global_batch_size <= num_samples:
        raise UserError(
            f"global_batch_size {global_batch_size} does not fit a dataset of {num_samples} samples; "
            f"use 1 to {num_samples}, or build a larger dataset"
        )
    return num_samples // global_batch_size


def check_batch_size(num_samples: int, *, global_batch_size: int, world_size: int) -> None:
    """Raise `UserError`, with batch sizes that would fit, unless all ranks get the same number of equal batches."""
    largest = num_samples // world_size * world_size
    if largest == 0:
        raise UserError(f"{num_samples} samples are too few for {world_size} ranks; build a larger dataset")
    fits = 1 <= global_batch_size <= num_samples
    if fits and global_batch_size % world_size == 0:
        return
    below = min(global_batch_size // world_size * world_size, largest)
    sizes = [str(size) for size in (below, below + world_size) if 1 <= size <= largest]
    problem = f"cannot be divided by {world_size} ranks" if fits else f"does not fit a dataset of {num_samples} samples"
    raise UserError(f"global_batch_size {global_batch_size} {problem}; use {' or '.join(sizes)}")


def epoch_order(
    num_samples: int,
    *,
    seed: int,
    epoch: int,
    shard_ends: NDArray[np.int64] | None = None,
    shuffle_shards: int | None = None,
) -> NDArray[np.int64]:
    """Return the order of one epoch: a read-only permutation of all samples, (num_samples,) int64.

    With `shuffle_shards`, the shards are shuffled and cut into windows of that many. The samples of a window are
    shuffled among themselves, and come before those of the next window. `shard_ends`, (num_shards,), holds the index
    after the last sample of each shard.
    """
    if shuffle_shards is None:
        return _shuffled(num_samples, seed, epoch)
    assert shard_ends is not None
    return _shuffled_by_windows(shard_ends.tobytes(), shuffle_shards, seed, epoch)


@lru_cache(maxsize=2)  # the epoch being read and the one after it
def _shuffled(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    order = generator(seed, "epoch order", epoch).permutation(num_samples).astype(np.int64, copy=False)
    order.flags.writeable = False
    return order


@lru_cache(maxsize=2)
def _shuffled_by_windows(shard_ends: bytes, shuffle_shards: int, seed: int, epoch: int) -> NDArray[np.int64]:
    ends = np.frombuffer(shard_ends, dtype=np.int64)
    starts = ends - np.diff(ends, prepend=0)
    parts = [np.empty(0, dtype=np.int64)]
    for number, window in enumerate(shard_windows(len(ends), shuffle_shards, seed=seed, epoch=epoch)):
        samples = np.concatenate([np.arange(starts[shard], ends[shard]) for shard in window.tolist()])
        parts.append(generator(seed, "window order", epoch, number).permutation(samples))
    order = np.concatenate(parts)
    order.flags.writeable = False
    return order


def shard_windows(num_shards: int, shuffle_shards: int, *, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    """Return the shards of each window of an epoch, in the order in which the windows are read."""
    shards = generator(seed, "shard order", epoch).permutation(num_shards)
    return [shards[start : start + shuffle_shards] for start in range(0, num_shards, shuffle_shards)]


def batch_indices(
    num_samples: int,
    *,
    seed: int,
    step: int,
    global_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    shard_ends: NDArray[np.int64] | None = None,
    shuffle_shards: int | None = None,
) -> tuple[int, NDArray[np.int64]]:
    """Return the epoch of a step, and the samples that a rank reads there: (global_batch_size / world_size,) indices.

    `step` counts from the start of training. The parts of all ranks, in the order of the ranks, are the global batch.
    By default the whole global batch is returned.
    """
    order = BatchOrder(num_samples, seed, global_batch_size, rank, world_size, shard_ends, shuffle_shards)
    epoch, indices, _ = order.at(step, bad={})
    return epoch, indices


@dataclass(frozen=True)
class BatchOrder:
    """The samples that a rank reads at each step."""

    num_samples: int
    seed: int
    global_batch_size: int
    rank: int = 0
    world_size: int = 1
    shard_ends: NDArray[np.int64] | None = None
    shuffle_shards: int | None = None

    @property
    def num_steps_per_epoch(self) -> int:
        return num_steps_per_epoch(self.num_samples, self.global_batch_size)

    def at(self, step: int, *, bad: Mapping[int, BadSample]) -> tuple[int, NDArray[np.int64], tuple[BadSample, ...]]:
        """Return the epoch of a step, (B,) int64 indices of good samples, and the bad samples that were replaced.

        `bad` holds the bad samples by index. A bad sample is replaced by the first good one in the same row of the
        global batches that follow in the epoch, then of those before. Rows differ within a global batch, so no sample
        comes twice in it, and a rank needs nothing from other ranks.

        Raises `UserError` if every replacement is bad too.
        """
        size = self.global_batch_size
        epoch, step_in_epoch = divmod(step, self.num_steps_per_epoch)
        order = epoch_order(
            self.num_samples,
            seed=self.seed,
            epoch=epoch,
            shard_ends=self.shard_ends,
            shuffle_shards=self.shuffle_shards,
        )
        local_size = size // self.world_size
        first_row = self.rank * local_size
        start = step_in_epoch * size + first_row
        indices = order[start : start + local_size]
        bad_rows = [row for row, index in enumerate(indices.tolist()) if index in bad] if bad else []
        if not bad_rows:
            return epoch, indices, ()
        indices = indices.copy()
        replaced: list[BadSample] = []
        for row in bad_rows:
            same_row = order[first_row + row :: size]
            following = chain(same_row[step_in_epoch:].tolist(), same_row[:step_in_epoch].tolist())
            for index in following:
                if index not in bad:
                    indices[row] = index
                    break
                replaced.append(bad[index])
            else:
                raise UserError(
                    f"sample {bad[int(indices[row])].key} cannot be read, nor can any of the {len(same_row)} that "
                    f"could stand in for it with a global_batch_size of {size}; build or copy the dataset again"
                )
        return epoch, indices, tuple(replaced)
