"""Stream finished batches to a rank, one `Batch` for each step, from one dataset or from a mixture of several.

Worker processes decode whole batches in turn, or all samples stay in memory. Every reader can read every shard, and the
state of a stream is only the step. Each source of a mixture is kept in memory or streamed by itself.

Guarantees: a batch does not depend on the number of ranks, workers or shards, or on the place of the samples. A resumed
run does not read the steps that it skips. Iterators of one stream do not disturb each other.

Shapes: B batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.core.batch import Batch
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.random_crop import CropLaw
from data_pipeline.core.sample import BadSample
from data_pipeline.core.schema import Count, Gigabytes, NumWorkers, Schema, Share
from data_pipeline.loading.collate import BatchMaker, join_parts
from data_pipeline.loading.decode import DecodedSamples
from data_pipeline.loading.mixture import Mixture, MixtureOrder, ReadingOrder, reading_order
from data_pipeline.loading.placement import DataPlacement, place_data, resident_bytes
from data_pipeline.loading.sources import (
    StreamSource,
    check_bad_share,
    check_cache,
    check_crops,
    fits_cache,
)
from data_pipeline.loading.streamed import streamed_batches
from data_pipeline.remote.fetch import RemoteConfig
from data_pipeline.storage.store import SampleStore

logger = logging.getLogger(__name__)

_CPU: Final = torch.device("cpu")
_REMOTE: Final = RemoteConfig()


class ReadConfig(Schema):
    """The settings for reading samples. `shuffle_shards` changes the order; the rest, no batch.

    Attributes:
        num_workers: processes of each rank that decode the next batches; 0 decodes in the training process.
        placement: `stream` decodes samples as they are needed. `device` reads all samples once into the memory of the
            training device. `host` reads them into host memory, where each rank has a copy. `auto` keeps them in memory
            if they fit.
        resident_gigabytes: the largest decoded dataset, in 10^9 bytes, that `auto` keeps in memory.
        shuffle_shards: None shuffles all samples of the dataset. A number shuffles the shards, and then the samples
            within windows of that many shards. A remote dataset then needs a cache of only two windows.
        max_bad_share: the largest share of unreadable samples, 0 to 1. Above it, training ends with an error.
        remote: the settings for a remote dataset.
    """

    num_workers: NumWorkers = 2
    placement: Literal["auto", "stream", "host", "device"] = "auto"
    resident_gigabytes: Gigabytes = 4
    shuffle_shards: Count | None = None
    max_bad_share: Share = 0.001
    remote: RemoteConfig = _REMOTE


_READ: Final = ReadConfig()


class Stream:
    """The batches of one rank for the steps `start_step` to `end_step - 1`; to resume at step k, start at step k.

    Without an `end_step`, as many steps as an epoch has. `for batch in Stream(dataset, global_batch_size=256, seed=0)`
    is one epoch in this process.

    Each rank gets global_batch_size / world_size samples a step, on `device`. With `overlay_draw="per_view"`, each view
    of a sample has its own crop and online overlay; otherwise the two views share them. `ranks_on_node` ranks share the
    memory of this machine. Iterating twice gives the same batches twice, also at the same time. The caller's random
    state does not change.

    `dataset` is a location, an open store, whose own `remote` settings then apply, or a `Mixture` of open stores. With
    `crops`, for tars without an overlay, each view of a picture is a crop that is drawn so, cut out of the stored
    picture and resized.

    Attributes:
        order: the order in which batches are read.
        placement: the place of the samples: `stream`, `host` or `device`; of a mixture, that of all its sources, or
            `stream` if they differ.
        placement_reason: the reason for `placement`, in words.
        known_bad: the unreadable samples that were found before the first step.
        num_samples: the number of samples of all sources.

    Raises `UserError` before the first step if a dataset is incomplete or takes no `crops`, if too many samples are
    bad, if the batch size does not fit the dataset and the ranks, or if memory or cache are too small for `read`.
    Iterating raises `UserError` if a sample and all its replacements are bad, and `RuntimeError` if a worker was
    killed.
    """

    def __init__(
        self,
        dataset: str | Path | SampleStore | Mixture,
        *,
        global_batch_size: int,
        seed: int,
        read: ReadConfig = _READ,
        rank: int = 0,
        world_size: int = 1,
        start_step: int = 0,
        end_step: int | None = None,
        device: torch.device | str = _CPU,
        overlay_draw: Literal["per_item", "per_view"] = "per_item",
        ranks_on_node: int = 1,
        crops: CropLaw | None = None,
    ) -> None:
        if isinstance(dataset, str | Path):
            dataset = SampleStore(dataset, remote=read.remote)
        self._read, self._device, self._rank, self._world_size = read, torch.device(device), rank, world_size
        self._crops = crops
        if isinstance(dataset, Mixture):
            named: Mapping[str, SampleStore] = dataset.sources
            self.location: str | Path = f"the mixture of {' and '.join(named)}"
        else:
            named, self.location = {"": dataset}, dataset.location
        self.order: ReadingOrder = reading_order(
            dataset,
            shuffle_shards=read.shuffle_shards,
            seed=seed,
            global_batch_size=global_batch_size,
            rank=rank,
            world_size=world_size,
        )
        self.num_samples = sum(map(len, named.values()))
        self._label_names = sorted({name for store in named.values() for name in store.manifest.labels})
        end_step = start_step + self.order.num_steps_per_epoch if end_step is None else end_step
        self._steps = range(start_step, end_step)
        per_view = overlay_draw == "per_view"
        self._sources = self._open_sources(named, seed=seed, per_view=per_view, ranks_on_node=ranks_on_node)
        check_bad_share(self.known_bad, num_samples=self.num_samples, max_share=read.max_bad_share, where=self.location)
        kinds = {source.placed.kind for source in self._sources}
        self.placement = kinds.pop() if len(kinds) == 1 else "stream"
        self.placement_reason = "; ".join(source.placed.reason for source in self._sources)
        if rank == 0:
            self._log_start()

    def _open_sources(
        self, named: Mapping[str, SampleStore], *, seed: int, per_view: bool, ranks_on_node: int
    ) -> list[StreamSource]:
        """Return the datasets by number, in memory if the settings say so and they fit together.

        Raises `UserError` if they do not fit the arguments of the stream, or if memory or cache are too small.
        """
        if self._crops is not None:
            check_crops(list(named.values()))
        if per_view and all(store.overlay is None for store in named.values()):
            raise UserError(
                f"{self.location} was built without `--overlay online`, which per-view overlays need; build it "
                "again with it, or let the two views share their overlay"
            )
        keys = partial(_training_keys, seed)
        sources: list[StreamSource] = []
        read, room = self._read, self._read.resident_gigabytes
        for number, (name, store) in enumerate(named.items()):
            overlay = None if store.overlay is None else store.overlay.to(self._device)
            maker = BatchMaker(store.manifest, overlay, keys, per_view=per_view, crops=self._crops)
            placed = self._place(number, store, resident_gigabytes=room, ranks_on_node=ranks_on_node)
            if placed.samples is not None:
                room -= resident_bytes(store.manifest) / 1e9
            prefix, first = f"{name}/" if name else "", sum(len(source.store) for source in sources)
            sources.append(StreamSource(number, first, prefix, store, maker, placed))
        streamed = [source.store for source in sources if source.placed.samples is None]
        check_cache(streamed, read.remote, shuffle_shards=read.shuffle_shards)
        return sources

    def _place(
        self, number: int, store: SampleStore, *, resident_gigabytes: float, ranks_on_node: int
    ) -> DataPlacement:
        """Read the samples of a dataset into memory, if the settings say so and they fit."""
        read = self._read
        epoch, position = self.order.position_at(number, self._steps.start)
        is_short = self.order.position_at(number, self._steps.stop) < (epoch + 1, position)  # than an epoch
        # A run whose cache is too small to stream began with the data in memory, so it must also end like this.
        if is_short and read.placement == "auto" and fits_cache(store, shuffle_shards=read.shuffle_shards):
            return DataPlacement("stream", "less than an epoch is left to read")
        if self._crops is not None:
            return DataPlacement("stream", "crops are cut out of the stored pictures")
        return place_data(
            store,
            wanted=read.placement,
            resident_gigabytes=resident_gigabytes,
            device=self._device,
            show_progress=self._rank == 0,
            ranks_on_node=ranks_on_node,
        )

    def _log_start(self) -> None:
        logger.info("%s: %d samples, %d steps an epoch", self.location, self.num_samples, self.num_steps_per_epoch)
        for source in self._sources:
            logger.info(
                "%s: %d samples, placement %s (%s)",
                source.store.location,
                len(source.store),
                source.placed.kind,
                source.placed.reason,
            )
        if len({source.store.manifest.any_size for source in self._sources}) > 1:
            logger.warning(
                "%s: a build has resized the pictures of some sources; those of others are resized as they are read, "
                "large JPEGs with differences of about two levels, by which an encoder may tell sources apart",
                self.location,
            )

    def source_metrics(self, num_done: int) -> dict[str, float]:
        """Return what the first `num_done` steps drew from each source of a mixture; nothing for one dataset.

        `mixture/NAME/batch` counts the samples in the last global batch, `samples` those in all, and `epochs` how often
        the source was read.
        """
        order, metrics = self.order, dict[str, float]()
        if not isinstance(order, MixtureOrder):
            return metrics
        before, after = order.draws_before(num_done - 1), order.draws_before(num_done)
        for number, name in enumerate(order.names):
            metrics[f"mixture/{name}/batch"] = float(after[number] - before[number])
            metrics[f"mixture/{name}/samples"] = float(after[number])
            metrics[f"mixture/{name}/epochs"] = after[number] / order.sizes[number]
        return metrics

    @property
    def known_bad(self) -> tuple[BadSample, ...]:
        """Return the unreadable samples that were found before the first step."""
        return tuple(
            source.named(bad)
            for source in self._sources
            if source.placed.samples is not None
            for bad in source.placed.samples.bad.values()
        )

    @property
    def num_steps_per_epoch(self) -> int:
        return self.order.num_steps_per_epoch

    def shards_of(self, step: int) -> list[str]:
        """Return the shards of this rank's samples at a step, in stored order; none of data in memory.

        Does not count the replacements of bad samples.
        """
        shards: list[str] = []
        for source in self._sources:
            if source.placed.samples is None:
                rows, store = self.order.rows(source.number, step, bad={}), source.store
                numbers = np.unique(np.searchsorted(store.shard_ends, rows.indices_R, side="right"))
                shards += [source.prefix + store.shard_name(number) for number in numbers.tolist()]
        return shards

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches(self._steps)

    def batches(self, steps: range) -> Iterator[Batch]:
        """Yield this rank's part of the batches of some steps.

        The state is in the iterator, so several may be open at a time.
        """
        for step, parts in self._clean_parts(steps):
            finished = [self._finish(source, clean) for source, clean in parts]
            if not isinstance(self.order, MixtureOrder):
                yield finished[0]
            else:
                row_B = self._to_device(torch.from_numpy(self.order.row_order(step)))
                epoch = step // self.num_steps_per_epoch
                yield join_parts(
                    finished, row_B, epoch=epoch, num_samples=self.num_samples, label_names=self._label_names
                )

    def _finish(self, source: StreamSource, clean: Batch) -> Batch:
        began = time.perf_counter()
        clean = clean.to(self._device)
        moved = time.perf_counter()
        batch = source.maker.apply_overlay(clean)
        made = {"transfer": moved - began, "overlay": time.perf_counter() - moved}
        return replace(batch, seconds={**batch.seconds, **made})

    def _to_device(self, rows: torch.Tensor) -> torch.Tensor:
        if self._device.type != "cuda":
            return rows
        return rows.pin_memory().to(self._device, non_blocking=True)

    def _clean_parts(self, steps: range) -> Iterator[tuple[int, list[tuple[StreamSource, Batch]]]]:
        """Yield each step, and the batch without the online overlay of each dataset that has a row in it."""
        streamed = [source for source in self._sources if source.placed.samples is None]
        from_disk: Iterator[list[Batch | None]] = ([] for _ in steps)
        if streamed:
            from_disk = streamed_batches(
                streamed,
                self.order,
                steps,
                num_workers=self._read.num_workers,
                rank=self._rank,
                world_size=self._world_size,
                pin_memory=self._device.type == "cuda",
            )
        for step, read in zip(steps, from_disk, strict=True):
            parts = {source.number: clean for source, clean in zip(streamed, read, strict=True)}
            for source in self._sources:
                if source.placed.samples is not None:
                    parts[source.number] = self._from_memory(source, source.placed.samples, step)
            found = [(source, parts[source.number]) for source in self._sources]
            yield step, [(source, clean) for source, clean in found if clean is not None]

    def _from_memory(self, source: StreamSource, samples: DecodedSamples, step: int) -> Batch | None:
        """Return the rows of a dataset in memory, without the online overlay; None if the step has none."""
        is_there = samples.index_B.device.type == self._device.type
        began = time.perf_counter()
        rows = self.order.rows(source.number, step, bad=samples.bad)
        if not len(rows.indices_R):
            return None

        def beside_samples(indices_R: NDArray[np.int64]) -> torch.Tensor:
            return self._to_device(torch.tensor(indices_R)) if is_there else torch.tensor(indices_R)

        taken = samples.take(beside_samples(rows.indices_R))
        is_keyed_alike = rows.key_index_R is rows.indices_R
        index_B = taken.index_B if is_keyed_alike else beside_samples(rows.key_index_R)
        clean = source.collate(taken, rows, step=step, index_B=index_B)
        clean = replace(clean, seconds={"read": time.perf_counter() - began})
        return clean if is_there else clean.pin_memory()


def _training_keys(seed: int, index_B: torch.Tensor, epoch: int, view: int) -> DrawKeys:
    """Return the keys of the crops and overlays of a batch. A function of the module, so workers can get it pickled."""
    return DrawKeys(seed=seed, epoch=epoch, index_B=index_B, view=view)
