"""Compute which samples of several datasets make up each global batch, as a pure function of (seed, step).

The datasets are the sources of a mixture. Each global batch draws a number of samples from each source, which depends
on the weights and the step alone. Draw j of a source of N samples is position j mod N of its epoch j div N: each source
has epochs of its own. The rows of a batch are then shuffled, so every rank sees all sources. The state is the step: the
draws before a step are computed, not counted.

Guarantees:

- A global batch does not depend on the number of ranks, and no sample comes twice in it.
- Each epoch of a source holds each of its samples once.
- The number of samples drawn from a source differs from its share by less than 2, at any step and for any number of
  sources: by less than 1 for three sources, and by 1/2 at most for two.

Shapes: B rows of a rank, R rows of a rank from one source, X draws, K sources.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.randomness import key_words
from data_pipeline.core.sample import BadSample
from data_pipeline.loading.order import (
    BatchOrder,
    EpochOrder,
    EpochOrders,
    Rows,
    check_batch_size,
    check_ranks,
    chunks_from,
    first_good,
    rows_of_bad,
)
from data_pipeline.loading.permutation import KeyedPermutation
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore


def check_same_inputs(datasets: Mapping[str, Manifest]) -> None:
    """Raise `UserError` if datasets that are read together differ in medium, input shape or sample rate."""
    (first, expected), *others = datasets.items()
    for name, manifest in others:
        for entry, what in (("medium", "medium"), ("batch_shape", "input shape"), ("sample_rate", "sample rate")):
            here, there = getattr(manifest, entry), getattr(expected, entry)
            if here != there:
                raise UserError(
                    f"{first} and {name} differ in {what} ({there} and {here}); build or index both for the same"
                )


@dataclass(frozen=True)
class _Split:
    """A node of `Shares`: `numerator / denominator` of its draws go to `first`, the others to `second`."""

    first: _Split | int
    second: _Split | int
    numerator: int
    denominator: int


class Shares:
    """Split draws among sources in proportion to their weights.

    The sources are the leaves of a Huffman tree of the weights. At each node, the first branch gets the rounded share
    of the draws, and the second branch the rest. A weight may be 0, but not all.

    Guarantees: the counts of n draws add up to n, and no count falls when n grows. A count differs from its share by at
    most half the sum of w / w_a over the branches a above it, which is below 1.68 for any Huffman tree.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.7 is 7/10
        self._num_sources, total = len(weights), sum(exact)
        self.shares = tuple(float(weight / total) for weight in exact)
        waiting: list[tuple[Fraction, int, _Split | int]] = [(weight, k, k) for k, weight in enumerate(exact)]
        heapq.heapify(waiting)
        number = len(waiting)  # breaks ties
        while len(waiting) > 1:
            (first_weight, _, first), (second_weight, _, second) = heapq.heappop(waiting), heapq.heappop(waiting)
            weight = first_weight + second_weight
            share = first_weight / weight if weight else weight
            heapq.heappush(waiting, (weight, number, _Split(first, second, share.numerator, share.denominator)))
            number += 1
        self._root = waiting[0][2]

    def counts(self, num_draws: int) -> list[int]:
        """Return the number of the first `num_draws` draws that come from each source, K numbers."""

        def split(node: _Split, num: int) -> tuple[int, int]:
            num_first = (2 * num * node.numerator + node.denominator) // (2 * node.denominator)
            return num_first, num - num_first

        return self._walk(num_draws, split)

    def most(self, num_draws: int) -> list[int]:
        """Return the most draws that each source may have among any `num_draws` draws in a row, K numbers."""

        def split(node: _Split, num: int) -> tuple[int, int]:
            num_second = num * (node.denominator - node.numerator)
            return -(-num * node.numerator // node.denominator), -(-num_second // node.denominator)

        return self._walk(num_draws, split)

    def _walk(self, num_draws: int, split: Callable[[_Split, int], tuple[int, int]]) -> list[int]:
        """Return the number at each leaf, K numbers, if `split` says how many of a node's draws go to its branches."""
        counts = [0] * self._num_sources
        waiting = [(self._root, num_draws)]
        while waiting:
            node, num = waiting.pop()
            if isinstance(node, int):
                counts[node] = num
            else:
                waiting += zip((node.first, node.second), split(node, num), strict=True)
        return counts


@dataclass(frozen=True)
class Mixture:
    """Several datasets that are drawn from by weights.

    Raises `UserError` if two sources differ in medium, input shape or sample rate.

    Attributes:
        sources: the datasets by name, in an order that must not change during a run. The names stand in messages and
            metrics.
        weights: of the sources: numbers of 0 or more, not all 0.
        epoch_samples: the number of samples that count as an epoch; None means as many as all sources hold.
    """

    sources: Mapping[str, SampleStore]
    weights: tuple[float, ...]
    epoch_samples: int | None = None

    def __post_init__(self) -> None:
        check_same_inputs({name: store.manifest for name, store in self.sources.items()})


@dataclass(frozen=True)
class SourceEpochs(EpochOrders):
    """The epochs of one source, one after another, as a function of draws.

    Guarantees: each epoch is a permutation of the samples. No sample comes twice among `reach` + 1 draws in a row, also
    where one epoch follows another; `reach` is a third of the samples at most.

    For the second guarantee, an early position of an epoch that holds one of the last samples of the epoch before is
    exchanged with a later position. Positions of the last `reach` are never exchanged, so an epoch depends only on
    itself and on the one before.
    """

    reach: int = field(kw_only=True)

    def at(self, draws_X: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the epoch of each draw and its sample, both (X,) int64."""
        epochs_X, positions_X = np.divmod(draws_X, self.num_samples)
        samples_X = np.empty_like(draws_X)
        for epoch in np.unique(epochs_X).tolist():
            rows = epochs_X == epoch
            samples_X[rows] = self.of_epoch(epoch)(positions_X[rows])
        return epochs_X, samples_X

    def _make(self, epoch: int) -> EpochOrder:
        order = super()._make(epoch)
        if epoch == 0 or self.reach == 0:
            return order
        end = self.num_samples - self.reach
        last = super()._make(epoch - 1)(np.arange(end, self.num_samples, dtype=np.int64))
        repeated = np.flatnonzero(np.isin(order(np.arange(self.reach, dtype=np.int64)), last))
        partners, start = np.empty(0, dtype=np.int64), self.reach
        while len(partners) < len(repeated):
            positions = np.arange(start, min(start + self.reach, end), dtype=np.int64)
            assert len(positions), "a third of the samples is always enough"
            partners = np.concatenate([partners, positions[~np.isin(order(positions), last)]])
            start += self.reach
        partners = partners[: len(repeated)]
        now, then = np.concatenate([repeated, partners]), np.concatenate([partners, repeated])
        return partial(_exchanged, order, now, then) if len(now) else order


def _exchanged(
    order: EpochOrder, now: NDArray[np.int64], then: NDArray[np.int64], positions_X: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the samples of an order at positions. The ascending positions `now` hold the samples at `then`."""
    places = np.searchsorted(now, positions_X).clip(max=len(now) - 1)
    return order(np.where(now[places] == positions_X, then[places], positions_X))


@dataclass(frozen=True)
class _Draws:
    """The draws of a rank at one step: the rows, and the numbers of the draws, of each source.

    `of_batch` holds the draws of the whole global batch from each source.
    """

    rows: tuple[NDArray[np.int64], ...]
    draws: tuple[NDArray[np.int64], ...]
    of_batch: tuple[range, ...]


class MixtureOrder:
    """The samples that a rank reads at each step of a mixture, as `BatchOrder` says those of one dataset.

    `sizes` holds the number of samples of each source, and `names` its name for messages. `shard_ends` and
    `shuffle_shards` mean the same as in `EpochOrders`, with the shards of each source.

    Raises `UserError` if the ranks cannot get equal parts of each global batch, or if the weights ask for more than a
    third of a source in one global batch.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        names: Sequence[str],
        seed: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        epoch_samples: int | None = None,
        shard_ends: Sequence[NDArray[np.int64]] | None = None,
        shuffle_shards: int | None = None,
    ) -> None:
        check_mixture(sizes, weights, names=names, global_batch_size=global_batch_size, world_size=world_size)
        self.sizes, self.names, self.seed = tuple(sizes), tuple(names), seed
        self.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._size, self._rank, self._world_size = global_batch_size, rank, world_size
        self._epoch_samples = epoch_samples or sum(sizes)
        self._shares = Shares(weights)
        self.sources = tuple(
            SourceEpochs(
                size,
                int(key_words(1, seed, "mixture source", number)[0] >> np.uint64(1)),
                None if shard_ends is None else shard_ends[number],
                shuffle_shards,
                reach=_reach(size, global_batch_size),
            )
            for number, size in enumerate(sizes)
        )
        self._last: tuple[int, _Draws] | None = None

    @property
    def num_steps_per_epoch(self) -> int:
        return num_steps_per_mixture_epoch(self._epoch_samples, self._size)

    def draws_before(self, step: int) -> list[int]:
        """Return the number of samples drawn from each source before a step, in all global batches together."""
        return self._shares.counts(step * self._size)

    def position_at(self, number: int, step: int) -> tuple[int, int]:
        """Return the epoch of a source at which the draws of a step begin, and the position in it."""
        return divmod(self.draws_before(step)[number], self.sizes[number])

    def epochs_of(self, number: int) -> SourceEpochs:
        return self.sources[number]

    def rows(self, number: int, step: int, *, bad: Mapping[int, BadSample]) -> Rows:
        """Return the rows of this rank that come from one source at a step.

        `bad` holds the bad samples of the source by index. A bad sample is replaced by a good sample of the same source
        that is not in the batch. The choice depends on the row alone, so a rank needs nothing from other ranks.

        Raises `UserError` if all possible replacements are bad too.
        """
        drawn = self._drawn(step)
        draws_R, of_batch = drawn.draws[number], drawn.of_batch[number]
        epochs_R, indices_R = self.sources[number].at(draws_R)
        replaced: list[BadSample] = []
        for row in rows_of_bad(indices_R, bad):
            replaced.append(bad[int(indices_R[row])])
            index = first_good(self._replacements(number, int(draws_R[row]), of_batch), bad, replaced)
            if index is None:
                raise UserError(
                    f"sample {bad[int(indices_R[row])].key} of {self.names[number]} cannot be read, nor can any of the "
                    "samples that could replace it; build or copy that dataset again"
                )
            epochs_R[row], indices_R[row] = of_batch[-1] // self.sizes[number], index
        key_index_R = epochs_R * self.offsets[-1] + self.offsets[number] + indices_R
        return Rows(indices_R, key_index_R, 0, tuple(replaced))

    def row_order(self, step: int) -> NDArray[np.int64]:
        """Return (B,) places in the rows of all sources, put end to end: the order of the rows in the batch."""
        return np.argsort(np.concatenate(self._drawn(step).rows))

    def _drawn(self, step: int) -> _Draws:
        """Return the draws of a step. Those of the last step are kept, because each source asks for them."""
        if self._last is None or self._last[0] != step:
            self._last = step, self._draw(step)
        return self._last[1]

    def _draw(self, step: int) -> _Draws:
        before, after = self.draws_before(step), self.draws_before(step + 1)
        of_batch = tuple(range(start, end) for start, end in zip(before, after, strict=True))
        local_size = self._size // self._world_size
        rows_B = np.arange(self._rank * local_size, (self._rank + 1) * local_size, dtype=np.int64)
        shuffled_B = KeyedPermutation(self._size, self.seed, "mixture rows", step)(rows_B)
        ends = np.cumsum([len(draws) for draws in of_batch])
        source_B = np.searchsorted(ends, shuffled_B, side="right")
        rows = tuple(np.flatnonzero(source_B == source) for source in range(len(of_batch)))
        draws = tuple(draws.stop - ends[source] + shuffled_B[rows[source]] for source, draws in enumerate(of_batch))
        return _Draws(rows, draws, of_batch)

    def _replacements(self, source: int, draw: int, of_batch: range) -> Iterator[int]:
        """Yield samples that are not in the batch: those of the epoch of the batch's last draw, a batch size apart.

        Draws of the batch differ modulo its size, so no other row of the batch yields the same sample.
        """
        epochs, size = self.sources[source], self.sizes[source]
        epoch = of_batch[-1] // size
        _, in_batch = epochs.at(np.array(of_batch, dtype=np.int64))
        first = (draw - epoch * size) % len(of_batch)
        now = max(0, (draw - epoch * size - first) // len(of_batch))
        for positions in chunks_from(range(first, size, len(of_batch)), now):
            samples = epochs.of_epoch(epoch)(positions)
            yield from samples[~np.isin(samples, in_batch)].tolist()


# A function of the step alone, so iterators of one stream share it. It numbers the datasets from 0.
ReadingOrder = BatchOrder | MixtureOrder


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
        stores = dataset.sources.values()
        return MixtureOrder(
            [len(store) for store in stores],
            dataset.weights,
            names=list(dataset.sources),
            seed=seed,
            global_batch_size=global_batch_size,
            rank=rank,
            world_size=world_size,
            epoch_samples=dataset.epoch_samples,
            shard_ends=[store.shard_ends for store in stores],
            shuffle_shards=shuffle_shards,
        )
    check_batch_size(len(dataset), global_batch_size=global_batch_size, world_size=world_size)
    epochs = EpochOrders(len(dataset), seed, dataset.shard_ends, shuffle_shards)
    return BatchOrder(epochs, global_batch_size, rank, world_size)


def _reach(size: int, global_batch_size: int) -> int:
    """Return after how many draws a sample of a source may come again. It does not depend on the weights."""
    return min(global_batch_size - 1, size // 3)


def num_steps_per_mixture_epoch(epoch_samples: int, global_batch_size: int) -> int:
    """Return the number of global batches in an epoch of a mixture, at least one."""
    return max(1, epoch_samples // global_batch_size)


def check_mixture(
    sizes: Sequence[int],
    weights: Sequence[float],
    *,
    names: Sequence[str],
    global_batch_size: int,
    world_size: int,
) -> None:
    """Raise `UserError` as `MixtureOrder` does, with a sentence that names the source and what mends it."""
    check_ranks(global_batch_size, world_size=world_size)
    for name, size, most in zip(names, sizes, Shares(weights).most(global_batch_size), strict=True):
        if most > _reach(size, global_batch_size) + 1:
            raise UserError(
                f"the weights take up to {most} of a global batch of {global_batch_size} from {name}, which holds "
                f"{size} samples, and a batch may hold a third of a source at most; lower its weight or "
                "global_batch_size"
            )
