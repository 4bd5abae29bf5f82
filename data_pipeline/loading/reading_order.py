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
from data_pipeline.loading.mixture import MixtureOrder
from data_pipeline.loading.order import BatchOrder, NoReplacementError


@dataclass(frozen=True)
class Rows:
    """The rows of a rank's part of a global batch that come from one dataset.

    Attributes:
        indices_R: the samples, in the dataset.
        key_index_R, key_epoch: the numbers in the keys of their draws; see `DrawKeys`.
        bad: the bad samples that were replaced.
    """

    indices_R: NDArray[np.int64]
    key_index_R: NDArray[np.int64]
    key_epoch: int
    bad: tuple[BadSample, ...]


class ReadingOrder(Protocol):
    """The rows that a rank reads at each step; `number` counts the datasets from 0."""

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
class GroupedOrder(DatasetOrder):
    """The order of one dataset in groups of samples, which stand together in a batch and never on two ranks.

    The first samples of the epoch's order are read, each followed by the rest of its group. A sample may come twice in
    a batch, in two groups.

    `groups_NG`, (N, G) int64, holds the group of each of the N samples. Samples that were bad when the groups were
    found are in none. The group of a sample that cannot be read since then is replaced by the nearest whole group of a
    sample before it in stored order, or of the last sample; on all ranks alike, whatever each of them has met.
    """

    groups_NG: NDArray[np.int64]

    def rows(self, number: int, step: int, *, bad: Mapping[int, BadSample], all_known: bool = False) -> Rows:
        order = self.order
        epoch, step_in_epoch = divmod(step, self.num_steps_per_epoch)
        num_groups = order.global_batch_size // self.groups_NG.shape[1]
        num_own = num_groups // order.world_size
        first = step_in_epoch * num_groups + order.rank * num_own
        samples = order.of_epoch(epoch)(np.arange(first, first + num_own, dtype=np.int64))
        groups_KG = self.groups_NG[samples]
        met = {index: bad[index] for index in groups_KG.ravel().tolist() if index in bad} if bad else {}
        if met:
            is_bad_N = np.isin(self.groups_NG, list(bad))
            whole = np.flatnonzero(~is_bad_N.any(axis=1))
            if not len(whole):
                raise NoReplacementError(
                    f"sample {next(iter(met.values())).key} cannot be read, and each group of neighbours holds such a "
                    "sample; build or copy the dataset again"
                )
            groups_KG = self.groups_NG[whole[np.searchsorted(whole, samples, side="right") - 1]]
        indices_R = groups_KG.reshape(-1)
        return Rows(indices_R, indices_R, epoch, tuple(met.values()))


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
        return self.order.shares(step)[number]

    def named(self, number: int, bad: BadSample) -> BadSample:
        first = int(self.order.offsets[number])
        shard = f"{self.order.names[number]}/{bad.shard}"
        return replace(bad, index=first + bad.index, shard=shard, first=first)
