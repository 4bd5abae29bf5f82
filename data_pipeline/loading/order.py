"""Compute which samples a rank reads at each step, as a pure function of (seed, step).

The order of an epoch is one keyed permutation of all N samples, or of windows of shards for a dataset that is fetched
while it is read. It is cut into N // G global batches of G samples; rank r of W takes the r-th part of each.

Guarantees: a global batch does not depend on the number of ranks, and no sample comes twice in it. A resumed run reads
nothing that it skips. No array of N numbers is made.

The order of a mixture (`data_pipeline.loading.mixture`) has the same methods. So a stream reads, keeps in memory and
replaces samples in the same way for both.

Shapes: B rows of a rank, R rows of a rank from one dataset, X positions in an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import BadSample
from data_pipeline.loading.permutation import KeyedPermutation

EpochOrder = Callable[[NDArray[np.int64]], NDArray[np.int64]]  # from positions in an epoch, (X,), to samples, (X,)

_CHUNK: Final = 64  # replacements that are looked up at once


@dataclass(frozen=True)
class Rows:
    """The rows of a rank's part of a global batch that come from one dataset.

    Attributes:
        indices_R: the samples, in the dataset.
        key_index_R, key_epoch: the numbers in the keys of their draws; see `DrawKeys`.
        bad: the bad samples of the dataset that were replaced.
    """

    indices_R: NDArray[np.int64]
    key_index_R: NDArray[np.int64]
    key_epoch: int
    bad: tuple[BadSample, ...]


def num_steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Return the number of whole global batches in an epoch, at least one.

    Each epoch drops the samples that are left over, which differ from epoch to epoch. Raises `UserError` if the dataset
    does not fill one global batch.
    """
    if not 1 <= global_batch_size <= num_samples:
        raise UserError(
            f"global_batch_size {global_batch_size} does not fit a dataset of {num_samples} samples; "
            f"set global_batch_size to 1 to {num_samples}, or build a larger dataset"
        )
    return num_samples // global_batch_size


def check_batch_size(num_samples: int, *, global_batch_size: int, world_size: int) -> None:
    """Raise `UserError` if the ranks cannot get equal parts of each global batch, or if the dataset fills none."""
    check_ranks(global_batch_size, world_size=world_size)
    num_steps_per_epoch(num_samples, global_batch_size)


def check_ranks(global_batch_size: int, *, world_size: int) -> None:
    """Raise `UserError` if the ranks do not divide the global batch."""
    if global_batch_size % world_size:
        raise UserError(
            f"global_batch_size {global_batch_size} cannot be divided by {world_size} ranks; set it to a multiple of "
            f"{world_size}"
        )


class ShardWindows:
    """The shuffled shards of an epoch, cut into windows of `shuffle_shards`, and the order of the samples in them.

    Holds three numbers for each shard. Called with positions, (X,) int64, it returns the samples there, (X,) int64.

    Attributes:
        shards: (num_shards,) int64, the shards in the order in which they are read.
        ends: (num_windows,) int64, the position after the last sample of each window.
    """

    def __init__(self, shard_ends: NDArray[np.int64], shuffle_shards: int, *, seed: int, epoch: int) -> None:
        self.seed, self.epoch = seed, epoch
        self._num_per_window = shuffle_shards
        self.shards = generator(seed, "shard order", epoch).permutation(len(shard_ends)).astype(np.int64, copy=False)
        sizes = np.diff(shard_ends, prepend=0)[self.shards]
        self._ends = np.cumsum(sizes)
        self._shift = shard_ends[self.shards] - self._ends  # from a position in stored order to its sample
        last = np.arange(shuffle_shards, len(shard_ends) + shuffle_shards, shuffle_shards) - 1
        self.ends: NDArray[np.int64] = self._ends[np.minimum(last, len(shard_ends) - 1)]

    def __len__(self) -> int:
        return len(self.ends)

    def window(self, number: int) -> NDArray[np.int64]:
        """Return the shards of a window."""
        return self.shards[number * self._num_per_window : (number + 1) * self._num_per_window]

    def number_at(self, position: int) -> int:
        """Return the number of the window in which a position lies."""
        return int(np.searchsorted(self.ends, position, side="right"))

    def __call__(self, positions_X: NDArray[np.int64]) -> NDArray[np.int64]:
        shuffled_X = np.empty_like(positions_X)
        windows_X = np.searchsorted(self.ends, positions_X, side="right")
        for number in np.unique(windows_X).tolist():
            rows = windows_X == number
            start = int(self.ends[number - 1]) if number else 0
            size = int(self.ends[number]) - start
            permutation = KeyedPermutation(size, self.seed, "window permutation", self.epoch, number)
            shuffled_X[rows] = start + permutation(positions_X[rows] - start)
        samples_X: NDArray[np.int64] = shuffled_X + self._shift[np.searchsorted(self._ends, shuffled_X, side="right")]
        return samples_X


