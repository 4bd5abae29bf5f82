"""Read batches from disk as they are needed, in worker processes that decode whole batches in turn."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data_pipeline.core.batch import Batch
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BadSample
from data_pipeline.core.system import SHARED, signals_blocked
from data_pipeline.loading.collate import BatchMaker
from data_pipeline.loading.decode import decode
from data_pipeline.loading.order import BatchOrder
from data_pipeline.storage.store import SampleStore


def streamed_batches(
    store: SampleStore, maker: BatchMaker, order: BatchOrder, steps: range, *, num_workers: int, pin_memory: bool
) -> Iterator[Batch]:
    """Yield the batches of some steps without the online overlay.

    Raises `UserError` if a sample and all its replacements are bad, and `RuntimeError` if a worker was killed.
    """
    loader: DataLoader[Batch | UserError] = DataLoader(
        _StreamedBatches(store, maker, order),
        batch_size=None,  # the dataset makes whole batches, and its keys are steps
        sampler=steps,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=_leave_signals_to_parent,
        generator=torch.Generator(),  # without its own, a DataLoader draws from the caller's random state
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

    def __init__(self, store: SampleStore, order: BatchOrder) -> None:
        self._store, self._order = store, order
        self._epoch, self._window = 0, -1
        self._windows, self._windows_after = order.epochs.windows(0), order.epochs.windows(1)

    def before(self, step: int) -> None:
        """Request shards if a window begins at `step`. Call this before each step."""
        epoch, position = self._order.position_at(step)
        if epoch != self._epoch:
            self._epoch, self._window = epoch, -1
            epochs = self._order.epochs
            self._windows, self._windows_after = epochs.windows(epoch), epochs.windows(epoch + 1)
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
        shift = (self._order.rank * num_workers + worker_id) * len(now) // (self._order.world_size * num_workers)
        self._store.prefetch(np.concatenate([np.roll(now, -shift), following]))


class _StreamedBatches(Dataset[Batch | UserError]):
    """The clean batches of one rank, by step. Worker processes share the index of the opened store."""

    def __init__(self, store: SampleStore, maker: BatchMaker, order: BatchOrder) -> None:
        self._store, self._maker, self._order = store, maker, order
        self._prefetcher = _ShardPrefetcher(store, order) if store.is_remote else None
        # Grows in each process when it finds bad samples. No batch depends on the bad samples found before.
        self._bad: dict[int, BadSample] = {}

    def __getitem__(self, step: int) -> Batch | UserError:
        try:
            if self._prefetcher is not None:
                self._prefetcher.before(step)
            batch = self._read(step)
            if torch.utils.data.get_worker_info() is not None:
                _move_to_shared_memory(batch)
            return batch
        except UserError as error:
            # Returned and not raised, because a DataLoader turns a worker's exception into a page of traceback.
            return error

    def _read(self, step: int) -> Batch:
        while True:
            began = time.perf_counter()
            rows = self._order.rows(step, bad=self._bad)
            crops = self._maker.crop_draws(rows.indices_R, epoch=rows.epoch)
            samples = decode(self._store, rows.indices_R, crops=crops)
            if not samples.bad:
                clean = self._maker.collate(samples, step=step, epoch=rows.epoch, bad=rows.bad)
                seconds = time.perf_counter() - began
                return replace(clean, seconds={"read": samples.read_seconds, "decode": seconds - samples.read_seconds})
            self._bad |= {sample.index: sample for sample in samples.bad.values()}


def _move_to_shared_memory(batch: Batch) -> None:
    """Move the tensors of a worker to shared memory, which torch would do in the thread that sends them.

    An error of that thread never reaches the training process, which would wait for the batch. Raises `UserError` if
    there is no room.
    """
    try:
        for tensor in batch.tensors():
            tensor.share_memory_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # its reason is not to be relied on: it may be "Success (0)"
        raise UserError(
            f"a data worker could not put a batch into shared memory; see `df {SHARED}`: give it more room, in a "
            "container for example by `docker run --shm-size=8g`, or use data.num_workers=0"
        ) from error


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
