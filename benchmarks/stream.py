"""Our stream against a plain WebDataset pipeline on the same shards, in one run.

    python benchmarks/stream.py DIR [--batch-size B] [--workers M] [--seconds T] [--rounds R]

DIR is a dataset that `python -m data_pipeline build` made. Everyone delivers shuffled samples: as stored bytes, or as
batches of decoded pictures, masks and labels. The peers take turns, round by round, so that a machine that slows down
does so for all; printed are medians, and ratios to the plain pipeline. The shuffles are not equal: WebDataset's is of
the shards, then within a buffer of 1,000 samples; ours is over the whole dataset, and can start at any step.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image
from torch.utils.data import default_collate
from torchvision.io import ImageReadMode, decode_png

from data_pipeline.errors import run_command
from data_pipeline.shards import SampleStore
from data_pipeline.stream import Stream, epoch_order

SHUFFLE_BUFFER = 1000

Counts = Iterator[int]  # numbers of samples, as they are delivered


def our_bytes(directory: Path) -> Counts:
    store = SampleStore(directory)
    for index in cycle(epoch_order(len(store), seed=0, epoch=0).tolist()):
        store.encoded(index)
        yield 1


def our_batches(directory: Path, *, batch_size: int, num_workers: int) -> Counts:
    stream = Stream(
        directory,
        global_batch_size=batch_size,
        seed=0,
        rank=0,
        world_size=1,
        num_workers=num_workers,
        end_step=1 << 40,
    )
    return map(len, stream)


def their_bytes(directory: Path) -> Counts:
    return (1 for _ in their_samples(directory))


def their_batches(
    directory: Path, *, batch_size: int, num_workers: int, decoders: Sequence[Callable[[str, bytes], Any] | str]
) -> Counts:
    dataset = their_samples(directory).decode(*decoders).to_tuple("png", "mask.png", "json")
    batches = dataset.batched(batch_size, collation_fn=default_collate)
    loader = webdataset.WebLoader(batches, batch_size=None, num_workers=num_workers)
    return (len(images) for images, _, _ in loader)


def their_samples(directory: Path) -> Any:
    """WebDataset's pipeline up to stored bytes: shards shuffled, then samples within a buffer, without end."""
    urls = [str(path) for path in sorted(directory.glob("*.tar"))]
    dataset = webdataset.WebDataset(urls, shardshuffle=len(urls), repeat=True, empty_check=False)
    return dataset.shuffle(SHUFFLE_BUFFER)


def pil_grey(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(data))))


def torchvision_grey(data: bytes) -> torch.Tensor:
    pixels: torch.Tensor = decode_png(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.GRAY)
    return pixels


def torchvision_rgb(data: bytes) -> torch.Tensor:
    pixels: torch.Tensor = decode_png(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    return pixels


WITH_PIL = (webdataset.handle_extension("mask.png", pil_grey), "torchrgb8")
WITH_TORCHVISION = (
    webdataset.handle_extension("mask.png", torchvision_grey),
    webdataset.handle_extension("png", torchvision_rgb),
)


def rate(counts: Counts, *, seconds: float) -> float:
    """Samples a second, after the first half second, in which buffers fill and workers start."""
    begin = time.perf_counter()
    start, delivered = begin, 0
    for count in counts:
        now = time.perf_counter()
        if now < begin + 0.5:
            start, delivered = now, 0
        else:
            delivered += count
        if delivered and now > start + seconds:
            break
    return delivered / (now - start)


def main() -> None:
    parser = argparse.ArgumentParser(description="our stream against plain WebDataset on the same shards")
    parser.add_argument("directory", type=Path, metavar="DIR", help="a built dataset")
    parser.add_argument("--batch-size", type=int, default=256, metavar="B")
    parser.add_argument("--workers", type=int, default=0, metavar="M", help="reader processes; 0 reads in this process")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="T", help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="measurements of each")
    args = parser.parse_args()
    loading = {"batch_size": args.batch_size, "num_workers": args.workers}
    groups: dict[str, dict[str, Callable[[], Counts]]] = {
        "stored bytes (in this process)": {
            "webdataset": lambda: their_bytes(args.directory),
            "ours": lambda: our_bytes(args.directory),
        },
        f"decoded batches of {args.batch_size}, {args.workers} workers": {
            "webdataset, PIL": lambda: their_batches(args.directory, decoders=WITH_PIL, **loading),
            "webdataset, torchvision": lambda: their_batches(args.directory, decoders=WITH_TORCHVISION, **loading),
            "ours": lambda: our_batches(args.directory, **loading),
        },
    }
    for title, peers in groups.items():
        rounds = [
            {name: rate(peer(), seconds=args.seconds) for name, peer in peers.items()} for _ in range(args.rounds)
        ]
        print(f"{title:<40}{'samples/s':>12}{'ratio':>8}")
        first = next(iter(peers))
        for name in peers:
            median = statistics.median(measured[name] for measured in rounds)
            ratio = statistics.median(measured[name] / measured[first] for measured in rounds)
            print(f"  {name:<38}{median:>12,.0f}{ratio:>8.2f}")


if __name__ == "__main__":
    run_command(main)
