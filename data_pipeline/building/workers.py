"""What the processes of a build run: a shard is made whole by one of them, from a recipe and its place in the dataset.

Comes in: a recipe that all shards share, and for each shard which records are due in it. Goes out: the shard, its index
and, written last, a file that says what is in it. What may never happen: a byte that depends on which process made it,
or a process that writes on after its build was killed and another has begun.

Shapes: B samples of a shard or of one call of the overlay, C channels, H height, W width, T points of a waveform.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.audio.waveform import crop_last, fit_length, to_float
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL, Record, Sample
from data_pipeline.core.schema import Schema
from data_pipeline.loading.totals import Sums, Totals
from data_pipeline.overlays import Overlay, baked_keys
from data_pipeline.sources import Source
from data_pipeline.storage.manifest import LabelNames, ShardEntry
from data_pipeline.storage.shards import EncodedSample, encode, index_path, shard_name, write_shard
from data_pipeline.storage.source_digests import content_digest

FINISHED_SUFFIX: Final = ".finished.json"  # of the file that says what is in a finished shard
_NUM_SAMPLES_PER_DRAW = 100  # of one call of an overlay: bounds the memory, 20 MB of sounds
_NUM_TASKS_AHEAD = 2  # per worker: keeps all busy
_SECONDS_FOR_ORPHANS = 30.0  # in which the workers of a killed build end; they take some thousandths

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Recipe:
    """All that a worker needs to make any shard; `overlay` is the one that is drawn into it."""

    source: Source
    overlay: Overlay | None
    label_names: LabelNames
    split: str
    seed: int
    sample_rate: int | None
    num_points: int | None

    def no_totals(self) -> Totals:
        return Totals(num_base=len(self.label_names.base), num_overlay=len(self.label_names.overlay))


@dataclass(frozen=True)
class ShardTask:
    """Which samples are due in a shard: from `first_index`, showing the records `records_B`.

    `num_new` of them, at the beginning, show their record for the first time in the dataset.
    """

    number: int
    first_index: int
    records_B: NDArray[np.int64]
    num_new: int


class FinishedShard(Schema):
    """What the build must know of a finished shard; `digests` are those of its new records' contents in hexadecimal
    digits.
    """

    entry: ShardEntry
    sums: Sums
    digests: str


def make_shard(recipe: Recipe, task: ShardTask, *, directory: Path) -> int:
    """Write one shard and then what it holds; returns its number of samples."""
    totals = recipe.no_totals()
    digests: list[bytes] = []

    def encoded() -> Iterator[EncodedSample]:
        for sample, record in _samples(recipe, task):
            if len(digests) < task.num_new:
                digests.append(content_digest(record.content))
            totals.add(sample)
            yield encode(sample, sample_rate=recipe.sample_rate)

    entry = write_shard(encoded(), directory / shard_name(task.number))
    finished = FinishedShard(entry=entry, sums=totals.sums, digests=b"".join(digests).hex())
    path = finished_path(directory, task.number)
    being_written = path.with_name(f"{path.name}.partial")
    being_written.write_text(finished.model_dump_json())
    being_written.replace(path)
    return len(task.records_B)


def _samples(recipe: Recipe, task: ShardTask) -> Iterator[tuple[Sample, Record]]:
    """The samples of a shard, in order, each with its record."""
    num_at_once = 1 if recipe.overlay is None else _NUM_SAMPLES_PER_DRAW
    for start in range(0, len(task.records_B), num_at_once):
        records = [recipe.source[number] for number in task.records_B[start : start + num_at_once].tolist()]
        first_index = task.first_index + start
        samples = (
            [Sample(first_index, records[0].content, None, records[0].label, NO_LABEL)]
            if recipe.overlay is None
            else _overlaid(recipe.overlay, recipe, records, first_index)
        )
        yield from zip(samples, records, strict=True)


def _overlaid(overlay: Overlay, recipe: Recipe, records: Sequence[Record], first_index: int) -> list[Sample]:
    """Consecutive samples, with an overlay drawn on all of them in one call."""
    index_B = torch.arange(first_index, first_index + len(records))
    keys = baked_keys(index_B, seed=recipe.seed, split=recipe.split)
    contents = [record.content for record in records]
    if recipe.num_points is None:
        overlaid = overlay(torch.from_numpy(np.stack(contents)).permute(0, 3, 1, 2), keys)
        contents_B = overlaid.inputs.permute(0, 2, 3, 1).contiguous().numpy()
    else:
        last_B = crop_last(keys) if recipe.split == "train" else torch.zeros(len(records), dtype=torch.bool)
        clips = [torch.from_numpy(content) for content in contents]
        overlaid = overlay(to_float(fit_length(clips, recipe.num_points, last_B=last_B)), keys)
        contents_B = overlaid.inputs.numpy()
    masks_B = [None] * len(records) if overlaid.masks_BHW is None else overlaid.masks_BHW.numpy()
    labels_B = overlaid.label_B.tolist()
    return [
        Sample(index, content, mask, record.label, label)
        for index, content, mask, record, label in zip(
            index_B.tolist(), contents_B, masks_B, records, labels_B, strict=True
        )
    ]


def content_digests(recipe: Recipe, numbers: NDArray[np.int64]) -> bytes:
    """Return the digests of some records' contents, end to end."""
    return b"".join(content_digest(recipe.source[number].content) for number in numbers.tolist())


