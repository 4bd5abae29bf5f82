"""`python -m data_pipeline bench DIR`: samples a second out of a dataset, as stored bytes and decoded, by workers."""

from __future__ import annotations

import argparse
import os
import time
from itertools import cycle, islice
from pathlib import Path

from data_pipeline.errors import UserError
from data_pipeline.shards import SampleStore
from data_pipeline.stream import Stream, epoch_order


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="a built dataset")
    parser.add_argument("--batch-size", type=int, default=256, metavar="B", help="samples a batch")
    parser.add_argument(
        "--max-workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="M",
        help="measure 0, 1, 2, 4, ... up to M workers",
    )
    parser.add_argument("--seconds", type=float, default=2.0, metavar="T", help="how long each measurement lasts")


def run(args: argparse.Namespace) -> None:
    """Print a table of rates. The first pass over a dataset may be bound by the disk: run it twice."""
    if args.batch_size < 1 or args.max_workers < 0 or args.seconds <= 0:
        raise UserError("--batch-size and --seconds must be above 0 and --max-workers at least 0")
    print(f"{'read':<16}{'workers':>8}{'samples/s':>12}", flush=True)
    rate = raw_rate(args.directory, seconds=args.seconds)
    print(f"{'stored bytes':<16}{0:>8}{rate:>12,.0f}", flush=True)
    for num_workers in worker_counts(args.max_workers):
        rate = decoded_rate(
            args.directory, num_workers=num_workers, global_batch_size=args.batch_size, seconds=args.seconds
        )
        print(f"{'decoded batches':<16}{num_workers:>8}{rate:>12,.0f}", flush=True)


def worker_counts(largest: int) -> list[int]:
    """0, then the powers of two up to `largest`, then `largest` itself.

    Examples:
        >>> worker_counts(6)
        [0, 1, 2, 4, 6]
    """
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    return sorted({0, *powers, largest})


def raw_rate(directory: Path, *, seconds: float) -> float:
    """Samples a second as stored bytes, in shuffled order, in this process."""
    store = SampleStore(directory)
    if not len(store):
        raise UserError(f"{directory} holds no samples; build it again")
    indices = cycle(epoch_order(len(store), seed=0, epoch=0).tolist())
    num_read = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for index in islice(indices, 1000):
            store.encoded(index)
        num_read += 1000
    return num_read / elapsed


def decoded_rate(directory: Path, *, num_workers: int, global_batch_size: int, seconds: float) -> float:
    """Samples a second as decoded batches, out of the stream, once its workers have started."""
    stream = Stream(
        directory,
        global_batch_size=global_batch_size,
        seed=0,
        rank=0,
        world_size=1,
        num_workers=num_workers,
        end_step=1 << 40,
    )
    batches = iter(stream)
    for _ in islice(batches, 2 * num_workers + 1):  # what the workers prepare while they start is not counted
        pass
    num_read = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        num_read += len(next(batches))
    return num_read / elapsed
