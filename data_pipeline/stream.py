"""Shards to batches: what every rank sees at every step, as a pure function of (seed, step).

Comes in: a dataset directory and a place in the world (rank of W, with M worker processes). Goes out: a `Batch` a step.
The order of an epoch is one seeded permutation of all N samples, cut into N // G global batches of G; rank r of W takes
the r-th W-th part of each; workers decode whole batches in turn. So shards are never dealt out to readers, the state of
a stream is the step alone, and what may never happen cannot: that the global batch depends on the number of ranks,
workers or shards, that a sample comes twice in an epoch, or that a resumed run reads what it skips.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from data_pipeline.errors import UserError
from data_pipeline.manifest import Manifest
from data_pipeline.randomness import generator
from data_pipeline.sample import Batch
from data_pipeline.shards import SampleStore

logger = logging.getLogger(__name__)


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


@lru_cache(maxsize=2)  # the epoch being read and the one after it
def epoch_order(num_samples: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of one epoch: a permutation of all samples, (num_samples,) int64, not to be written to."""
    order = generator(seed, "epoch order", epoch).permutation(num_samples).astype(np.int64, copy=False)
    order.flags.writeable = False
    return order


def batch_indices(
    num_samples: int, *, seed: int, step: int, global_batch_size: int, rank: int = 0, world_size: int = 1
) -> tuple[int, NDArray[np.int64]]:
    """The epoch of a step, and the samples that a rank sees there: (global_batch_size / world_size,) int64 indices.

    `step` counts from the start of training. The parts of all ranks, in the order of the ranks, are the global batch,
    which does not depend on their number. With the defaults it is given whole.
    """
    epoch, step_in_epoch = divmod(step, num_steps_per_epoch(num_samples, global_batch_size))
    local_batch_size = global_batch_size // world_size
    start = step_in_epoch * global_batch_size + rank * local_batch_size
    return epoch, epoch_order(num_samples, seed=seed, epoch=epoch)[start : start + local_batch_size]


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


@dataclass(frozen=True)
class _RankBatches(Dataset[Batch | UserError]):
    """One rank's batches by step. Holds the store as it was opened, so that worker processes share its index."""

    store: SampleStore
    seed: int
    global_batch_size: int
    rank: int
    world_size: int

    def __getitem__(self, step: int) -> Batch | UserError:
        epoch, indices = batch_indices(
            len(self.store),
            seed=self.seed,
            step=step,
            global_batch_size=self.global_batch_size,
            rank=self.rank,
            world_size=self.world_size,
        )
        try:
            return self.store.batch(indices, step=step, epoch=epoch)
        except UserError as error:
            # Returned, not raised: a DataLoader turns a worker's exception into a page of traceback.
            return error


class Stream:
    """One rank's batches for the steps `start_step` to `end_step - 1`; to resume at step k is to start at step k.

    Each rank gets global_batch_size / world_size samples a step. `num_workers` processes decode ahead (0: none, the
    caller decodes), and the caller's random state is not touched. Iterating twice gives the same batches twice.

    Raises `UserError` before the first step where the dataset is not whole or the batch size does not fit it and the
    ranks; while iterating, `UserError` where a sample does not decode, `RuntimeError` where a worker was killed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        global_batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        num_workers: int,
        end_step: int,
        start_step: int = 0,
        pin_memory: bool = False,
    ) -> None:
        assert 0 <= rank < world_size
        assert 0 <= start_step <= end_step
        store = SampleStore(directory)
        check_batch_size(len(store), global_batch_size=global_batch_size, world_size=world_size)
        self._batches = _RankBatches(store, seed, global_batch_size, rank, world_size)
        self._steps = range(start_step, end_step)
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        if rank == 0:
            logger.info(
                "%s: %d samples, %d steps an epoch; %d samples do not fill a global batch of %d and are dropped",
                directory,
                len(store),
                self.num_steps_per_epoch,
                self.num_dropped_per_epoch,
                global_batch_size,
            )

    @property
    def manifest(self) -> Manifest:
        return self._batches.store.manifest

    @property
    def num_steps_per_epoch(self) -> int:
        return num_steps_per_epoch(len(self._batches.store), self._batches.global_batch_size)

    @property
    def num_dropped_per_epoch(self) -> int:
        """Samples that no rank sees in an epoch because they do not fill a global batch; others in every epoch."""
        return len(self._batches.store) % self._batches.global_batch_size

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        loader: DataLoader[Batch | UserError] = DataLoader(
            self._batches,
            batch_size=None,  # the dataset makes whole batches, and its keys are steps
            sampler=self._steps,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
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


def read_all(directory: Path, *, batch_size: int) -> Iterator[Batch]:
    """Every sample once, in stored order, in this process; for evaluation. The last batch may be smaller.

    Raises `UserError` where the dataset is not whole or a sample does not decode.
    """
    store = SampleStore(directory)
    for step, start in enumerate(range(0, len(store), batch_size)):
        indices = np.arange(start, min(start + batch_size, len(store)), dtype=np.int64)
        yield store.batch(indices, step=step, epoch=0)
