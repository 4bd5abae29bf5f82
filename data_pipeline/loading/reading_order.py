"""The order in which a stream reads: of one dataset, or of the sources of a mixture.

Both have one interface. So a stream reads, keeps in memory and replaces samples in the same way for both.

Shapes: B rows of a rank, R rows of a rank from one dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.sample import BadSample
from data_pipeline.loading.mixture import Mixture, MixtureOrder
from data_pipeline.loading.order import BatchOrder, Rows, check_batch_size
from data_pipeline.storage.store import SampleStore


class ReadingOrder(Protocol):
    """The rows that a rank reads at each step; `number` counts the datasets from 0.

    A function of the step alone: iterators of one stream share it. It is asked for a step when the step is read, which
    for data in memory is when the batch is asked for.
    """

    @property
    def num_steps_per_epoch(self) -> int: ...

    def rows(self, number: int, step: int, *, bad: Mapping[int, BadSample]) -> Rows:
        """Return the rows that come from a dataset, without those of `bad`, its bad samples by index.

        Raises `UserError` if a bad sample has no replacement.
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

    def rows(self, number: int, step: int, *, bad: Mapping[int, BadSample]) -> Rows:
        epoch, indices_R, replaced = self.order.at(step, bad=bad)
        return Rows(indices_R, indices_R, epoch, replaced)

    def row_order(self, step: int) -> None:
        return None

    def position_at(self, number: int, step: int) -> tuple[int, int]:
        return self.order.position_at(step)

    def seed_of(self, number: int) -> int:
        return self.order.seed

    def reads_an_epoch(self, number: int, steps: range) -> bool:
        return len(steps) >= self.num_steps_per_epoch

    def named(self, number: int, bad: BadSample) -> BadSample:
        return bad


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
        return MixtureOrder(
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