def finished_path(directory: Path, number: int) -> Path:
    return directory / f".{shard_name(number)}{FINISHED_SUFFIX}"


def finished_shard(directory: Path, number: int) -> FinishedShard | None:
    """What was noted of a shard when it was finished, if it is there."""
    shard = directory / shard_name(number)
    try:
        finished = FinishedShard.model_validate_json(finished_path(directory, number).read_text())
        is_there = shard.stat().st_size == finished.entry.num_bytes and index_path(shard).is_file()
    except (OSError, ValueError):
        return None
    return finished if is_there else None


_recipe_of_worker: Recipe  # set once in each worker process: a source may hold all pictures of a dataset
_lock_of_worker: IO[str]  # held until the process ends


def _start_worker(recipe: bytes, lock: Path | None) -> None:
    global _recipe_of_worker, _lock_of_worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the build ends its workers between two shards
    torch.set_num_threads(1)
    if lock is not None:
        _lock_of_worker = lock.open()
        with suppress(OSError):  # a file system without locks
            fcntl.flock(_lock_of_worker, fcntl.LOCK_SH)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    parent = multiprocessing.parent_process()
    assert parent is not None
    if not parent.is_alive():  # killed before this process had its lock: another build may be under way
        os._exit(1)
    _recipe_of_worker = pickle.loads(recipe)


def _end_with_parent() -> None:
    """A pool whose process is killed would otherwise wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _in_worker(work: Callable[[Recipe, U], T], task: U) -> T:
    return work(_recipe_of_worker, task)


def run_all(
    work: Callable[[Recipe, U], T], recipe: Recipe, tasks: Iterable[U], *, num_workers: int, lock: Path | None = None
) -> Generator[T, None, None]:
    """`work(recipe, task)` for every task, in order, by worker processes if there are several.

    Workers hold `lock`, a file, for as long as they live.
    """
    if num_workers == 1:
        yield from (work(recipe, task) for task in tasks)
        return
    # Forked from a server that has imported this module and has no threads: forking ourselves could copy a held lock.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    # Pickled once, and as bytes: multiprocessing would share the overlay's tensors through files in memory.
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(pickle.dumps(recipe), lock))
    under_way: deque[Future[T]] = deque()
    try:
        for task in tasks:
            under_way.append(pool.submit(_in_worker, work, task))
            if len(under_way) == _NUM_TASKS_AHEAD * num_workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process of the build was killed, most likely for want of memory; "
            "run the same command again with fewer --workers, it goes on from the finished shards"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def wait_for_orphans(lock: Path) -> None:
    """Workers of a build that was killed hold `lock` until they have noticed, and may be writing until then."""
    deadline = time.monotonic() + _SECONDS_FOR_ORPHANS
    with lock.open() as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"a worker of an earlier build is still writing {lock.parent}; end it or choose another --out"
                    ) from None
                time.sleep(0.02)
            except OSError:
                return  # a file system without locks
