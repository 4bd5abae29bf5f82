"""Stream finished batches to a rank, one `Batch` for each step, from one dataset or from a mixture of several.

Worker processes decode whole batches in turn, or all samples stay in memory. Every reader can read every shard, and the
state of a stream is only the step. Each source of a mixture is kept in memory or streamed by itself.

Guarantees: a batch does not depend on the number of ranks, workers or shards, or on the place of the samples. A resumed
run does not read the steps that it skips.

Shapes: B batch.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.processes import keep_files_from_programs, leave_signals_to_parent, signals_blocked
from data_pipeline.core.random_crop import CropLaw
from data_pipeline.core.sample import BadSample, Batch
from data_pipeline.core.schema import Count, Gigabytes, NumWorkers, Schema, Share
from data_pipeline.core.system import SHARED, num_cores
from data_pipeline.loading.collate import BatchMaker, join_parts
from data_pipeline.loading.decode import DecodedSamples, decode, decode_ahead
from data_pipeline.loading.mixture import Mixture, MixtureOrder
from data_pipeline.loading.order import (
    ORDER_VERSION,
    BatchOrder,
    NoReplacementError,
    OrderVersion,
    ShardWindows,
    check_batch_size,
)
from data_pipeline.loading.placement import DataPlacement, place_data, resident_bytes, stored_order
from data_pipeline.loading.reading_order import DatasetOrder, GroupedOrder, ReadingOrder, Rows, SourcesOrder
from data_pipeline.loading.shared_memory import NodeShare
from data_pipeline.loading.shuffle_quality import shard_pair_ratio
from data_pipeline.overlays import evaluation_keys
from data_pipeline.remote.cache import RemoteConfig
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore

logger = logging.getLogger(__name__)

_CPU: Final = torch.device("cpu")
_REMOTE: Final = RemoteConfig()
_READ_ALL_THREADS: Final = 4
_NOT_PLACED: Final = DataPlacement("stream", "not decided yet")


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


_READ: Final = ReadConfig()


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


def _gigabytes_needed(store: SampleStore, shuffle_shards: int | None) -> float:
    """Return the size of a cache that is large enough for a reading order, in 10^9 bytes."""
    largest = np.sort(store.shard_bytes)[::-1][: _num_shards_needed(store, shuffle_shards)]
    return math.ceil(1.05 * int(largest.sum()) / 1e7) / 100  # with the indexes of the shards


def _check_cache(store: SampleStore, *, shuffle_shards: int | None) -> None:
    """Raise `UserError`, with settings that would fit, if the cache is too small for the reading order."""
    if store.max_shards is None or _fits_cache(store, shuffle_shards=shuffle_shards):
        return
    num_shards, needed = len(store.shard_ends), _num_shards_needed(store, shuffle_shards)
    gigabytes = _gigabytes_needed(store, shuffle_shards)
    smaller = f"set data.shuffle_shards to {store.max_shards // 2}, or " if store.max_shards > 1 else "set "
    raise UserError(
        f"{store.location}: its shuffling needs {needed} of its {num_shards} shards at once, but the cache holds "
        f"{store.max_shards}; {smaller}data.remote.cache_gigabytes to {gigabytes:g}"
    )


def _check_shared_cache(stores: Sequence[SampleStore], read: ReadConfig) -> None:
    """Raise `UserError` if one cache directory is too small for the sources of a mixture together."""
    limit = read.remote.cache_gigabytes
    if read.remote.cache_dir is None or limit is None or len(stores) < 2:  # each has a cache of its own
        return
    needed = sum(_gigabytes_needed(store, read.shuffle_shards) for store in stores)
    if needed > limit:
        raise UserError(
            f"the {len(stores)} remote sources of the mixture need {needed:.3g} GB of {read.remote.cache_dir} at once, "
            f"but data.remote.cache_gigabytes is {limit:g}; raise it, or lower data.shuffle_shards"
        )


@dataclass
class _Source:
    """A dataset of a stream: its samples, the maker of its batches, and the samples in memory if they are there.

    `number` counts the datasets of the stream. `name` is that of a source of a mixture, or else the location.
    """

    number: int
    name: str
    store: SampleStore
    maker: BatchMaker
    placed: DataPlacement = _NOT_PLACED

    def collate(self, samples: DecodedSamples, rows: Rows, *, step: int, index_B: torch.Tensor) -> Batch:
        """Return a batch without the online overlay. `index_B` holds `rows.key_index_R`, beside the samples."""
        named = replace(samples, index_B=index_B)
        return self.maker.collate(named, step=step, epoch=rows.key_epoch, bad=rows.bad)


class _ShardPrefetcher:
    """A prefetcher of a remote dataset's shards, for the window being read and the next one."""

    def __init__(
        self, source: _Source, order: ReadingOrder, *, shuffle_shards: int | None, rank: int, world_size: int
    ) -> None:
        self._store, self._number, self._order = source.store, source.number, order
        self._shuffle_shards, self._rank, self._world_size = shuffle_shards, rank, world_size
        self._epoch, self._window = 0, -1
        self._windows, self._windows_after = self._windows_of(0), self._windows_of(1)

    def _windows_of(self, epoch: int) -> ShardWindows:
        ends = self._store.shard_ends
        seed = self._order.seed_of(self._number)
        return ShardWindows(ends, self._shuffle_shards or len(ends), seed=seed, epoch=epoch)

    def before(self, step: int) -> None:
        """Request shards if a window begins at `step`. Call this before each step."""
        epoch, position = self._order.position_at(self._number, step)
        if epoch != self._epoch:
            self._epoch, self._window = epoch, -1
            self._windows, self._windows_after = self._windows_of(epoch), self._windows_of(epoch + 1)
        window = self._windows.number_at(position)
        if window == self._window:
            return
        self._window = window
        now = self._windows.window(window)
        is_last = window + 1 == len(self._windows)
        following = self._windows_after.window(0) if is_last else self._windows.window(window + 1)
        # All processes need the same shards. Each starts at another shard, so that they fetch in parallel.
        worker = torch.utils.data.get_worker_info()
        num_workers, worker_id = (1, 0) if worker is None else (worker.num_workers, worker.id)
        shift = (self._rank * num_workers + worker_id) * len(now) // (self._world_size * num_workers)
        self._store.prefetch(np.concatenate([np.roll(now, -shift), following]))


