"""Stream finished batches to a rank, one `Batch` for each step.

Worker processes decode whole batches in turn, or all samples stay in memory. Every reader can read every shard, and the
state of a stream is only the step.

Guarantees: a batch does not depend on the number of ranks, workers or shards, or on the place of the samples. A resumed
run does not read the steps that it skips.

Shapes: B batch.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.random_crop import CropLaw
from data_pipeline.core.sample import BadSample, Batch
from data_pipeline.core.schema import Count, Gigabytes, NumWorkers, Schema, Share
from data_pipeline.loading.collate import BatchMaker
from data_pipeline.loading.decode import DecodedSamples, decode, decode_ahead
from data_pipeline.loading.order import ORDER_VERSION, BatchOrder, OrderVersion, ShardWindows, check_batch_size
from data_pipeline.loading.placement import DataPlacement, num_cores, place_data
from data_pipeline.loading.shared_memory import NodeShare
from data_pipeline.overlays import evaluation_keys
from data_pipeline.remote.cache import RemoteConfig
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore

logger = logging.getLogger(__name__)

_CPU: Final = torch.device("cpu")
_REMOTE: Final = RemoteConfig()
_READ_ALL_THREADS: Final = 4


class ReadConfig(Schema):
    """The settings for reading samples. `shuffle_shards` and `order_version` change the order; the rest, no batch.

    Attributes:
        num_workers: processes of each rank that decode the next batches; 0 decodes in the training process.
        placement: `stream` decodes samples as they are needed. `device` reads all samples once into the memory of the
            training device, and `host` into host memory that the ranks of a node share. `auto` does so if they fit.
        resident_gigabytes: the largest decoded dataset, in 10^9 bytes, that `auto` keeps in memory.
        shuffle_shards: None shuffles all samples of the dataset. A number shuffles the shards, and then the samples
            within windows of that many shards. A remote dataset then needs a cache of only two windows.
        order_version: the shuffle. 2 computes the order as it is needed, for any number of samples. 1 keeps an array
            of all samples; a run that began with it goes on with it.
        max_bad_share: the largest share of unreadable samples, 0 to 1. Above it, training ends with an error.
        remote: the settings for a remote dataset.
    """

    num_workers: NumWorkers = 2
    placement: Literal["auto", "stream", "host", "device"] = "auto"
    resident_gigabytes: Gigabytes = 4
    shuffle_shards: Count | None = None
    order_version: OrderVersion = ORDER_VERSION
    max_bad_share: Share = 0.001
    remote: RemoteConfig = _REMOTE


def check_bad_share(bad: Collection[BadSample], *, num_samples: int, max_share: float, where: str | Path) -> None:
    """Raise `UserError`, with the first bad samples, if more than `max_share` (0 to 1) of all samples are `bad`.

    `where` is the dataset as the user named it. A sample that is listed twice counts once.
    """
    by_index = {sample.index: sample for sample in bad}
    if len(by_index) <= max_share * num_samples:
        return
    first = [by_index[index] for index in sorted(by_index)[:3]]
    named = ", ".join(f"{sample.key} in {sample.shard} ({sample.reason})" for sample in first)
    raise UserError(
        f"{where}: {len(by_index)} of {num_samples} samples ({len(by_index) / num_samples:.2%}) cannot be read, more "
        f"than the {max_share:.2%} of data.max_bad_share, the first being {named}; run "
        "`python -m data_pipeline verify` on it, then build or copy it again"
    )


def _fits_cache(store: SampleStore, *, shuffle_shards: int | None) -> bool:
    """Return whether the cache of a remote dataset is large enough for its reading order."""
    return store.max_shards is None or _num_shards_needed(store, shuffle_shards) <= store.max_shards


def _num_shards_needed(store: SampleStore, shuffle_shards: int | None) -> int:
    """Return the number of shards that must be cached at once: all, or the window being read and the next one."""
    num_shards = len(store.shard_ends)
    return num_shards if shuffle_shards is None else min(2 * shuffle_shards, num_shards)


def _check_cache(store: SampleStore, *, shuffle_shards: int | None) -> None:
    """Raise `UserError`, with settings that would fit, if the cache is too small for the reading order."""
    if store.max_shards is None or _fits_cache(store, shuffle_shards=shuffle_shards):
        return
    num_shards, needed = len(store.shard_ends), _num_shards_needed(store, shuffle_shards)
    largest = sorted((shard.num_bytes for shard in store.manifest.shards), reverse=True)[:needed]
    gigabytes = math.ceil(1.05 * sum(largest) / 1e7) / 100  # with the indexes of the shards
    smaller = f"set data.shuffle_shards to {store.max_shards // 2}, or " if store.max_shards > 1 else "set "
    raise UserError(
        f"{store.location}: its shuffling needs {needed} of its {num_shards} shards at once, but the cache holds "
        f"{store.max_shards}; {smaller}data.remote.cache_gigabytes to {gigabytes:g}"
    )


class _ShardPrefetcher:
    """A prefetcher of a remote dataset's shards, for the window being read and the next one."""

    def __init__(self, store: SampleStore, order: BatchOrder) -> None:
        self._store, self._order = store, order
        self._epoch, self._window = 0, -1
        self._windows, self._windows_after = self._windows_of(0), self._windows_of(1)

    def _windows_of(self, epoch: int) -> ShardWindows:
        ends = self._store.shard_ends
        return ShardWindows(ends, self._order.shuffle_shards or len(ends), seed=self._order.seed, epoch=epoch)

    def before(self, step: int) -> None:
        """Request shards if a window begins at `step`. Call this before each step."""
        order = self._order
        epoch, step_in_epoch = divmod(step, order.num_steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._window = epoch, -1
            self._windows, self._windows_after = self._windows_of(epoch), self._windows_of(epoch + 1)
        window = self._windows.number_at(step_in_epoch * order.global_batch_size)
        if window == self._window:
            return
        self._window = window
        now = self._windows.window(window)
        is_last = window + 1 == len(self._windows)
        following = self._windows_after.window(0) if is_last else self._windows.window(window + 1)
        # All processes need the same shards. Each starts at another shard, so that they fetch in parallel.
        worker = torch.utils.data.get_worker_info()
        num_workers, worker_id = (1, 0) if worker is None else (worker.num_workers, worker.id)
        shift = (order.rank * num_workers + worker_id) * len(now) // (order.world_size * num_workers)
        self._store.prefetch([*np.roll(now, -shift).tolist(), *following.tolist()])


class _StreamedBatches(Dataset[Batch | UserError]):
    """The clean batches of one rank, by step. Worker processes share the index of the opened store."""

    def __init__(self, store: SampleStore, order: BatchOrder, maker: BatchMaker) -> None:
        self._store, self._order, self._maker = store, order, maker
        # Grows in each process when it finds bad samples. No batch depends on the bad samples found before.
        self._bad = {sample.index: sample for sample in store.known_bad}
        self._prefetcher = _ShardPrefetcher(store, order) if store.is_remote else None

    def __getitem__(self, step: int) -> Batch | UserError:
        try:
            if self._prefetcher is not None:
                self._prefetcher.before(step)
            while True:
                began = time.perf_counter()
                epoch, indices, replaced = self._order.at(step, bad=self._bad)
                samples = decode(self._store, indices, crops=self._maker.crop_draws(indices, epoch=epoch))
                if not samples.bad:
                    clean = self._maker.collate(samples, step=step, epoch=epoch, bad=replaced)
                    seconds = time.perf_counter() - began
                    return replace(
                        clean, seconds={"read": samples.read_seconds, "decode": seconds - samples.read_seconds}
                    )
                self._bad |= {sample.index: sample for sample in samples.bad.values()}
        except UserError as error:
            # Returned and not raised, because a DataLoader turns a worker's exception into a page of traceback.
            return error


def _leave_signals_to_the_trainer(worker_id: int) -> None:
    """Ignore SIGTERM and SIGINT in a worker. They warn the training process, and the worker ends with that."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class Stream:
    """The batches of one rank for the steps `start_step` to `end_step - 1`; to resume at step k, start at step k.

    Each rank gets global_batch_size / world_size samples a step, on `device`. With `overlay_draw="per_view"`, each view
    of a sample has its own crop and online overlay; otherwise the two views share them. With a `share`, the ranks of a
    node hold a dataset in memory together, and all ranks must make their streams at the same time. Iterating twice
    gives the same batches twice. The caller's random state does not change.

    `dataset` is a location, or an open store, whose own `remote` settings then apply. With `crops`, for tars, each view
    of a picture is a crop that is drawn so, cut out of the stored picture and resized.

    Attributes:
        placement: the place of the samples: `stream`, `host` or `device`.
        placement_reason: the reason for `placement`, in words.
        known_bad: the unreadable samples that were found before the first step.

    Raises `UserError` before the first step if the dataset is incomplete, if too many samples are bad, if the batch
    size does not fit the dataset and the ranks, or if memory or cache are too small for `read`. Iterating raises
    `UserError` if a sample and all its replacements are bad, and `RuntimeError` if a worker was killed.
    """

    def __init__(
        self,
        dataset: str | Path | SampleStore,
        *,
        read: ReadConfig,
        global_batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        end_step: int,
        start_step: int = 0,
        device: torch.device = _CPU,
        overlay_draw: Literal["per_item", "per_view"] = "per_item",
        share: NodeShare | None = None,
        crops: CropLaw | None = None,
    ) -> None:
        assert 0 <= rank < world_size
        assert 0 <= start_step <= end_step
        self._store = store = _open_store(dataset, read.remote)
        self._read, self._device = read, device
        check_batch_size(len(store), global_batch_size=global_batch_size, world_size=world_size)
        self._check_bad(store.known_bad)
        if overlay_draw == "per_view" and store.overlay is None:
            raise UserError(
                f"{store.location} was built without `--overlay online`, which per-view overlays need; build it "
                "again with it, or let the two views share their overlay"
            )
        self._order = BatchOrder(
            len(store),
            seed,
            global_batch_size,
            rank,
            world_size,
            shard_ends=store.shard_ends,
            shuffle_shards=read.shuffle_shards,
            version=read.order_version,
        )
        self._maker = BatchMaker(
            store.manifest,
            None if store.overlay is None else store.overlay.to(device),
            lambda index_B, epoch, view: DrawKeys(seed=seed, epoch=epoch, index_B=index_B, view=view),
            per_view=overlay_draw == "per_view",
            crops=crops,
        )
        self._steps = range(start_step, end_step)
        is_short = len(self) < self.num_steps_per_epoch
        # A run whose cache is too small to stream began with the data in memory, so it must also end like this.
        if is_short and read.placement == "auto" and _fits_cache(store, shuffle_shards=read.shuffle_shards):
            placed = DataPlacement("stream", "less than an epoch is left to read")
        elif crops is not None:
            placed = DataPlacement("stream", "crops are cut out of the stored pictures")
        else:
            placed = place_data(
                store,
                wanted=read.placement,
                resident_gigabytes=read.resident_gigabytes,
                device=device,
                share=share,
                show_progress=rank == 0,
            )
        self.placement, self.placement_reason, self._resident = placed.kind, placed.reason, placed.samples
        self.known_bad = store.known_bad
        if placed.samples is None:
            _check_cache(store, shuffle_shards=read.shuffle_shards)
        else:
            self.known_bad = tuple(placed.samples.bad.values())
            self._check_bad(self.known_bad)
        if rank == 0:
            logger.info(
                "%s: %d samples, %d steps an epoch; %d samples do not fill a global batch of %d and are dropped",
                store.location,
                len(store),
                self.num_steps_per_epoch,
                self.num_dropped_per_epoch,
                global_batch_size,
            )
            if read.order_version != ORDER_VERSION:
                logger.info("%s: the order is of version %d", store.location, read.order_version)
            logger.info("%s: placement %s (%s)", store.location, placed.kind, placed.reason)

    def _check_bad(self, bad: Collection[BadSample]) -> None:
        max_share = self._read.max_bad_share
        check_bad_share(bad, num_samples=len(self._store), max_share=max_share, where=self._store.location)

    @property
    def manifest(self) -> Manifest:
        return self._store.manifest

    @property
    def num_steps_per_epoch(self) -> int:
        return self._order.num_steps_per_epoch

    @property
    def num_dropped_per_epoch(self) -> int:
        """Return the number of samples that an epoch leaves out, because they do not fill a global batch."""
        return len(self._store) % self._order.global_batch_size

    def shards_of(self, step: int) -> list[str]:
        """Return the shards of this rank's samples at a step, in stored order; none if the data are in memory.

        Does not count the replacements of bad samples.
        """
        if self._resident is not None:
            return []
        _, indices, _ = self._order.at(step, bad={})
        numbers = np.unique(np.searchsorted(self._store.shard_ends, indices, side="right"))
        return [self._store.shard_name(number) for number in numbers.tolist()]

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        for clean in self._streamed() if self._resident is None else self._from_memory(self._resident):
            began = time.perf_counter()
            clean = clean.to(self._device)
            moved = time.perf_counter()
            batch = self._maker.apply_overlay(clean)
            made = {"transfer": moved - began, "overlay": time.perf_counter() - moved}
            yield replace(batch, seconds={**batch.seconds, **made})

    def _from_memory(self, samples: DecodedSamples) -> Iterator[Batch]:
        """Yield batches of data in memory, without the online overlay."""
        is_cuda, is_there = self._device.type == "cuda", samples.index_B.device.type == self._device.type
        for step in self._steps:
            began = time.perf_counter()
            epoch, indices, replaced = self._order.at(step, bad=samples.bad)
            row_B = torch.tensor(indices)
            if is_cuda and is_there:
                row_B = row_B.pin_memory().to(self._device, non_blocking=True)
            clean = self._maker.collate(samples.take(row_B), step=step, epoch=epoch, bad=replaced)
            clean = replace(clean, seconds={"read": time.perf_counter() - began})
            yield clean if is_there or not is_cuda else clean.pin_memory()

    def _streamed(self) -> Iterator[Batch]:
        """Yield batches that are decoded as they are needed, without the online overlay."""
        loader: DataLoader[Batch | UserError] = DataLoader(
            _StreamedBatches(self._store, self._order, self._maker),
            batch_size=None,  # the dataset makes whole batches, and its keys are steps
            sampler=self._steps,
            num_workers=self._read.num_workers,
            pin_memory=self._device.type == "cuda",
            worker_init_fn=_leave_signals_to_the_trainer,
            generator=torch.Generator(),  # without its own, a DataLoader draws from the caller's random state
        )
        try:
            for item in loader:
                if isinstance(item, UserError):
                    raise item
                yield item
        except (ConnectionError, EOFError, FileNotFoundError) as error:
            # A worker was killed while it handed over a batch. The DataLoader's handler of SIGCHLD raises too, a moment
            # later. Wait for it, because it must not interrupt the clean-up.
            time.sleep(1)
            raise RuntimeError(
                "a DataLoader worker exited while it handed over a batch; was it killed for lack of memory?"
            ) from error


def read_all(
    dataset: str | Path | SampleStore,
    *,
    batch_size: int,
    draw: int | None = 0,
    device: torch.device = _CPU,
    remote: RemoteConfig = _REMOTE,
    max_bad_share: float = 0.001,
) -> Iterator[Batch]:
    """Yield every good sample once, in stored order, on `device`; for evaluation. Some batches may be smaller.

    An online overlay is drawn with `evaluation_keys`, so it is the same in every run. Each `draw` gives another
    overlay, and None gives clean samples. Leaves out and logs the samples that cannot be read.

    Raises `UserError` if the dataset is incomplete, or if more than `max_bad_share` of its samples cannot be read.
    """
    store = _open_store(dataset, remote)
    maker = BatchMaker(
        store.manifest,
        None if store.overlay is None or draw is None else store.overlay.to(device),
        lambda index_B, epoch, view: evaluation_keys(index_B, draw=draw or 0),
    )
    bad = list(store.known_bad)
    check_bad_share(bad, num_samples=len(store), max_share=max_bad_share, where=store.location)
    starts = range(0, len(store), batch_size)
    chunks = (np.arange(start, min(start + batch_size, len(store)), dtype=np.int64) for start in starts)
    for step, samples in enumerate(decode_ahead(store, chunks, num_threads=min(num_cores(), _READ_ALL_THREADS))):
        found = tuple(samples.bad.values())
        if found:
            bad += found
            check_bad_share(bad, num_samples=len(store), max_share=max_bad_share, where=store.location)
            for sample in found:
                logger.warning("%s: %s in %s is left out: %s", store.location, sample.key, sample.shard, sample.reason)
        if len(found) < len(samples):
            good = samples.without_bad()
            yield maker.apply_overlay(maker.collate(good, step=step, bad=found).to(device))


def _open_store(dataset: str | Path | SampleStore, remote: RemoteConfig) -> SampleStore:
    return dataset if isinstance(dataset, SampleStore) else SampleStore(dataset, remote=remote)
