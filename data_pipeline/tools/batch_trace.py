"""Print the samples that every rank would see at every step: `python -m data_pipeline trace DIR`.

The samples are read, because training replaces those that cannot be read.
"""

from __future__ import annotations

import argparse

from data_pipeline.core.errors import UserError
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.storage.store import SampleStore


def run(args: argparse.Namespace) -> None:
    """Print a line `step<TAB>rank<TAB>key key ...` for each batch of one epoch, by step and then by rank.

    Steps count from the start of training, as in metrics and checkpoints. Raises `UserError` like `Stream`, and if the
    epoch has no such step.
    """
    opened = SampleStore(args.location)
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
