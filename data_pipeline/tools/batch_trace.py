"""Print the samples that every rank would see at every step: `python -m data_pipeline trace DIR`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import sample_key
from data_pipeline.loading.order import BatchOrder, check_batch_size, num_steps_per_epoch
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.storage.store import SampleStore


def run(args: argparse.Namespace) -> None:
    """Print one line for each batch. Steps count from the start of training, as in metrics and checkpoints."""
    try:
        for line in trace(
            args.location,
            num_ranks=args.ranks,
            num_workers=args.workers,
            global_batch_size=args.batch_size,
            epoch=args.epoch,
            seed=args.seed,
            from_step=args.from_step,
            shuffle_shards=args.shuffle_shards,
            order_only=args.order_only,
        ):
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has ended, as in `trace ... | head`
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def trace(
    location: str | Path,
    *,
    num_ranks: int,
    num_workers: int,
    global_batch_size: int,
    epoch: int = 0,
    seed: int = 0,
    from_step: int = 0,
    shuffle_shards: int | None = None,
    order_only: bool = False,
) -> Iterator[str]:
    """Yield lines `step<TAB>rank<TAB>key key ...` of one epoch from `from_step` on, by step and then by rank.

    The samples are read, because training replaces those that cannot be read. With `order_only`, nothing is read, and
    only samples that are not whole in a local shard are replaced.

    Raises `UserError` like `Stream`, and if a number is out of range.
    """
    for option, value, least in (
        ("--ranks", num_ranks, 1),
        ("--workers", num_workers, 0),
        ("--epoch", epoch, 0),
        ("--seed", seed, 0),
        ("--from-step", from_step, 0),
        ("--shuffle-shards", 1 if shuffle_shards is None else shuffle_shards, 1),
    ):
        if value < least:
            raise UserError(f"{option} must be at least {least}, got {value}")

    store = SampleStore(location)
    read = ReadConfig(num_workers=num_workers, placement="stream", shuffle_shards=shuffle_shards)

    def stream(rank: int, *, start_step: int, end_step: int) -> Stream:
        return Stream(
            store,
            read=read,
            global_batch_size=global_batch_size,
            seed=seed,
            rank=rank,
            world_size=num_ranks,
            start_step=start_step,
            end_step=end_step,
        )

    if order_only:
        check_batch_size(len(store), global_batch_size=global_batch_size, world_size=num_ranks)
        num_steps = num_steps_per_epoch(len(store), global_batch_size)
    else:
        num_steps = stream(0, start_step=0, end_step=0).num_steps_per_epoch
    if from_step >= num_steps:
        raise UserError(f"--from-step {from_step} is past the epoch's {num_steps} steps; use 0 to {num_steps - 1}")
    start, end = epoch * num_steps + from_step, (epoch + 1) * num_steps
    if order_only:
        bad = {sample.index: sample for sample in store.known_bad}
        ends = store.shard_ends
        order = BatchOrder(
            len(store),
            seed,
            global_batch_size,
            shard_ends=ends,
            shuffle_shards=shuffle_shards,
            version=read.order_version,
        )
        for step in range(start, end):
            _, indices, _ = order.at(step, bad=bad)
            for rank, of_rank in enumerate(np.split(indices, num_ranks)):
                yield f"{step}\t{rank}\t{' '.join(map(sample_key, of_rank.tolist()))}"
        return
    streams = [stream(rank, start_step=start, end_step=end) for rank in range(num_ranks)]
    for batches in zip(*streams, strict=True):
        for rank, batch in enumerate(batches):
            yield f"{batch.step}\t{rank}\t{' '.join(batch.keys)}"
