"""Make the shards of a build in worker processes; one process makes a whole shard.

A worker writes the shard, its index, and last a file that lists what is in it.

Guarantees: no byte depends on which process made it. No worker of a killed build still writes when another build has
begun.

Shapes: B samples of a shard or of one call of the overlay, C channels, H height, W width, T points of a waveform.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.audio.waveform import crop_last, fit_length, to_float
from data_pipeline.core.errors import UserError
from data_pipeline.core.processes import end_with_parent, worker_context
from data_pipeline.core.sample import Record, Sample
from data_pipeline.core.schema import Schema
from data_pipeline.overlays import Overlay, baked_keys
from data_pipeline.sources import Source, labels_of
from data_pipeline.storage.manifest import LabelEntry, ShardEntry
from data_pipeline.storage.shards import EncodedSample, encode, index_path, shard_name, write_shard
from data_pipeline.storage.source_digests import content_digest
from data_pipeline.storage.totals import Sums, Totals

FINISHED_SUFFIX: Final = ".finished.json"  # of the file that lists what is in a finished shard
_NUM_SAMPLES_PER_DRAW = 100  # samples in one call of an overlay; 100 sounds take 20 MB
_NUM_TASKS_AHEAD = 2  # per worker, so that all are busy
_SECONDS_FOR_ORPHANS = 30.0  # limit for the workers of a killed build to end; usually they take milliseconds

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")


@dataclass(frozen=True)
class BuildInputs:
    """Everything that a worker needs to make any shard of a dataset; `overlay` is drawn into the shards.

    `labels` are those of the source and of the overlay, also of one that is drawn at each reading; without counts.
    """

    source: Source
    overlay: Overlay | None
    labels: Mapping[str, LabelEntry]
    split: str
    seed: int
    sample_rate: int | None
    num_points: int | None

    def no_totals(self) -> Totals:
        return Totals(
            {
                name: len(label.classes)
                for name, label in self.labels.items()
                if label.given_by == "source" or self.overlay is not None
            }
        )


@dataclass(frozen=True)
class ShardTask:
    """The samples of one shard: from `first_index`, with the records `records_B`.

    The first `num_new` of them are the first samples of their records in the dataset.
    """

    number: int
    first_index: int
    records_B: NDArray[np.int64]
    num_new: int


class FinishedShard(Schema):
    """The part of a manifest that one shard adds; `digests` holds the digests of its new records, in hexadecimal."""

    entry: ShardEntry
    sums: Sums
    digests: str


def make_shard(inputs: BuildInputs, task: ShardTask, *, directory: Path) -> int:
    """Write one shard, and then the file that lists its content. Return its number of samples."""
    totals = inputs.no_totals()
    digests: list[bytes] = []

    def encoded() -> Iterator[EncodedSample]:
        for sample, record in _samples(inputs, task):
            if len(digests) < task.num_new:
                digests.append(content_digest(record.content))
            totals.add(sample)
            yield encode(sample, sample_rate=inputs.sample_rate)

    entry = write_shard(encoded(), directory / shard_name(task.number))
    finished = FinishedShard(entry=entry, sums=totals.sums, digests=b"".join(digests).hex())
    path = finished_path(directory, task.number)
    being_written = path.with_name(f"{path.name}.partial")
    being_written.write_text(finished.model_dump_json(), encoding="utf-8")
    being_written.replace(path)
    return len(task.records_B)


def _samples(inputs: BuildInputs, task: ShardTask) -> Iterator[tuple[Sample, Record]]:
    """Yield the samples of a shard in order, each with its record."""
    num_at_once = 1 if inputs.overlay is None else _NUM_SAMPLES_PER_DRAW
    columns = labels_of(inputs.source)
    for start in range(0, len(task.records_B), num_at_once):
        numbers_B = task.records_B[start : start + num_at_once]
        records = [inputs.source[number] for number in numbers_B.tolist()]
        labels = {name: column.label_N[numbers_B] for name, column in columns.items()}
        first_index = task.first_index + start
        samples = (
            [Sample(first_index, records[0].content, None, _row(labels, 0))]
            if inputs.overlay is None
            else _overlaid(inputs.overlay, inputs, records, labels, first_index)
        )
        yield from zip(samples, records, strict=True)


def _row(labels: Mapping[str, NDArray[np.int64]], row: int) -> dict[str, int]:
    return {name: int(label_B[row]) for name, label_B in labels.items()}


def _overlaid(
    overlay: Overlay,
    inputs: BuildInputs,
    records: Sequence[Record],
    labels: Mapping[str, NDArray[np.int64]],
    first_index: int,
) -> list[Sample]:
    """Return consecutive samples, with the overlay drawn on all of them in one call."""
    given = {name: torch.from_numpy(label_B) for name, label_B in labels.items()}
    index_B = torch.arange(first_index, first_index + len(records))
    keys = baked_keys(index_B, seed=inputs.seed, split=inputs.split)
    contents = [record.content for record in records]
    if inputs.num_points is None:
        overlaid = overlay(torch.from_numpy(np.stack(contents)).permute(0, 3, 1, 2), keys, given)
        contents_B = overlaid.inputs.permute(0, 2, 3, 1).contiguous().numpy()
    else:
        last_B = crop_last(keys) if inputs.split == "train" else torch.zeros(len(records), dtype=torch.bool)
        clips = [torch.from_numpy(content) for content in contents]
        overlaid = overlay(to_float(fit_length(clips, inputs.num_points, last_B=last_B)), keys, given)
        contents_B = overlaid.inputs.numpy()
    masks_B = [None] * len(records) if overlaid.masks_BHW is None else overlaid.masks_BHW.numpy()
    labels = {**labels, **{name: label_B.numpy() for name, label_B in overlaid.labels.items()}}
    return [
        Sample(index, content, mask, _row(labels, row))
        for row, (index, content, mask) in enumerate(zip(index_B.tolist(), contents_B, masks_B, strict=True))
    ]


def content_digests(inputs: BuildInputs, numbers: NDArray[np.int64]) -> bytes:
    """Return the digests of the contents of some records, end to end."""
    return b"".join(content_digest(inputs.source[number].content) for number in numbers.tolist())


def finished_path(directory: Path, number: int) -> Path:
    return directory / f".{shard_name(number)}{FINISHED_SUFFIX}"


def finished_shard(directory: Path, number: int) -> FinishedShard | None:
    """Return the `FinishedShard` that was written for a shard; None if the shard is not whole."""
    shard = directory / shard_name(number)
    try:
        finished = FinishedShard.model_validate_json(finished_path(directory, number).read_text(encoding="utf-8"))
        is_there = shard.stat().st_size == finished.entry.num_bytes and index_path(shard).is_file()
    except (OSError, ValueError):
        return None
    return finished if is_there else None


_inputs_of_worker: Any  # set once in each worker process, because a source may hold all pictures of a dataset
_lock_of_worker: IO[str]  # held until the process ends


def _start_worker(inputs: bytes, lock: Path | None) -> None:
    global _inputs_of_worker, _lock_of_worker
    # Ctrl-C reaches all processes, but the build ends its workers itself, between two shards.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    if lock is not None:
        _lock_of_worker = lock.open(encoding="utf-8")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(_lock_of_worker, fcntl.LOCK_SH)
    end_with_parent()  # else it would wait for work forever when its build is killed
    parent = multiprocessing.parent_process()
    assert parent is not None
    if not parent.is_alive():  # killed before this process had its lock: another build may be running
        os._exit(1)
    _inputs_of_worker = pickle.loads(inputs)


def _in_worker(work: Callable[[Any, U], T], task: U) -> T:
    return work(_inputs_of_worker, task)


def run_all(
    work: Callable[[V, U], T],
    inputs: V,
    tasks: Iterable[U],
    *,
    num_workers: int,
    lock: Path | None = None,
) -> Generator[T, None, None]:
    """Yield `work(inputs, task)` for every task, in order; worker processes do it if `num_workers` is above 1.

    Workers hold a lock on the file `lock` until they end.
    """
    if num_workers == 1:
        yield from (work(inputs, task) for task in tasks)
        return
    context = worker_context(__name__)
    # Pickled here, to bytes: multiprocessing itself would share the overlay's tensors through files in memory.
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(pickle.dumps(inputs), lock))
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
            "a worker process was killed, most likely for lack of memory; run the same command again with fewer "
            "--workers; it continues from the finished shards"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def wait_for_orphans(lock: Path) -> None:
    """Wait until the workers of a killed build release `lock`; they may be writing until then."""
    deadline = time.monotonic() + _SECONDS_FOR_ORPHANS
    with lock.open(encoding="utf-8") as file:
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
