"""Shards to batches: what every rank sees at every step, as a pure function of (seed, step).

Comes in: where a dataset lies, and a place in the world (rank of W). Goes out: a finished `Batch` a step, on the
training device. The order of an epoch is one seeded permutation of all N samples (or, for a dataset that is fetched
while it is read, of windows of shards), cut into N // G global batches of G; rank r of W takes the r-th W-th part of
each. Worker processes decode whole batches in turn, or all samples stay in memory; crops and overlays are drawn from
(seed, epoch, sample index, view). So shards are never dealt out to readers, the state of a stream is the step alone,
and what may never happen cannot: that a batch depends on the number of ranks, workers or shards or on where the samples
lie, that a sample comes twice in a global batch, or that a resumed run reads what it skips.

Shapes: B batch, N all samples, T points of a sound, C channels, H height, W width.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data_pipeline.audio.waveform import crop_last, gather_clips, to_float
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import BadSample, Batch
from data_pipeline.core.schema import Count, Gigabytes, NumWorkers, Schema, Share
from data_pipeline.loading.resident import NodeShare, Placed, Resident, Rows, decoded, num_cores, place
from data_pipeline.overlays import Overlay, evaluation_keys, no_mask
from data_pipeline.remote.cache import RemoteConfig, is_remote
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore

logger = logging.getLogger(__name__)

_CPU: Final = torch.device("cpu")
_REMOTE: Final = RemoteConfig()
_READ_ALL_THREADS: Final = 4


class ReadConfig(Schema):
    """How a rank reads its samples. None of it changes what is in a batch, but `shuffle_shards`, which is the order.

    Attributes:
        num_workers: processes that decode ahead for each rank while it streams; 0 decodes in the training process.
        placement: `stream` decodes samples as they are needed; `device` and `host` read all of them once, into the
            memory of the training device, or into host memory that the ranks of a node share; `auto` does so where
            they fit.
        resident_gigabytes: the largest decoded dataset, in 10^9 bytes, that `auto` keeps in memory.
        shuffle_shards: None shuffles all samples of the dataset. A number shuffles the shards, and then the samples
            within windows of so many shards: a cache that holds two windows is enough to read a remote dataset.
        max_bad_share: the share of all samples, 0 to 1, that may be unreadable before training ends with an error.
        remote: how a dataset that is not on a local disk is fetched.
    """

    num_workers: NumWorkers = 2
    placement: Literal["auto", "stream", "host", "device"] = "auto"
    resident_gigabytes: Gigabytes = 4
    shuffle_shards: Count | None = None
    max_bad_share: Share = 0.001
    remote: RemoteConfig = _REMOTE


def num_steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Whole global batches in an epoch, at least one; the samples left over are dropped, others in every epoch.

    Raises `UserError` where the dataset does not fill one global batch.
    """
    if not 1 <= global_batch_size <= num_samples:
        raise UserError(
            f"global_batch_size {global_batch_size} does not fit a dataset of {num_samples} samples; "
            f"use 1 to {num_samples}, or build a larger dataset"
        )
    return num_samples // global_batch_size


def epoch_order(
    num_samples: int,
    *,
    seed: int,
    epoch: int,
    shard_ends: NDArray[np.int64] | None = None,
    shuffle_shards: int | None = None,
) -> NDArray[np.int64]:
    """The order of one epoch: a permutation of all samples, (num_samples,) int64, not to be written to.

    With `shuffle_shards`, the shards, which end before the samples `shard_ends` (num_shards,), are shuffled and cut
    into windows of that many; the samples of a window come before those of the next, shuffled among themselves.
    """
    if shuffle_shards is None:
        return _shuffled(num_samples, seed, epoch)
    assert shard_ends is not None
    return _shuffled_by_windows(shard_ends.tobytes(), shuffle_shards, seed, epoch)


