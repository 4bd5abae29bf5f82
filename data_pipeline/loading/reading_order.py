"""The order in which a stream reads: of one dataset, or of the sources of a mixture.

Both have one interface. So a stream reads, keeps in memory and replaces samples in the same way for both.

Shapes: B rows of a rank, R rows of a rank from one dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.sample import BadSample
from data_pipeline.loading.mixture import Mixture, MixtureOrder
from data_pipeline.loading.order import BatchOrder, check_batch_size
from data_pipeline.storage.store import SampleStore


@dataclass(frozen=True)
class Rows:
    """The rows of a rank's part of a global batch that come from one dataset.

    Attributes:
        indices_R: the samples, in the dataset.
        key_index_R, key_epoch: the numbers in the keys of their draws; see `DrawKeys`.
        bad: the bad samples that were replaced.
        group_size: the number of rows that stand together as a group; None if rows are not grouped.
    """

    indices_R: NDArray[np.int64]
    key_index_R: NDArray[np.int64]
    key_epoch: int
    bad: tuple[BadSample, ...]
    group_size: int | None = None


class ReadingOrder(Protocol):
    """The rows that a rank reads at each step; `number` counts the datasets from 0.

    A function of the step alone: iterators of one stream share it. It is asked for a step when the step is read, which
    for data in memory is when the batch is asked for.
    """

    @property
    def num_steps_per_epoch(self) -> int: ...

    def rows(self, number: int, step: int, *, bad: Mapping[int, BadSample], all_known: bool = False) -> Rows:
        """Return the rows that come from a dataset, without those of `bad`, its bad samples by index.

        Raises `NoReplacementError` if more can be replaced with `all_known`: if `bad` holds all of them.
        """
        ...

    def row_order(self, step: int) -> NDArray[np.int64] | None:
        """Return (B,) places in the rows of all datasets, put end to end; None if they are in order."""
        ...

    def position_at(self, number: int, step: int) -> tuple[int, int]:
        """Return the epoch of a dataset, and the position in it, at which the global batch of a step begins."""
        ...

    def seed_of(self, number: int) -> int:
        """Return the seed of the epochs of a dataset."""
        ...

    def reads_an_epoch(self, number: int, steps: range) -> bool:
        """Return whether at least an epoch of a dataset is read at these steps."""
        ...

    def share_of(self, number: int, step: int) -> float:
        """Return the share of a dataset in the rows of a step, on average."""
        ...

    def named(self, number: int, bad: BadSample) -> BadSample:
        """Return a bad sample of a dataset under its index among the samples of all."""
        ...


@dataclass(frozen=True)
class DatasetOrder:
    """The order of the one dataset of a stream."""

    order: BatchOrder

    @property
    def num_steps_per_epoch(self) -> int:
        return self.order.num_steps_per_epoch

    def rows(self, number: int, step: int, *, bad: Mapping[int, BadSample], all_known: bool = False) -> Rows:
        epoch, indices_R, replaced = self.order.at(step, bad=bad, all_known=all_known)
        return Rows(indices_R, indices_R, epoch, replaced)

    def row_order(self, step: int) -> None:
        return None

    def position_at(self, number: int, step: int) -> tuple[int, int]:
        return self.order.position_at(step)

    def seed_of(self, number: int) -> int:
        return self.order.seed

    def reads_an_epoch(self, number: int, steps: range) -> bool:
        return len(steps) >= self.num_steps_per_epoch

    def share_of(self, number: int, step: int) -> float:
        return 1.0

    def named(self, number: int, bad: BadSample) -> BadSample:
        return bad


@dataclass(frozen=True)
class SourcesOrder:
    """The order of the sources of a mixture."""

    order: MixtureOrder

    @property
    def num_steps_per_epoch(self) -> int:
        return self.order.num_steps_per_epoch

    def rows(self, number: int, step: int, *, bad: Mapping[int, BadSample], all_known: bool = False) -> Rows:
        found = self.order.at(step, number, bad=bad)
        first, num_samples = int(self.order.offsets[number]), int(self.order.offsets[-1])
        key_index_R = found.epochs_R * num_samples + first + found.indices_R
        return Rows(found.indices_R, key_index_R, 0, tuple(self.named(number, each) for each in found.bad))

    def row_order(self, step: int) -> NDArray[np.int64]:
        return self.order.row_order(step)

    def position_at(self, number: int, step: int) -> tuple[int, int]:
        return self.order.position_at(number, step)

    def seed_of(self, number: int) -> int:
        return self.order.sources[number].seed

    def reads_an_epoch(self, number: int, steps: range) -> bool:
        before, after = self.order.draws_before(steps.start)[number], self.order.draws_before(steps.stop)[number]
        return after - before >= self.order.sizes[number]

    def share_of(self, number: int, step: int) -> float:
        return self.order.shares[number]

    def named(self, number: int, bad: BadSample) -> BadSample:
        first = int(self.order.offsets[number])
        shard = f"{self.order.names[number]}/{bad.shard}"
        return replace(bad, index=first + bad.index, shard=shard, first=first)


def reading_order(
    dataset: SampleStore | Mixture,
    *,
    shuffle_shards: int | None,
    seed: int,
    global_batch_size: int,
    rank: int,
    world_size: int,
) -> ReadingOrder:
    """Return the order of a dataset or of a mixture. Raises `UserError` if the batch size does not fit it."""
    if isinstance(dataset, Mixture):
        stores = [source.store for source in dataset.sources]
        return SourcesOrder(
            MixtureOrder(
                [len(store) for store in stores],
                dataset.weights,
                names=[source.name for source in dataset.sources],
                seed=seed,
                global_batch_size=global_batch_size,
                rank=rank,
                world_size=world_size,
                epoch_samples=dataset.epoch_samples,
                shard_ends=[store.shard_ends for store in stores],
                shuffle_shards=shuffle_shards,
            )
        )
    check_batch_size(len(dataset), global_batch_size=global_batch_size, world_size=world_size)
    return DatasetOrder(
        BatchOrder(
            len(dataset),
            seed,
            global_batch_size,
            rank,
            world_size,
            shard_ends=dataset.shard_ends,
            shuffle_shards=shuffle_shards,
        )
    )