class _StreamedBatches(Dataset[list[Batch | None] | UserError]):
    """The clean batches of one rank, by step: one from each streamed source, None if a step has no row of it.

    Worker processes share the index of the opened stores.
    """

    def __init__(
        self,
        sources: Sequence[_Source],
        order: ReadingOrder,
        prefetchers: Sequence[_ShardPrefetcher],
        *,
        check_bad: Callable[[Collection[BadSample]], None],
    ) -> None:
        self._sources, self._order, self._prefetchers, self._check_bad = sources, order, prefetchers, check_bad
        # Grows in each process when it finds bad samples. No batch depends on the bad samples found before.
        self._bad = [{sample.index: sample for sample in source.store.known_bad} for source in sources]
        self._all_known: set[int] = set()  # the numbers of the sources of which `_bad` holds all bad samples

    def __getitem__(self, step: int) -> list[Batch | None] | UserError:
        try:
            for prefetcher in self._prefetchers:
                prefetcher.before(step)
            batches = [self._read(source, bad, step) for source, bad in zip(self._sources, self._bad, strict=True)]
            if torch.utils.data.get_worker_info() is not None:
                _move_to_shared_memory(batches)
            return batches
        except UserError as error:
            # Returned and not raised, because a DataLoader turns a worker's exception into a page of traceback.
            return error

    def _read(self, source: _Source, bad: dict[int, BadSample], step: int) -> Batch | None:
        """Read the rows of one source. Adds the bad samples that it finds to `bad`."""
        while True:
            began = time.perf_counter()
            all_known = source.number in self._all_known
            try:
                rows = self._order.rows(source.number, step, bad=bad, all_known=all_known)
            except NoReplacementError:
                if all_known:
                    raise
                self._find_all_bad(source, bad)
                continue
            if not len(rows.indices_R):
                return None
            crops = source.maker.crop_draws(rows.key_index_R, epoch=rows.key_epoch)
            samples = decode(source.store, rows.indices_R, crops=crops)
            if not samples.bad:
                clean = source.collate(samples, rows, step=step, index_B=torch.from_numpy(rows.key_index_R))
                seconds = time.perf_counter() - began
                return replace(clean, seconds={"read": samples.read_seconds, "decode": seconds - samples.read_seconds})
            bad |= {sample.index: sample for sample in samples.bad.values()}

    def _find_all_bad(self, source: _Source, bad: dict[int, BadSample]) -> None:
        """Decode a whole dataset, which is hardly more than a global batch here, and add its bad samples to `bad`."""
        for indices_B in stored_order(source.store, range(len(source.store.shard_ends))):
            bad |= {sample.index: sample for sample in decode(source.store, indices_B).bad.values()}
            self._check_bad(bad.values())
        self._all_known.add(source.number)


