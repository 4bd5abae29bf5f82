"""Print the samples that every rank would see at every step: `python -m data_pipeline trace DIR`.

Several directories are a mixture. Its keys count the samples of all sources, one source after another.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_pipeline.core.errors import UserError
from data_pipeline.loading.mixture import Mixture, MixtureSource, reading_order
from data_pipeline.loading.order import check_ranks
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.storage.store import SampleStore


def run(args: argparse.Namespace) -> None:
    """Print one line for each batch. Steps count from the start of training, as in metrics and checkpoints."""
    for line in trace(
        _opened(args.locations, args.weights),
        num_ranks=args.ranks,
        num_workers=args.workers,
        global_batch_size=args.batch_size,
        epoch=args.epoch,
        seed=args.seed,
        from_step=args.from_step,
        shuffle_shards=args.shuffle_shards,
    ):
        print(line)


def _opened(locations: Sequence[str], weights: Sequence[float] | None) -> SampleStore | Mixture:
    """Open a dataset, or several as a mixture.

    Raises `UserError` if there is not a positive weight for each, or as `Mixture` does.
    """
    if len(locations) == 1:
        return SampleStore(locations[0])
    weights = [1.0] * len(locations) if weights is None else weights
    if len(weights) != len(locations) or not all(0 < weight < math.inf for weight in weights):
        raise UserError(f"--weights must be {len(locations)} positive numbers, one for each DIR, got {weights}")
    sources = tuple(MixtureSource(location, SampleStore(location)) for location in locations)
    return Mixture(sources, tuple(weights))


def trace(
    dataset: str | Path | SampleStore | Mixture,
    *,
    num_ranks: int,
    num_workers: int,
    global_batch_size: int,
    epoch: int = 0,
    seed: int = 0,
    from_step: int = 0,
    shuffle_shards: int | None = None,
) -> Iterator[str]:
    """Yield lines `step<TAB>rank<TAB>key key ...` of one epoch from `from_step` on, by step and then by rank.

    The samples are read, because training replaces those that cannot be read.

    Raises `UserError` like `Stream`, and if the epoch has no step `from_step`.
    """
    opened = SampleStore(dataset) if isinstance(dataset, str | Path) else dataset
    read = ReadConfig(num_workers=num_workers, placement="stream", shuffle_shards=shuffle_shards)

    check_ranks(global_batch_size, world_size=num_ranks)
    order = reading_order(
        opened, shuffle_shards=shuffle_shards, seed=seed, global_batch_size=global_batch_size, rank=0, world_size=1
    )
    num_steps = order.num_steps_per_epoch
    if from_step >= num_steps:
        raise UserError(f"--from-step {from_step} is past the epoch's {num_steps} steps; use 0 to {num_steps - 1}")
    start, end = epoch * num_steps + from_step, (epoch + 1) * num_steps
    streams = [
        Stream(
            opened,
            read=read,
            global_batch_size=global_batch_size,
            seed=seed,
            rank=rank,
            world_size=num_ranks,
            start_step=start,
            end_step=end,
        )
        for rank in range(num_ranks)
    ]
    for batches in zip(*streams, strict=True):
        for rank, batch in enumerate(batches):
            yield f"{batch.step}\t{rank}\t{' '.join(batch.keys)}"
