"""Read the pictures of a dataset that does not fit in memory: each time they are asked for, by threads ahead of time.

Guarantees: rows, labels and pictures are those of the same dataset in memory, to the bit.

Shapes: N samples, B batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import BadSample
from data_pipeline.core.system import num_cores
from data_pipeline.loading.decode import DecodedSamples, decode, decode_ahead
from data_pipeline.loading.placement import stored_order
from data_pipeline.storage.store import SampleStore
from trainer.distributed.collectives import all_gather_json, all_gather_parts, message_device, rank, world_size

_AT_ONCE: Final = 128  # samples that a thread decodes at a time
_MAX_THREADS: Final = 16


class StreamedSamples:
    """Samples of a dataset of pictures, decoded when they are asked for.

    Attributes:
        store: the dataset.
        index_B: (N,) int64, the dataset index of each row, ascending.
        labels: each label by name, (N,) int64.
    """

    def __init__(self, store: SampleStore, *, index_B: Tensor, labels: Mapping[str, Tensor]) -> None:
        self.store, self.index_B, self.labels = store, index_B, labels
        self._ready: tuple[Tensor, DecodedSamples] | None = None  # the rows that `ahead` has yielded last

    def __len__(self) -> int:
        return self.index_B.numel()

    def chosen(self, row_B: Tensor) -> StreamedSamples:
        """Return some of the samples, still to be decoded."""
        return StreamedSamples(
            self.store,
            index_B=self.index_B[row_B],
            labels={name: label_N[row_B] for name, label_N in self.labels.items()},
        )

    def take(self, row_B: Tensor) -> DecodedSamples:
        """Return the rows `row_B`, (B,) int64, in that order.

        Raises `UserError` if one cannot be read any more.
        """
        if self._ready is not None and self._ready[0] is row_B:
            return self._ready[1]
        return self._all_good(decode(self.store, self._indices(row_B)))

    def ahead(self, rows: Sequence[Tensor], *, title: str) -> Iterator[Tensor]:
        """Yield each tensor of `rows`, while threads decode the next ones: `take` then returns at once.

        Shows the progress under `title`. Raises `UserError` as `take` does.
        """
        waiting = deque(rows)
        samples_of_rows = decode_ahead(self.store, map(self._indices, rows), num_threads=_num_threads())
        with Progress(title, total=sum(map(len, rows)), enabled=rank() == 0) as progress:
            try:
                for samples in samples_of_rows:
                    row_B = waiting.popleft()
                    self._ready = row_B, self._all_good(samples)
                    yield row_B
                    progress.advance(len(row_B))
            finally:
                self._ready = None

    def _indices(self, row_B: Tensor) -> NDArray[np.int64]:
        return self.index_B[row_B].numpy()

    def _all_good(self, samples: DecodedSamples) -> DecodedSamples:
        for bad in samples.bad.values():
            raise UserError(
                f"{self.store.location}: {bad.key} in {bad.shard} could be read before and cannot be read now "
                f"({bad.reason}); find out with `python -m data_pipeline verify`, and start again"
            )
        return samples


def find_readable(
    store: SampleStore, labels_of: Callable[[DecodedSamples], Mapping[str, Tensor]]
) -> tuple[StreamedSamples, tuple[BadSample, ...]]:
    """Decode every sample once. Return those that can be read, and the others. Every rank calls this.

    Each rank decodes its share of the shards. Keeps the labels only: `labels_of` returns those of decoded samples.
    """
    num_shards = len(store.shard_ends)
    first, end = (number * num_shards // world_size() for number in (rank(), rank() + 1))
    starts = np.concatenate([[0], store.shard_ends])
    names = [*store.manifest.labels]
    parts, bad = [[torch.empty(0, dtype=torch.int64) for _ in range(1 + len(names))]], list[BadSample]()
    chunks = stored_order(store, range(first, end), num_at_once=_AT_ONCE)
    total = int(starts[end] - starts[first])
    with Progress(f"read {store.location}", total=total, enabled=rank() == 0) as progress:
        for samples in decode_ahead(store, chunks, num_threads=_num_threads()):
            bad += samples.bad.values()
            if len(good := samples.without_bad()):
                labels = labels_of(good)
                parts.append([good.index_B, *(labels[name] for name in names)])
            progress.advance(len(samples))
    mine = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    index_B, *by_name = (torch.cat(all_gather_parts(part.to(message_device()))).cpu() for part in mine)
    readable = StreamedSamples(store, index_B=index_B, labels=dict(zip(names, by_name, strict=True)))
    return readable, tuple(sample for of_rank in all_gather_json(bad, list[BadSample]) for sample in of_rank)


def _num_threads() -> int:
    return min(num_cores(), _MAX_THREADS)