def _move_to_shared_memory(batches: Iterable[Batch | None]) -> None:
    """Move the tensors of a worker to shared memory, which torch would do in the thread that sends them.

    An error of that thread never reaches the training process, which would wait for the batch. Raises `UserError` if
    there is no room.
    """
    try:
        for tensor in (tensor for batch in batches if batch is not None for tensor in batch.tensors()):
            tensor.share_memory_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # its reason is not to be relied on: it may be "Success (0)"
        raise UserError(
            f"a data worker could not put a batch into shared memory; see `df {SHARED}`: give it more room, in a "
            "container for example by `docker run --shm-size=8g`, or use data.num_workers=0"
        ) from error


def _training_keys(seed: int, index_B: torch.Tensor, epoch: int, view: int) -> DrawKeys:
    """Return the keys of the crops and overlays of a batch. A function of the module, so workers can get it pickled."""
    return DrawKeys(seed=seed, epoch=epoch, index_B=index_B, view=view)


def _start_worker(worker_id: int) -> None:
    """Ignore the signals that warn the training process, such as those of a batch system and Ctrl-C.

    The training process ends its workers with SIGTERM when it ends, if it still holds an iterator of batches then.
    """
    leave_signals_to_parent()
    if sys.platform == "darwin":
        # torch starts a program beside each worker there, which outlives it. If it had the worker's files, the
        # training process would not notice that the worker has ended.
        keep_files_from_programs()