@lru_cache(maxsize=2)  # the epoch being read and the one after it
def _shuffled(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    order = generator(seed, "epoch order", epoch).permutation(num_samples).astype(np.int64, copy=False)
    order.flags.writeable = False
    return order


@lru_cache(maxsize=2)
def _shuffled_by_windows(shard_ends: bytes, shuffle_shards: int, seed: int, epoch: int) -> NDArray[np.int64]:
    ends = np.frombuffer(shard_ends, dtype=np.int64)
    starts = ends - np.diff(ends, prepend=0)
    parts = [np.empty(0, dtype=np.int64)]
    for number, window in enumerate(shard_windows(len(ends), shuffle_shards, seed=seed, epoch=epoch)):
        samples = np.concatenate([np.arange(starts[shard], ends[shard]) for shard in window.tolist()])
        parts.append(generator(seed, "window order", epoch, number).permutation(samples))
    order = np.concatenate(parts)
    order.flags.writeable = False
    return order


def shard_windows(num_shards: int, shuffle_shards: int, *, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    """The shards of each window of an epoch, in the order in which the windows are read."""
    shards = generator(seed, "shard order", epoch).permutation(num_shards)
    return [shards[start : start + shuffle_shards] for start in range(0, num_shards, shuffle_shards)]


def batch_indices(
    num_samples: int,
    *,
    seed: int,
    step: int,
    global_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    shard_ends: NDArray[np.int64] | None = None,
    shuffle_shards: int | None = None,
) -> tuple[int, NDArray[np.int64]]:
    """The epoch of a step, and the samples that a rank sees there: (global_batch_size / world_size,) int64 indices.

    `step` counts from the start of training. The parts of all ranks, in the order of the ranks, are the global batch,
    which does not depend on their number. With the defaults it is given whole.
    """
    plan = Plan(num_samples, seed, global_batch_size, rank, world_size, shard_ends, shuffle_shards)
    epoch, indices, _ = plan.at(step, bad={})
    return epoch, indices


@dataclass(frozen=True)
class Plan:
    """Which samples a rank sees at each step."""

    num_samples: int
    seed: int
    global_batch_size: int
    rank: int = 0
    world_size: int = 1
    shard_ends: NDArray[np.int64] | None = None
    shuffle_shards: int | None = None

    def at(self, step: int, *, bad: Mapping[int, BadSample]) -> tuple[int, NDArray[np.int64], tuple[BadSample, ...]]:
        """The epoch; (B,) int64 indices of samples, none of them `bad`; and the bad ones in whose places some stand.

        In the place of a bad sample stands the first good one at the same place of the global batches that follow it
        in the epoch, then of those before. Places differ within a global batch, so no sample comes twice in it; and a
        rank knows all of this about its own places without asking the others.

        Raises `UserError` where all that could stand in are bad.
        """
        size = self.global_batch_size
        epoch, step_in_epoch = divmod(step, num_steps_per_epoch(self.num_samples, size))
        order = epoch_order(
            self.num_samples,
            seed=self.seed,
            epoch=epoch,
            shard_ends=self.shard_ends,
            shuffle_shards=self.shuffle_shards,
        )
        local_size = size // self.world_size
        first_place = self.rank * local_size
        start = step_in_epoch * size + first_place
        indices = order[start : start + local_size]
        rows = [row for row, index in enumerate(indices.tolist()) if index in bad] if bad else []
        if not rows:
            return epoch, indices, ()
        indices = indices.copy()
        passed: list[BadSample] = []
        for row in rows:
            same_place = order[first_place + row :: size]
            following = chain(same_place[step_in_epoch:].tolist(), same_place[:step_in_epoch].tolist())
            for index in following:
                if index not in bad:
                    indices[row] = index
                    break
                passed.append(bad[index])
            else:
                raise UserError(
                    f"sample {bad[int(indices[row])].key} cannot be read, nor can any of the {len(same_place)} that "
                    f"could stand in for it with a global_batch_size of {size}; build or copy the dataset again"
                )
        return epoch, indices, tuple(passed)


def check_batch_size(num_samples: int, *, global_batch_size: int, world_size: int) -> None:
    """Raises `UserError`, with the numbers and the mend, unless all ranks get the same number of equal batches."""
    largest = num_samples // world_size * world_size
    if largest == 0:
        raise UserError(f"{num_samples} samples are too few for {world_size} ranks; build a larger dataset")
    fits = 1 <= global_batch_size <= num_samples
    if fits and global_batch_size % world_size == 0:
        return
    below = min(global_batch_size // world_size * world_size, largest)
    sizes = [str(size) for size in (below, below + world_size) if 1 <= size <= largest]
    problem = f"cannot be divided by {world_size} ranks" if fits else f"does not fit a dataset of {num_samples} samples"
    raise UserError(f"global_batch_size {global_batch_size} {problem}; use {' or '.join(sizes)}")


def check_bad_share(bad: Collection[BadSample], *, num_samples: int, max_share: float, where: str | Path) -> None:
    """Raises `UserError` that names the first samples if more than `max_share` (0 to 1) of all are `bad`.

    `where` is the dataset, as the user named it. A sample that is listed twice counts once.
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


def can_stream(store: SampleStore, *, shuffle_shards: int | None) -> bool:
    """Whether the cache is large enough for the order of reading."""
    return store.max_shards is None or _num_shards_needed(store, shuffle_shards) <= store.max_shards


def _num_shards_needed(store: SampleStore, shuffle_shards: int | None) -> int:
    """All shards, or with `shuffle_shards` two windows of so many: one is read while the next is fetched."""
    num_shards = len(store.manifest.shards)
    return num_shards if shuffle_shards is None else min(2 * shuffle_shards, num_shards)


def check_cache(store: SampleStore, *, shuffle_shards: int | None) -> None:
    """Raises `UserError`, with the numbers and the mend, where the cache is too small for the order of reading."""
    if store.max_shards is None or can_stream(store, shuffle_shards=shuffle_shards):
        return
    num_shards, needed = len(store.manifest.shards), _num_shards_needed(store, shuffle_shards)
    largest = sorted((shard.num_bytes for shard in store.manifest.shards), reverse=True)[:needed]
    gigabytes = math.ceil(1.05 * sum(largest) / 1e7) / 100  # with the indexes of the shards
    smaller = f"set data.shuffle_shards to {store.max_shards // 2}, or " if store.max_shards > 1 else "set "
    raise UserError(
        f"{store.location}: shuffled as it is, {needed} of its {num_shards} shards are needed at once, but the cache "
        f"holds {store.max_shards}; {smaller}data.remote.cache_gigabytes to {gigabytes:g}"
    )


@dataclass(frozen=True)
class Draws:
    """Stored samples to finished inputs. `keys` gives the keys of (index_B, epoch, view)."""

    manifest: Manifest
    overlay: Overlay | None
    per_view: bool
    keys: Callable[[Tensor, int, int], DrawKeys]

    def cropped(self, rows: Rows, *, step: int, epoch: int, bad: tuple[BadSample, ...]) -> Batch:
        """Clean inputs of one size, in the dtype in which they are stored, where the rows lie."""
        inputs_a = inputs_b = rows.pictures_BCHW
        if inputs_a is None or inputs_b is None:
            inputs_a = inputs_b = self._sounds(rows, epoch=epoch, view=0)
            if self.per_view and rows.longest > inputs_a.shape[1]:
                inputs_b = self._sounds(rows, epoch=epoch, view=1)
        return Batch(
            step=step,
            epoch=epoch,
            index_B=rows.index_B,
            inputs_a=inputs_a,
            inputs_b=inputs_b,
            masks_BHW=rows.masks_BHW,
            masks_b_BHW=rows.masks_BHW,
            label_base_B=rows.label_base_B,
            label_overlay_B=rows.label_overlay_B,
            bad=bad,
        )

    def _sounds(self, rows: Rows, *, epoch: int, view: int) -> Tensor:
        """(B, T): cut by the draw of a view in a train split, to the first T points in a test split."""
        assert rows.points_X is not None
        assert rows.start_B is not None
        assert rows.length_B is not None
        last_B = torch.zeros_like(rows.index_B, dtype=torch.bool)
        if self.manifest.how_made.split == "train":
            last_B = crop_last(self.keys(rows.index_B, epoch, view))
        (num_points,) = self.manifest.input_shape
        return gather_clips(rows.points_X, rows.start_B, rows.length_B, num_points, last_B=last_B)

    @torch.no_grad()
    def drawn(self, clean: Batch) -> Batch:
        """What training sees, from clean inputs on the training device."""
        inputs_a, inputs_b = clean.inputs_a, clean.inputs_b
        is_sound = self.manifest.medium == "sound"
        if is_sound and inputs_a.dtype != torch.float32:
            inputs_a = to_float(clean.inputs_a)
            inputs_b = inputs_a if clean.inputs_b is clean.inputs_a else to_float(clean.inputs_b)
        if self.overlay is not None:
            view_a = self.overlay(inputs_a, self.keys(clean.index_B, clean.epoch, 0))
            view_b = self.overlay(inputs_b, self.keys(clean.index_B, clean.epoch, 1)) if self.per_view else view_a
            return replace(
                clean,
                inputs_a=view_a.inputs,
                inputs_b=view_b.inputs,
                masks_BHW=view_a.masks_BHW,
                masks_b_BHW=view_b.masks_BHW,
                label_overlay_B=view_a.label_B,
            )
        masks_BHW = no_mask(inputs_a) if clean.masks_BHW is None and not is_sound else clean.masks_BHW
        return replace(clean, inputs_a=inputs_a, inputs_b=inputs_b, masks_BHW=masks_BHW, masks_b_BHW=masks_BHW)


class _FetchAhead:
    """Has the shards of a remote dataset fetched in the background: of the window being read, and of the next."""

    def __init__(self, store: SampleStore, plan: Plan) -> None:
        self._store, self._plan = store, plan
        self._asked_for: tuple[int, int] | None = None

        self._epoch = self._window = -1
        self._windows: list[NDArray[np.int64]] = []
        self._window_ends = np.empty(0, dtype=np.int64)

    def at(self, step: int) -> None:
        """To be called before each step: asks for shards where a window begins."""
        plan, shard_ends = self._plan, self._store.shard_ends
        epoch, step_in_epoch = divmod(step, num_steps_per_epoch(plan.num_samples, plan.global_batch_size))
        if epoch != self._epoch:
            shard_sizes = np.diff(shard_ends, prepend=0)
            windows, windows_after = (
                shard_windows(len(shard_ends), plan.shuffle_shards or len(shard_ends), seed=plan.seed, epoch=number)
                for number in (epoch, epoch + 1)
            )
            self._epoch, self._window = epoch, -1
            self._windows = [*windows, windows_after[0]]
            self._window_ends = np.cumsum([shard_sizes[window].sum() for window in windows])
        window = int(np.searchsorted(self._window_ends, step_in_epoch * plan.global_batch_size, side="right"))
        if window == self._window:
            return
        self._window = window
        now, following = self._windows[window : window + 2]
        # All processes want the same shards; each begins with others, so that they are fetched side by side.
        worker = torch.utils.data.get_worker_info()
        num_workers, worker_id = (1, 0) if worker is None else (worker.num_workers, worker.id)
        turn = (plan.rank * num_workers + worker_id) * len(now) // (plan.world_size * num_workers)
        self._store.prefetch([*np.roll(now, -turn).tolist(), *following.tolist()])


class _StreamedBatches(Dataset[Batch | UserError]):
    """One rank's clean batches by step. Holds the store as it was opened, so that worker processes share its index."""

    def __init__(self, store: SampleStore, plan: Plan, draws: Draws) -> None:
        self._store, self._plan, self._draws = store, plan, draws
        # Grows in each process as it meets bad samples. No batch depends on what was met before.
        self._bad = {sample.index: sample for sample in store.known_bad}
        self._fetch_ahead = _FetchAhead(store, plan) if is_remote(store.location) else None

    def __getitem__(self, step: int) -> Batch | UserError:
        try:
            if self._fetch_ahead is not None:
                self._fetch_ahead.at(step)
            while True:
                began = time.perf_counter()
                epoch, indices, passed = self._plan.at(step, bad=self._bad)
                stored = self._store.decode(indices)
                if not stored.bad:
                    rows = Rows.of(stored, self._store.manifest)
                    clean = self._draws.cropped(rows, step=step, epoch=epoch, bad=passed)
                    seconds = time.perf_counter() - began
                    return replace(
                        clean, seconds={"read": stored.read_seconds, "decode": seconds - stored.read_seconds}
                    )
                self._bad |= {sample.index: sample for sample in stored.bad.values()}
        except UserError as error:
            # Returned, not raised: a DataLoader turns a worker's exception into a page of traceback.
            return error


def _outlive_warnings(worker_id: int) -> None:
    """A warning to all processes of a job is the training process's to act on; a worker ends with that process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Stream:
    """One rank's batches for the steps `start_step` to `end_step - 1`; to resume at step k is to start at step k.

    Each rank gets global_batch_size / world_size samples a step, on `device`. With `overlay_draw="per_view"` the two
    views of a sample have a crop and an online overlay each, else they share them. `share` lets the ranks of a node
    hold resident data together; all ranks must then make their streams at the same time. The caller's random state is
    not touched. Iterating twice gives the same batches twice.

    Attributes:
        placement: where the samples are: `stream`, `host` or `device`.
        placement_reason: why, in words.
        known_bad: the unreadable samples that were found before the first step.

    Raises `UserError` before the first step where the dataset is not whole, too many samples are bad, the batch size
    does not fit it and the ranks, or memory or cache are too small for what `read` asks; while iterating, `UserError`
    where a sample and all that could stand in are bad, `RuntimeError` where a worker was killed.
    """

    def __init__(
        self,
        location: str | Path,
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
    ) -> None:
        assert 0 <= rank < world_size
        assert 0 <= start_step <= end_step
        store = SampleStore(location, remote=read.remote)
        check_batch_size(len(store), global_batch_size=global_batch_size, world_size=world_size)
        check_bad_share(store.known_bad, num_samples=len(store), max_share=read.max_bad_share, where=location)
        if overlay_draw == "per_view" and store.overlay is None:
            raise UserError(
                f"{location} holds no overlay that is drawn as it is read, so its views cannot have one each; "
                "build it with `--overlay online`, or let the views share theirs"
            )
        self._store, self._read, self._device = store, read, device
        self._plan = Plan(len(store), seed, global_batch_size, rank, world_size, store.shard_ends, read.shuffle_shards)
        self._draws = Draws(
            store.manifest,
            None if store.overlay is None else store.overlay.to(device),
            overlay_draw == "per_view",
            lambda index_B, epoch, view: DrawKeys(seed=seed, epoch=epoch, index_B=index_B, view=view),
        )
        self._steps = range(start_step, end_step)
        is_short = len(self) < self.num_steps_per_epoch
        # Where the cache is too small to stream, a run that was begun in memory must also end there.
        if is_short and read.placement == "auto" and can_stream(store, shuffle_shards=read.shuffle_shards):
            placed = Placed("stream", "less than an epoch is to be read")
        else:
            placed = place(
                store,
                wanted=read.placement,
                resident_gigabytes=read.resident_gigabytes,
                device=device,
                share=share,
                show_progress=rank == 0,
            )
        self.placement, self.placement_reason, self._resident = placed.placement, placed.reason, placed.resident
        self.known_bad = store.known_bad
        if placed.resident is None:
            check_cache(store, shuffle_shards=read.shuffle_shards)
        else:
            self.known_bad = tuple(placed.resident.bad.values())
            check_bad_share(self.known_bad, num_samples=len(store), max_share=read.max_bad_share, where=location)
        if rank == 0:
            logger.info(
                "%s: %d samples, %d steps an epoch; %d samples do not fill a global batch of %d and are dropped",
                location,
                len(store),
                self.num_steps_per_epoch,
                self.num_dropped_per_epoch,
                global_batch_size,
            )
            logger.info("%s: placement %s (%s)", location, placed.placement, placed.reason)

    @property
    def manifest(self) -> Manifest:
        return self._store.manifest

    @property
    def num_steps_per_epoch(self) -> int:
        return num_steps_per_epoch(len(self._store), self._plan.global_batch_size)

    @property
    def num_dropped_per_epoch(self) -> int:
        """Samples that no rank sees in an epoch because they do not fill a global batch; others in every epoch."""
        return len(self._store) % self._plan.global_batch_size

    def shards_of(self, step: int) -> list[str]:
        """The files that hold this rank's samples of a step, in stored order; none where the data are in memory.

        What would stand in for bad samples is left out.
        """
        if self._resident is not None:
            return []
        _, indices, _ = self._plan.at(step, bad={})
        numbers = np.unique(np.searchsorted(self._store.shard_ends, indices, side="right"))
        return [self.manifest.shards[number].name for number in numbers.tolist()]

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        for clean in self._streamed() if self._resident is None else self._looked_up(self._resident):
            began = time.perf_counter()
            clean = clean.to(self._device)
            moved = time.perf_counter()
            batch = self._draws.drawn(clean)
            made = {"transfer": moved - began, "overlay": time.perf_counter() - moved}
            yield replace(batch, seconds={**batch.seconds, **made})

    def _looked_up(self, resident: Resident) -> Iterator[Batch]:
        rows = resident.rows
        is_cuda, are_rows_there = self._device.type == "cuda", rows.index_B.device.type == self._device.type
        for step in self._steps:
            began = time.perf_counter()
            epoch, indices, passed = self._plan.at(step, bad=resident.bad)
            row_B = torch.tensor(indices)
            if is_cuda and are_rows_there:
                row_B = row_B.pin_memory().to(self._device, non_blocking=True)
            clean = self._draws.cropped(rows.take(row_B), step=step, epoch=epoch, bad=passed)
            clean = replace(clean, seconds={"read": time.perf_counter() - began})
            yield clean if are_rows_there or not is_cuda else clean.pin_memory()

    def _streamed(self) -> Iterator[Batch]:
        loader: DataLoader[Batch | UserError] = DataLoader(
            _StreamedBatches(self._store, self._plan, self._draws),
            batch_size=None,  # the dataset makes whole batches, and its keys are steps
            sampler=self._steps,
            num_workers=self._read.num_workers,
            pin_memory=self._device.type == "cuda",
            worker_init_fn=_outlive_warnings,
            generator=torch.Generator(),  # without its own, a DataLoader draws from the caller's random state
        )
        try:
            for item in loader:
                if isinstance(item, UserError):
                    raise item
                yield item
        except (ConnectionError, EOFError, FileNotFoundError) as error:
            # A worker was killed while it handed over a batch. The DataLoader hears of it by a signal, and raises in
            # its handler; the signal is a moment behind the broken socket, and must not strike during clean-up.
            time.sleep(1)
            raise RuntimeError(
                "a DataLoader worker exited while it handed over a batch; was it killed for lack of memory?"
            ) from error


def read_all(
    location: str | Path,
    *,
    batch_size: int,
    draw: int | None = 0,
    device: torch.device = _CPU,
    remote: RemoteConfig = _REMOTE,
    max_bad_share: float = 0.001,
) -> Iterator[Batch]:
    """Every good sample once, in stored order, on `device`; for evaluation. Some batches may be smaller.

    An online overlay is drawn with `evaluation_keys`, so the same in every run; another `draw` is another overlay, and
    None gives clean samples. Samples that cannot be read are left out and logged.

    Raises `UserError` where the dataset is not whole, or more than `max_bad_share` of its samples cannot be read.
    """
    store = SampleStore(location, remote=remote)
    draws = Draws(
        store.manifest,
        None if store.overlay is None or draw is None else store.overlay.to(device),
        False,
        lambda index_B, epoch, view: evaluation_keys(index_B, draw=draw or 0),
    )
    bad = list(store.known_bad)
    check_bad_share(bad, num_samples=len(store), max_share=max_bad_share, where=location)
    starts = range(0, len(store), batch_size)
    chunks = (np.arange(start, min(start + batch_size, len(store)), dtype=np.int64) for start in starts)
    for step, stored in enumerate(decoded(store, chunks, num_threads=min(num_cores(), _READ_ALL_THREADS))):
        rows, found = Rows.of(stored, store.manifest), tuple(stored.bad.values())
        if found:
            bad += found
            check_bad_share(bad, num_samples=len(store), max_share=max_bad_share, where=location)
            for sample in found:
                logger.warning("%s: %s in %s is left out: %s", location, sample.key, sample.shard, sample.reason)
            good = [row for row in range(len(stored.index_B)) if row not in stored.bad]
            rows = rows.take(torch.tensor(good, dtype=torch.int64))
        if len(rows.index_B):
            yield draws.drawn(draws.cropped(rows, step=step, epoch=0, bad=found).to(device))