@dataclass(frozen=True)
class EpochOrders:
    """The order of each epoch of one dataset: a permutation of all samples, as a function of positions in the epoch.

    With `shuffle_shards`, the shards are shuffled and cut into windows of that many. The samples of a window are
    shuffled among themselves, and come before those of the next window. `shard_ends`, (num_shards,), holds the index
    after the last sample of each shard. An order computes what it is asked for, and holds a few numbers for each shard
    at most.
    """

    num_samples: int
    seed: int
    shard_ends: NDArray[np.int64] | None = None
    shuffle_shards: int | None = None
    _kept: dict[int, EpochOrder] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of_epoch(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch. The last three that were made are kept."""
        if epoch not in self._kept:
            self._kept[epoch] = self._make(epoch)
            for older in list(self._kept)[:-3]:
                del self._kept[older]
        return self._kept[epoch]

    def windows(self, epoch: int) -> ShardWindows:
        """Return the shards in the windows of an epoch; in one window without `shuffle_shards`."""
        assert self.shard_ends is not None
        return ShardWindows(self.shard_ends, self.shuffle_shards or len(self.shard_ends), seed=self.seed, epoch=epoch)

    def _make(self, epoch: int) -> EpochOrder:
        if self.shuffle_shards is None:
            return KeyedPermutation(self.num_samples, self.seed, "epoch permutation", epoch)
        return self.windows(epoch)


@dataclass(frozen=True)
class BatchOrder:
    """The samples of one dataset, number 0, that a rank reads at each step.

    The parts of all ranks, in rank order, make up the global batch.
    """

    epochs: EpochOrders
    global_batch_size: int
    rank: int = 0
    world_size: int = 1

    @property
    def num_steps_per_epoch(self) -> int:
        return num_steps_per_epoch(self.epochs.num_samples, self.global_batch_size)

    def rows(self, number: int, step: int, *, bad: Mapping[int, BadSample]) -> Rows:
        """Return the rows of this rank at a step.

        A bad sample is replaced by the first good sample in the same row of the other global batches of the epoch, the
        later batches before the earlier ones. So no sample comes twice in a global batch, and a rank needs nothing from
        other ranks.

        Raises `UserError` if there is none, as in a batch of more than half of the dataset.
        """
        epoch, step_in_epoch = divmod(step, self.num_steps_per_epoch)
        order, num_samples = self.epochs.of_epoch(epoch), self.epochs.num_samples
        local_size = self.global_batch_size // self.world_size
        first_row = self.rank * local_size
        start = step_in_epoch * self.global_batch_size + first_row
        indices_R = order(np.arange(start, start + local_size, dtype=np.int64))
        replaced: list[BadSample] = []
        for row in rows_of_bad(indices_R, bad):
            positions = range(first_row + row, num_samples, self.global_batch_size)
            candidates = (index for chunk in chunks_from(positions, step_in_epoch) for index in order(chunk).tolist())
            index = first_good(candidates, bad, replaced)
            if index is None:
                raise UserError(
                    f"sample {bad[int(indices_R[row])].key} cannot be read, and no good sample can replace it with a "
                    f"global_batch_size of {self.global_batch_size} of {num_samples} samples; lower "
                    "global_batch_size, or build or copy the dataset again"
                )
            indices_R[row] = index
        return Rows(indices_R, indices_R, epoch, tuple(replaced))

    def position_at(self, number: int, step: int) -> tuple[int, int]:
        """Return the epoch, and the position in it, at which the global batch of a step begins."""
        epoch, step_in_epoch = divmod(step, self.num_steps_per_epoch)
        return epoch, step_in_epoch * self.global_batch_size

    def epochs_of(self, number: int) -> EpochOrders:
        """Return the orders of the epochs."""
        return self.epochs


def rows_of_bad(indices_R: NDArray[np.int64], bad: Mapping[int, BadSample]) -> list[int]:
    """Return the rows whose samples are bad."""
    return [row for row, index in enumerate(indices_R.tolist()) if index in bad] if bad else []


def chunks_from(positions: range, start: int) -> Iterator[NDArray[np.int64]]:
    """Yield all positions from number `start` on, then those before it, some at a time."""
    for part in (positions[start:], positions[:start]):
        for first in range(0, len(part), _CHUNK):
            yield np.array(part[first : first + _CHUNK], dtype=np.int64)


def first_good(indices: Iterable[int], bad: Mapping[int, BadSample], passed: list[BadSample]) -> int | None:
    """Return the first sample that is not bad; None if there is none. Adds the bad samples before it to `passed`."""
    for index in indices:
        if index not in bad:
            return index
        passed.append(bad[index])
    return None