class Stream:
    """The batches of one rank for the steps `start_step` to `end_step - 1`; to resume at step k, start at step k.

    Without an `end_step`, as many steps as an epoch has. `for batch in Stream(dataset, global_batch_size=256, seed=0)`
    is one epoch in this process.

    Each rank gets global_batch_size / world_size samples a step, on `device`. With `overlay_draw="per_view"`, each view
    of a sample has its own crop and online overlay; otherwise the two views share them. With a `share`, the ranks of a
    node hold a dataset in memory together, and all ranks must make their streams at the same time. Iterating twice
    gives the same batches twice. The caller's random state does not change.

    With `in_groups`, `read_in_groups` will be called between steps, which needs the samples in memory; `auto` then
    reads them even if less than an epoch is left.

    `dataset` is a location, an open store, whose own `remote` settings then apply, or a `Mixture` of open stores. With
    `crops`, for tars without an overlay, each view of a picture is a crop that is drawn so, cut out of the stored
    picture and resized.

    Attributes:
        placement: the place of the samples: `stream`, `host` or `device`; of a mixture, that of all its sources, or
            `stream` if they differ.
        placement_reason: the reason for `placement`, in words.
        known_bad: the unreadable samples that were found before the first step.

    Raises `UserError` before the first step if an argument is out of range, if a dataset is incomplete or takes no
    `crops`, if too many samples are bad, if the batch size does not fit the dataset and the ranks, or if memory or
    cache are too small for `read`. Iterating raises `UserError` if a sample and all its replacements are bad, and
    `RuntimeError` if a worker was killed.
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
        share: NodeShare | None = None,
        crops: CropLaw | None = None,
        in_groups: bool = False,
    ) -> None:
        _check_arguments(seed=seed, rank=rank, world_size=world_size, start_step=start_step, end_step=end_step)
        device = torch.device(device)
        self._read, self._device, self._rank, self._world_size = read, device, rank, world_size
        self._mixture = dataset if isinstance(dataset, Mixture) else None
        if isinstance(dataset, Mixture):
            named = {source.name: source.store for source in dataset.sources}
            self.location: str | Path = f"the mixture of {' and '.join(named)}"
        else:
            store = _open_store(dataset, read.remote)
            named, self.location = {str(store.location): store}, store.location
        stores = list(named.values())
        if crops is not None:
            _check_crops(stores)
        self._order = reading_order(
            dataset if isinstance(dataset, Mixture) else stores[0],
            read,
            seed=seed,
            global_batch_size=global_batch_size,
            rank=rank,
            world_size=world_size,
        )
        self._num_samples = sum(map(len, stores))
        self._label_names = sorted({name for store in stores for name in store.manifest.labels})
        self._check_bad([self._order.named(k, bad) for k, store in enumerate(stores) for bad in store.known_bad])
        if overlay_draw == "per_view" and all(store.overlay is None for store in stores):
            raise UserError(
                f"{self.location} was built without `--overlay online`, which per-view overlays need; build it "
                "again with it, or let the two views share their overlay"
            )
        self._sources = [
            _Source(
                number,
                name,
                store,
                BatchMaker(
                    store.manifest,
                    None if store.overlay is None else store.overlay.to(device),
                    partial(_training_keys, seed),
                    per_view=overlay_draw == "per_view",
                    crops=crops,
                ),
            )
            for number, (name, store) in enumerate(named.items())
        ]
        end_step = start_step + self._order.num_steps_per_epoch if end_step is None else end_step
        self._steps = range(start_step, end_step)
        self._has_begun = False
        self._global_batch_size, self._crops = global_batch_size, crops
        self._place(share, reads_short=in_groups)
        self.known_bad = tuple(
            self._order.named(source.number, bad)
            for source in self._sources
            for bad in (source.store.known_bad if source.placed.samples is None else source.placed.samples.bad.values())
        )
        self._check_bad(self.known_bad)
        num_good = self._num_samples - len(self.known_bad)
        if self._mixture is None and num_good < global_batch_size:
            raise UserError(
                f"{self.location}: {num_good} of {self._num_samples} samples can be read, and global_batch_size is "
                f"{global_batch_size}; lower it, or build or copy the dataset again"
            )
        kinds = {source.placed.kind for source in self._sources}
        self.placement = kinds.pop() if len(kinds) == 1 else "stream"
        self.placement_reason = "; ".join(source.placed.reason for source in self._sources)
        if rank == 0:
            self._log_start()

    def _place(self, share: NodeShare | None, *, reads_short: bool) -> None:
        """Read the samples of each dataset into memory, if the settings say so and they fit together.

        `reads_short` says whether to read them even if less than an epoch is left.
        """
        read, room = self._read, self._read.resident_gigabytes
        for source in self._sources:
            store = source.store
            is_short = not reads_short and not self._order.reads_an_epoch(source.number, self._steps)
            # A run whose cache is too small to stream began with the data in memory, so it must also end like this.
            if is_short and read.placement == "auto" and _fits_cache(store, shuffle_shards=read.shuffle_shards):
                source.placed = DataPlacement("stream", "less than an epoch is left to read")
            elif self._crops is not None:
                source.placed = DataPlacement("stream", "crops are cut out of the stored pictures")
            else:
                source.placed = place_data(
                    store,
                    wanted=read.placement,
                    resident_gigabytes=room,
                    device=self._device,
                    share=_share_of(share, source.number),
                    show_progress=self._rank == 0,
                )
                # All ranks must count alike, so this counts what was tried.
                gigabytes = resident_bytes(store.manifest) / 1e9
                room -= gigabytes if gigabytes <= room and self._mixture is not None else 0
            if source.placed.samples is None:
                _check_cache(store, shuffle_shards=read.shuffle_shards)
        streamed = [source.store for source in self._sources if source.placed.samples is None]
        _check_shared_cache([store for store in streamed if store.is_remote], read)

    def _log_start(self) -> None:
        size, read = self._global_batch_size, self._read
        if self._mixture is None:
            logger.info(
                "%s: %d samples, %d steps an epoch; %d samples do not fill a global batch of %d and are dropped",
                self.location,
                self._num_samples,
                self.num_steps_per_epoch,
                self.num_dropped_per_epoch,
                size,
            )
        else:
            logger.info("%s: %d samples, %d steps an epoch", self.location, self._num_samples, self.num_steps_per_epoch)
        if read.order_version != ORDER_VERSION:
            logger.info("%s: the order is of version %d", self.location, read.order_version)
        for source in self._sources:
            if self._mixture is not None:
                logger.info(
                    "%s: %s, %d samples; a global batch of %d takes %.4g on average",
                    source.name,
                    source.store.location,
                    len(source.store),
                    size,
                    self._order.share_of(source.number, self._steps.start) * size,
                )
            logger.info("%s: placement %s (%s)", source.name, source.placed.kind, source.placed.reason)
        for name, ratio in self.shard_pair_ratios().items():
            logger.info(
                "%s: with shuffle_shards=%d, two samples of one shard meet in a batch %.3g times as often as in a "
                "shuffle of all samples",
                name,
                read.shuffle_shards,
                ratio,
            )

    def shard_pair_ratios(self) -> dict[str, float]:
        """Return `shard_pair_ratio` of the dataset, or of each source of a mixture, by name; none without windows."""
        if self._read.shuffle_shards is None:
            return {}
        ratios = {}
        for source in self._sources:
            part = self._order.share_of(source.number, self._steps.start) * self._global_batch_size
            ratios[source.name] = shard_pair_ratio(
                source.store.shard_ends,
                self._read.shuffle_shards,
                seed=self._order.seed_of(source.number),
                global_batch_size=max(1, min(round(part), len(source.store))),
            )
        return ratios

    def source_metrics(self, num_done: int) -> dict[str, float]:
        """Return what the first `num_done` steps drew from each source of a mixture; nothing for one dataset.

        `mixture/NAME/batch` counts the samples in the last global batch, `samples` those in all, and `epochs` how often
        the source was read.
        """
        if not isinstance(self._order, SourcesOrder):
            return {}
        order, metrics = self._order.order, {}
        before, after = order.draws_before(num_done - 1), order.draws_before(num_done)
        for number, name in enumerate(order.names):
            metrics[f"mixture/{name}/batch"] = float(after[number] - before[number])
            metrics[f"mixture/{name}/samples"] = float(after[number])
            metrics[f"mixture/{name}/epochs"] = after[number] / order.sizes[number]
        return metrics

    @property
    def _check_bad(self) -> Callable[[Collection[BadSample]], None]:
        max_share = self._read.max_bad_share
        return partial(check_bad_share, num_samples=self._num_samples, max_share=max_share, where=self.location)

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the dataset; of a mixture, that of its first source."""
        return self._sources[0].store.manifest

    @property
    def num_steps_per_epoch(self) -> int:
        return self._order.num_steps_per_epoch

    @property
    def num_dropped_per_epoch(self) -> int:
        """Return the number of samples that an epoch leaves out, because they do not fill a global batch.

        A mixture leaves none out, because each of its sources has epochs of its own.
        """
        return 0 if self._mixture is not None else self._num_samples % self._global_batch_size

    def shards_of(self, step: int) -> list[str]:
        """Return the shards of this rank's samples at a step, in stored order; none of data in memory.

        Does not count the replacements of bad samples.
        """
        shards: list[str] = []
        for source in self._sources:
            if source.placed.samples is None:
                rows, store = self._order.rows(source.number, step, bad={}), source.store
                numbers = np.unique(np.searchsorted(store.shard_ends, rows.indices_R, side="right"))
                prefix = "" if self._mixture is None else f"{source.name}/"
                shards += [prefix + store.shard_name(number) for number in numbers.tolist()]
        return shards

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def check_groups(self, group_size: int) -> None:
        """Raise `UserError` if the batches cannot consist of groups, which the trainer finds between two steps."""
        if self.placement == "stream":
            raise UserError(
                f"neighbours are found among all samples, so they must be in memory, but {self.location} is streamed "
                f"({self.placement_reason}); set data.placement=host, or leave out the section neighbours"
            )
        own = self._global_batch_size // self._world_size
        if own % group_size:
            raise UserError(
                f"neighbours.group_size {group_size} does not divide the {own} samples of a batch on each rank; set "
                "another group_size, global_batch_size or number of ranks"
            )

    def epoch_batches(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's part of each batch of an epoch in its own order, without groups."""
        grouped, steps = self._order, range(epoch * self.num_steps_per_epoch, (epoch + 1) * self.num_steps_per_epoch)
        if isinstance(grouped, GroupedOrder):
            self._order = DatasetOrder(grouped.order)
        try:
            yield from self._batches(steps)
        finally:
            self._order = grouped

    def read_in_groups(self, groups_NG: NDArray[np.int64]) -> None:
        """Let batches consist of groups, see `GroupedOrder`, from the next one that is read.

        Batches from memory are read when they are asked for, others ahead of that. Raises `UserError` if a dataset that
        is not in memory is read already, or if the groups do not divide the batch of a rank.
        """
        assert isinstance(self._order, DatasetOrder)
        group_size = groups_NG.shape[1]
        if self._has_begun and self.placement == "stream":
            raise UserError(
                f"batches of {self.location} are read ahead ({self.placement_reason}), so they cannot consist of other "
                "groups from now on; call read_in_groups before the first batch, or pass "
                "read=ReadConfig(placement='host')"
            )
        if (own := self._global_batch_size // self._world_size) % group_size:
            raise UserError(
                f"groups of {group_size} do not divide the {own} samples of a batch on each rank; make groups of "
                "another size, or set another global_batch_size"
            )
        self._order = GroupedOrder(self._order.order, groups_NG)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(self._steps)

    def _batches(self, steps: range) -> Iterator[Batch]:
        self._has_begun = True
        for step, parts in self._clean_parts(steps):
            finished = [self._finish(source, clean) for source, clean in parts]
            row_order = self._order.row_order(step)
            if row_order is None:
                (batch,) = finished
            else:
                row_B = self._to_device(torch.from_numpy(row_order))
                epoch = step // self.num_steps_per_epoch
                batch = join_parts(
                    finished, row_B, epoch=epoch, num_samples=self._num_samples, label_names=self._label_names
                )
            order = self._order
            yield replace(batch, group_size=order.groups_NG.shape[1]) if isinstance(order, GroupedOrder) else batch

    def _finish(self, source: _Source, clean: Batch) -> Batch:
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

    def _clean_parts(self, steps: range) -> Iterator[tuple[int, list[tuple[_Source, Batch]]]]:
        """Yield each step, and the batch without the online overlay of each dataset that has a row in it."""
        streamed = [source for source in self._sources if source.placed.samples is None]
        nothing: Iterator[list[Batch | None]] = ([] for _ in steps)
        from_disk = self._streamed(streamed, steps) if streamed else nothing
        for step, read in zip(steps, from_disk, strict=True):
            parts = {source.number: clean for source, clean in zip(streamed, read, strict=True)}
            for source in self._sources:
                if source.placed.samples is not None:
                    parts[source.number] = self._from_memory(source, source.placed.samples, step)
            found = [(source, parts[source.number]) for source in self._sources]
            yield step, [(source, clean) for source, clean in found if clean is not None]

    def _from_memory(self, source: _Source, samples: DecodedSamples, step: int) -> Batch | None:
        """Return the rows of a dataset in memory, without the online overlay; None if the step has none."""
        is_cuda, is_there = self._device.type == "cuda", samples.index_B.device.type == self._device.type
        began = time.perf_counter()
        rows = self._order.rows(source.number, step, bad=samples.bad, all_known=True)
        if not len(rows.indices_R):
            return None
        row_B = torch.tensor(rows.indices_R)
        if is_cuda and is_there:
            row_B = row_B.pin_memory().to(self._device, non_blocking=True)
        taken = samples.take(row_B)
        index_B = taken.index_B
        if rows.key_index_R is not rows.indices_R:
            index_B = torch.from_numpy(rows.key_index_R)
            index_B = self._to_device(index_B) if is_there else index_B
        clean = source.collate(taken, rows, step=step, index_B=index_B)
        clean = replace(clean, seconds={"read": time.perf_counter() - began})
        return clean if is_there or not is_cuda else clean.pin_memory()

    def _streamed(self, sources: Sequence[_Source], steps: range) -> Iterator[list[Batch | None]]:
        """Yield batches that are decoded as they are needed, without the online overlay."""
        prefetchers = [
            _ShardPrefetcher(
                source,
                self._order,
                shuffle_shards=self._read.shuffle_shards,
                rank=self._rank,
                world_size=self._world_size,
            )
            for source in sources
            if source.store.is_remote
        ]
        loader: DataLoader[list[Batch | None] | UserError] = DataLoader(
            _StreamedBatches(sources, self._order, prefetchers, check_bad=self._check_bad),
            batch_size=None,  # the dataset makes whole batches, and its keys are steps
            sampler=steps,
            num_workers=self._read.num_workers,
            pin_memory=self._device.type == "cuda",
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # without its own, a DataLoader draws from the caller's random state
        )
        # W&B starts threads in every process that is forked, before `worker_init_fn`. They inherit this. On macOS a
        # worker takes seconds to import torch before it can ignore Ctrl-C.
        with signals_blocked({signal.SIGTERM, signal.SIGINT}):
            batches = iter(loader)
        try:
            for item in batches:
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
        finally:
            # The traceback of an error holds this frame. Workers of an iterator that Python's search for garbage finds
            # do not hear that they shall end, and torch waits five seconds for each.
            del batches


def _check_arguments(*, seed: int, rank: int, world_size: int, start_step: int, end_step: int | None) -> None:
    """Raise `UserError` if a number is out of range."""
    if not 0 <= rank < world_size:
        raise UserError(f"rank is {rank} and world_size is {world_size}; ranks count from 0 to world_size - 1")
    for name, number in (("seed", seed), ("start_step", start_step)):
        if number < 0:
            raise UserError(f"{name} is {number}; it must be 0 or more")
    if end_step is not None and end_step < start_step:
        raise UserError(f"end_step is {end_step}; it must be start_step, which is {start_step}, or more")


def _check_crops(stores: Sequence[SampleStore]) -> None:
    """Raise `UserError` if a dataset is read as whole pictures, so that no crop can be cut when one is decoded."""
    for store in stores:
        if store.manifest.tars is None or store.overlay is not None:
            why = "it is no dataset of tars" if store.overlay is None else "its overlay is drawn on whole pictures"
            raise UserError(
                f"no crops can be cut out of the stored pictures of {store.location}, because {why}; leave out `crops` "
                "and let the views crop"
            )


def reading_order(
    dataset: SampleStore | Mixture,
    read: ReadConfig,
    *,
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
                shuffle_shards=read.shuffle_shards,
                version=read.order_version,
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
            shuffle_shards=read.shuffle_shards,
            version=read.order_version,
        )
    )


def _share_of(share: NodeShare | None, number: int) -> NodeShare | None:
    """Return how the ranks of a node share one dataset of a stream: each has a file of its own."""
    return share if share is None or number == 0 else replace(share, token=f"{share.token}-{number}")


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

    Raises `UserError` if `batch_size` is below 1, if the dataset is incomplete, or if more than `max_bad_share` of its
    samples cannot be read.
    """
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; it must be 1 or more")
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
