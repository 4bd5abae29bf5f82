"""Stream finished batches of a dataset to a rank, one `Batch` for each step.

Worker processes decode whole batches in turn, or all samples stay in memory. Every reader can read every shard, and the
state of a stream is only the step.

Guarantees: a batch does not depend on the number of ranks, workers or shards, or on the place of the samples. A resumed
run does not read the steps that it skips. Iterators of one stream do not disturb each other.

Shapes: B batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch

from data_pipeline.core.batch import Batch
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.random_crop import CropLaw
from data_pipeline.core.schema import Count, Gigabytes, NumWorkers, Schema, Share
from data_pipeline.loading.checks import check_bad_share, check_cache, check_crops, fits_cache
from data_pipeline.loading.collate import BatchMaker
from data_pipeline.loading.decode import DecodedSamples
from data_pipeline.loading.order import BatchOrder, EpochOrders, check_batch_size
from data_pipeline.loading.placement import DataPlacement, place_data
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

    `dataset` is a location, or an open store, whose own `remote` settings then apply. With `crops`, for tars without an
    overlay, each view of a picture is a crop that is drawn so, cut out of the stored picture and resized.

    Attributes:
        order: the order in which batches are read.
        placement: the place of the samples: `stream`, `host` or `device`.
        placement_reason: the reason for `placement`, in words.
        known_bad: the unreadable samples that were found before the first step.
        num_samples: the number of samples.

    Raises `UserError` before the first step if the dataset is incomplete or takes no `crops`, if too many samples are
    bad, if the batch size does not fit the dataset and the ranks, or if memory or cache are too small for `read`.
    Iterating raises `UserError` if a sample and all its replacements are bad, and `RuntimeError` if a worker was
    killed.
    """

    def __init__(
        self,
        dataset: str | Path | SampleStore,
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
        store = dataset if isinstance(dataset, SampleStore) else SampleStore(dataset, remote=read.remote)
        self._store, self._read, self._device = store, read, torch.device(device)
        self._rank, self._world_size = rank, world_size
        self.location, self.num_samples = store.location, len(store)
        check_batch_size(len(store), global_batch_size=global_batch_size, world_size=world_size)
        epochs = EpochOrders(len(store), seed, store.shard_ends, read.shuffle_shards)
        self.order = BatchOrder(epochs, global_batch_size, rank, world_size)
        end_step = start_step + self.order.num_steps_per_epoch if end_step is None else end_step
        self._steps = range(start_step, end_step)
        per_view = overlay_draw == "per_view"
        if crops is not None:
            check_crops(store)
        if per_view and store.overlay is None:
            raise UserError(
                f"{self.location} was built without `--overlay online`, which per-view overlays need; build it "
                "again with it, or let the two views share their overlay"
            )
        overlay = None if store.overlay is None else store.overlay.to(self._device)
        self._maker = BatchMaker(store.manifest, overlay, partial(_training_keys, seed), per_view=per_view, crops=crops)
        placed = self._place(ranks_on_node=ranks_on_node)
        self.placement, self.placement_reason, self._samples = placed.kind, placed.reason, placed.samples
        if self._samples is None:
            check_cache(store, shuffle_shards=read.shuffle_shards)
        self.known_bad = () if self._samples is None else tuple(self._samples.bad.values())
        check_bad_share(self.known_bad, num_samples=self.num_samples, max_share=read.max_bad_share, where=self.location)
        if rank == 0:
            logger.info(
                "%s: %d samples, %d steps an epoch, placement %s (%s)",
                self.location,
                self.num_samples,
                self.num_steps_per_epoch,
                self.placement,
                self.placement_reason,
            )

    def _place(self, *, ranks_on_node: int) -> DataPlacement:
        """Read the samples into memory, if the settings say so and they fit."""
        read, store = self._read, self._store
        epoch, position = self.order.position_at(self._steps.start)
        is_short = self.order.position_at(self._steps.stop) < (epoch + 1, position)  # than an epoch
        # A run whose cache is too small to stream began with the data in memory, so it must also end like this.
        if is_short and read.placement == "auto" and fits_cache(store, shuffle_shards=read.shuffle_shards):
            return DataPlacement("stream", "less than an epoch is left to read")
        if self._maker.crops is not None:
            return DataPlacement("stream", "crops are cut out of the stored pictures")
        return place_data(
            store,
            wanted=read.placement,
            resident_gigabytes=read.resident_gigabytes,
            device=self._device,
            show_progress=self._rank == 0,
            ranks_on_node=ranks_on_node,
        )

    @property
    def num_steps_per_epoch(self) -> int:
        return self.order.num_steps_per_epoch

    def shards_of(self, step: int) -> list[str]:
        """Return the shards of this rank's samples at a step, in stored order; none of data in memory.

        Does not count the replacements of bad samples.
        """
        if self._samples is not None:
            return []
        indices_R = self.order.rows(step, bad={}).indices_R
        numbers = np.unique(np.searchsorted(self._store.shard_ends, indices_R, side="right"))
        return [self._store.shard_name(number) for number in numbers.tolist()]

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches(self._steps)

    def batches(self, steps: range) -> Iterator[Batch]:
        """Yield this rank's part of the batches of some steps.

        The state is in the iterator, so several may be open at a time.
        """
        for clean in self._clean(steps):
            began = time.perf_counter()
            on_device = clean.to(self._device)
            moved = time.perf_counter()
            batch = self._maker.apply_overlay(on_device)
            made = {"transfer": moved - began, "overlay": time.perf_counter() - moved}
            yield replace(batch, seconds={**batch.seconds, **made})

    def _clean(self, steps: range) -> Iterator[Batch]:
        """Return the batches of some steps without the online overlay."""
        if self._samples is not None:
            return (self._from_memory(samples, step) for samples in [self._samples] for step in steps)
        return streamed_batches(
            self._store,
            self._maker,
            self.order,
            steps,
            num_workers=self._read.num_workers,
            pin_memory=self._device.type == "cuda",
        )

    def _from_memory(self, samples: DecodedSamples, step: int) -> Batch:
        """Return the batch of a step out of memory, without the online overlay."""
        is_there = samples.index_B.device.type == self._device.type
        began = time.perf_counter()
        rows = self.order.rows(step, bad=samples.bad)
        row_B = torch.tensor(rows.indices_R)
        if is_there and self._device.type == "cuda":
            row_B = row_B.pin_memory().to(self._device, non_blocking=True)
        clean = self._maker.collate(samples.take(row_B), step=step, epoch=rows.epoch, bad=rows.bad)
        clean = replace(clean, seconds={"read": time.perf_counter() - began})
        return clean if is_there else clean.pin_memory()


def _training_keys(seed: int, index_B: torch.Tensor, epoch: int, view: int) -> DrawKeys:
    """Return the keys of the crops and overlays of a batch. A function of the module, so workers can get it pickled."""
    return DrawKeys(seed=seed, epoch=epoch, index_B=index_B, view=view)
