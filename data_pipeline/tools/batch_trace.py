"""Print the samples that every rank would see at every step: `python -m data_pipeline trace DIR`.

Several directories are a mixture. Its keys count the samples of all sources, one source after another. The samples are
read, because training replaces those that cannot be read.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from data_pipeline.core.errors import UserError
from data_pipeline.loading.mixture import Mixture
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.storage.store import SampleStore


def run(args: argparse.Namespace) -> None:
    """Print a line `step<TAB>rank<TAB>key key ...` for each batch of one epoch, by step and then by rank.

    Steps count from the start of training, as in metrics and checkpoints. Raises `UserError` like `Stream`, and if the
    epoch has no such step.
    """
    opened = _opened(args.locations, args.weights)
    streams = [
        Stream(
            opened,
            read=ReadConfig(num_workers=args.workers, placement="stream", shuffle_shards=args.shuffle_shards),
            global_batch_size=args.batch_size,
            seed=args.seed,
            rank=rank,
            world_size=args.ranks,
        )
        for rank in range(args.ranks)
    ]
    num_steps = streams[0].num_steps_per_epoch
    if args.from_step >= num_steps:
        raise UserError(f"--from-step {args.from_step} is past the epoch's {num_steps} steps; use 0 to {num_steps - 1}")
    steps = range(args.epoch * num_steps + args.from_step, (args.epoch + 1) * num_steps)
    for batches in zip(*(stream.batches(steps) for stream in streams), strict=True):
        for rank, batch in enumerate(batches):
            print(f"{batch.step}\t{rank}\t{' '.join(batch.keys)}")


def _opened(locations: Sequence[str], weights: Sequence[float] | None) -> SampleStore | Mixture:
    """Open a dataset, or several as a mixture.

    Raises `UserError` if there is not a positive weight for each, or as `Mixture` does.
    """
    if len(locations) == 1:
        return SampleStore(locations[0])
    if len(set(locations)) < len(locations):
        raise UserError(f"a mixture has each dataset once; name different ones, not {' '.join(locations)}")
    weights = [1.0] * len(locations) if weights is None else weights
    if len(weights) != len(locations) or not all(0 < weight < math.inf for weight in weights):
        raise UserError(f"--weights must be {len(locations)} positive numbers, one for each DIR, got {weights}")
    return Mixture({location: SampleStore(location) for location in locations}, tuple(weights))
