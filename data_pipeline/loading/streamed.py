"""Read batches from disk as they are needed, in worker processes that decode whole batches in turn.

Shapes: B batch.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data_pipeline.core.batch import Batch
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BadSample
from data_pipeline.core.system import SHARED, signals_blocked
from data_pipeline.loading.decode import decode
from data_pipeline.loading.mixture import ReadingOrder
from data_pipeline.loading.sources import StreamSource


def streamed_batches(
    sources: Sequence[StreamSource],
    order: ReadingOrder,
    steps: range,
    *,
    num_workers: int,
    rank: int,
    world_size: int,
    pin_memory: bool,
) -> Iterator[list[Batch | None]]:
    """Yield the batches of some steps, one from each source, without the online overlay.

    Raises `UserError` if a sample and all its replacements are bad, and `RuntimeError` if a worker was killed.
    """
    prefetchers = [
        _ShardPrefetcher(source, order, rank=rank, world_size=world_size)
        for source in sources
        if source.store.is_remote
    ]
    loader: DataLoader[list[Batch | None] | UserError] = DataLoader(
        _StreamedBatches(sources, order, prefetchers),
        batch_size=None,  # the dataset makes whole batches, and its keys are steps
        sampler=steps,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=_leave_signals_to_parent,
        generator=torch.Generator(),  # without its own, a DataLoader draws from the caller's random state
        # Forked, a worker has the opened indexes at once. Python 3.14 would start new processes, which import torch.
        multiprocessing_context="fork" if num_workers else None,
    )
    # W&B starts threads in every process that is forked, before `worker_init_fn`. They inherit this.
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


class _ShardPrefetcher:
    """A prefetcher of a remote dataset's shards, for the window being read and the next one."""

    def __init__(self, source: StreamSource, order: ReadingOrder, *, rank: int, world_size: int) -> None:
        self._store, self._number, self._order = source.store, source.number, order
        self._epochs, self._rank, self._world_size = order.epochs_of(source.number), rank, world_size
        self._epoch, self._window = 0, -1
        self._windows, self._windows_after = self._epochs.windows(0), self._epochs.windows(1)

    def before(self, step: int) -> None:
        """Request shards if a window begins at `step`. Call this before each step."""
        epoch, position = self._order.position_at(self._number, step)
        if epoch != self._epoch:
            self._epoch, self._window = epoch, -1
            self._windows, self._windows_after = self._epochs.windows(epoch), self._epochs.windows(epoch + 1)
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
        sources: Sequence[StreamSource],
        order: ReadingOrder,
        prefetchers: Sequence[_ShardPrefetcher],
    ) -> None:
        self._sources, self._order, self._prefetchers = sources, order, prefetchers
        # Grows in each process when it finds bad samples. No batch depends on the bad samples found before.
        self._bad: list[dict[int, BadSample]] = [{} for _ in sources]

    def __getitem__(self, step: int) -> list[Batch | None] | UserError:
        try:
            for prefetcher in self._prefetchers:
                prefetcher.before(step)
            batches = [self._read(source, bad, step) for source, bad in zip(self._sources, self._bad, strict=True)]
            return batches if torch.utils.data.get_worker_info() is None else _Pickled(batches)
        except UserError as error:
            # Returned and not raised, because a DataLoader turns a worker's exception into a page of traceback.
            return error

    def _read(self, source: StreamSource, bad: dict[int, BadSample], step: int) -> Batch | None:
        """Read the rows of one source. Adds the bad samples that it finds to `bad`."""
        while True:
            began = time.perf_counter()
            rows = self._order.rows(source.number, step, bad=bad)
            if not len(rows.indices_R):
                return None
            crops = source.maker.crop_draws(rows.key_index_R, epoch=rows.key_epoch)
            samples = decode(source.store, rows.indices_R, crops=crops)
            if not samples.bad:
                clean = source.collate(samples, rows, step=step, index_B=torch.from_numpy(rows.key_index_R))
                seconds = time.perf_counter() - began
                return replace(clean, seconds={"read": samples.read_seconds, "decode": seconds - samples.read_seconds})
            bad |= {sample.index: sample for sample in samples.bad.values()}


class _Pickled(list[Batch | None]):
    """Batches that a worker has pickled itself, with their tensors in shared memory; unpickled, they are a list again.

    Else torch would pickle them in the thread that sends them. An error of that thread never reaches the training
    process, which would wait for the batch. Raises `UserError` if they cannot be handed over.
    """

    def __init__(self, batches: list[Batch | None]) -> None:
        super().__init__()
        try:
            self._pickled = bytes(ForkingPickler.dumps(batches))
        except (RuntimeError, OSError) as error:  # the reason is not to be relied on: it may be "Success (0)"
            raise UserError(
                f"a data worker could not hand over a batch ({error}): it needs room in {SHARED} (in a container for "
                "example by `docker run --shm-size=8g`), open files (`ulimit -n`) and a TMPDIR of at most 70 "
                "characters; or use data.num_workers=0"
            ) from error

    def __reduce__(self) -> tuple[Callable[[bytes], object], tuple[bytes]]:
        return pickle.loads, (self._pickled,)


def _leave_signals_to_parent(worker_id: int) -> None:
    """Ignore SIGTERM and SIGINT, which warn the training process, except a SIGTERM from it, which ends the worker.

    The training process sends it when it ends, if it still holds an iterator of batches then. The threads that the
    worker starts later ignore both signals too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a handler would not learn who sent it
    threading.Thread(target=_wait_for_sigterm_of_parent, daemon=True).start()


def _wait_for_sigterm_of_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
