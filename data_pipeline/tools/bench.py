"""Measure how many samples a second can be read from a dataset: `python -m data_pipeline bench DIR`.

The rows of the table measure, for shuffled samples: reading the stored bytes; reading and decoding; streaming batches,
with the online overlay if there is one, with 0, 1, 2, ... workers; batches of data in memory; and the overlay alone.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

import numpy as np
import torch

from data_pipeline.core.devices import named_device
from data_pipeline.core.errors import UserError
from data_pipeline.loading.decode import decode
from data_pipeline.loading.order import BatchOrder, check_batch_size, epoch_order
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.overlays import NOTHING_GIVEN, Overlay, evaluation_keys
from data_pipeline.storage.store import SampleStore

WARM_UP_SECONDS = 0.3  # not counted: files are mapped and kernels are chosen
_RESIDENT: Final = "batches, resident"
_ORDER_CHUNK: Final = 4_096  # positions whose samples are looked up at once, as in a large batch


@dataclass(frozen=True)
class Row:
    """One line of the table; `counts` starts an endless reader that yields the number of samples after each step."""

    what: str
    num_workers: int | None
    counts: Callable[[], Iterator[int]]


def rows(
    store: SampleStore,
    *,
    batch_size: int,
    max_workers: int,
    device: torch.device,
    shuffle_shards: int | None = None,
) -> Iterator[Row]:
    """Yield the measurements of a dataset, in the order of the table."""
    manifest = store.manifest

    def stream(placement: str, num_workers: int) -> Iterator[int]:
        settings = {"num_workers": num_workers, "placement": placement, "shuffle_shards": shuffle_shards}
        read = ReadConfig.parse(settings, where="bench")
        return stream_counts(store, read=read, global_batch_size=batch_size, device=device)

    yield Row("stored bytes", 0, partial(encoded_counts, store))
    yield Row("decoded samples", 0, partial(decoded_counts, store, batch_size=batch_size))
    for num_workers in worker_counts(max_workers):
        yield Row("batches, streamed", num_workers, partial(stream, "stream", num_workers))
    yield Row(_RESIDENT, None, partial(stream, "device" if device.type == "cuda" else "host", 0))
    inputs = torch.zeros(
        (batch_size, *manifest.input_shape),
        dtype=torch.float32 if manifest.medium == "sound" else torch.uint8,
        device=device,
    )
    if (overlay := store.overlay) is not None:
        of_source = [name for name, label in manifest.labels.items() if label.given_by == "source"]
        labels = {name: torch.zeros(batch_size, dtype=torch.int64, device=device) for name in of_source}
        yield Row("overlay alone", None, partial(overlay_counts, overlay.to(device), inputs, labels))


def encoded_counts(store: SampleStore) -> Iterator[int]:
    """Read the stored bytes of samples in shuffled order, epoch after epoch."""
    epoch = 0
    while True:
        order = epoch_order(len(store), seed=0, epoch=epoch)
        for start in range(0, len(store), _ORDER_CHUNK):
            indices = order(np.arange(start, min(start + _ORDER_CHUNK, len(store))))
            for first in range(0, len(indices), 100):
                store.read(indices[first : first + 100])
                yield len(indices[first : first + 100])
        epoch += 1


def decoded_counts(store: SampleStore, *, batch_size: int) -> Iterator[int]:
    """Read and decode samples in shuffled order, `batch_size` at a time."""
    order = BatchOrder(len(store), 0, batch_size)
    for step in itertools.count():
        decode(store, order.rows(0, step, bad={}).indices_R)
        yield batch_size


def stream_counts(
    dataset: str | SampleStore,
    *,
    read: ReadConfig,
    global_batch_size: int,
    device: torch.device,
) -> Iterator[int]:
    """Read finished batches from an endless stream; do not count the batches that workers prepare while they start."""
    stream = Stream(
        dataset,
        read=read,
        global_batch_size=global_batch_size,
        seed=0,
        rank=0,
        world_size=1,
        end_step=1 << 40,
        device=device,
    )
    batches = iter(stream)
    for _ in islice(batches, 2 * read.num_workers + 1):
        pass
    for batch in batches:
        _wait(device)
        yield len(batch)


def overlay_counts(
    overlay: Overlay, inputs: torch.Tensor, labels: Mapping[str, torch.Tensor] = NOTHING_GIVEN
) -> Iterator[int]:
    """Apply the overlay to one batch of inputs with these labels again and again, each time with another draw."""
    index_B = torch.arange(len(inputs), device=inputs.device)
    draw = 0
    while True:
        overlay(inputs, evaluation_keys(index_B, draw=draw), labels)
        _wait(inputs.device)
        yield len(inputs)
        draw += 1


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rate(counts: Iterator[int], *, seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the samples a second over `seconds`, and over at least one count, after a short warm-up."""
    begin = start = clock()
    num_samples = 0
    for count in counts:
        assert count > 0
        now = clock()
        if now < begin + WARM_UP_SECONDS or not start > begin:
            start = now  # the first count always belongs to the warm-up, because it includes the opening
            continue
        num_samples += count
        if now >= start + seconds:
            break
    return num_samples / (now - start)


def worker_counts(largest: int) -> list[int]:
    """Return 0, then the powers of two up to `largest`, then `largest` itself.

    Examples:
        >>> worker_counts(6)
        [0, 1, 2, 4, 6]
    """
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    return sorted({0, *powers, largest})


def run(args: argparse.Namespace) -> None:
    """Print a table of rates. The disk may limit the first pass over a dataset, so run it twice."""
    device, store = named_device(args.device), SampleStore(args.location)
    check_batch_size(len(store), global_batch_size=args.batch_size, world_size=1)
    measured = list(
        rows(
            store,
            batch_size=args.batch_size,
            max_workers=args.max_workers,
            device=device,
            shuffle_shards=args.shuffle_shards,
        )
    )
    width = max(len(row.what) for row in measured) + 3
    print(f"{'what':<{width}}{'workers':>8}{'samples/s':>12}", flush=True)
    for row in measured:
        workers = "" if row.num_workers is None else row.num_workers
        try:
            figure = f"{rate(row.counts(), seconds=args.seconds):,.0f}"
        except UserError as error:
            if row.what != _RESIDENT:
                raise
            figure = f"-  {error}"  # a dataset may be too large for that
        print(f"{row.what:<{width}}{workers:>8}{figure:>12}", flush=True)
