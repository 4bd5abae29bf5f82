"""The peer that reads the same shards: plain WebDataset pipelines, up to stored bytes and up to decoded batches.

Its shuffle is of the shards, then within a buffer of 1,000 samples.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate
from torchvision.io import ImageReadMode, decode_png

from data_pipeline.storage.manifest import Manifest

SHUFFLE_BUFFER = 1000


def stored_samples(urls: Sequence[str]) -> Any:
    """Samples as stored bytes, for one epoch."""
    return webdataset.WebDataset(list(urls), shardshuffle=len(urls), empty_check=False).shuffle(SHUFFLE_BUFFER)


def stored_counts(urls: Sequence[str]) -> Iterator[int]:
    """Numbers of samples as they are delivered in one epoch, a hundred at a time."""
    samples = iter(stored_samples(urls))
    while num_samples := sum(1 for _ in islice(samples, 100)):
        yield num_samples


def batch_counts(urls: Sequence[str], manifest: Manifest, *, decoder: str, batch_size: int) -> Iterator[int]:
    """Numbers of samples in the decoded batches of one epoch, with all that a sample holds.

    The decoder is one of `DECODERS`.
    """
    dataset = stored_samples(urls).decode(*DECODERS[decoder]).to_tuple(*_members(manifest))
    batches = dataset.batched(batch_size, collation_fn=default_collate)
    return (len(fields[0]) for fields in webdataset.WebLoader(batches, batch_size=None))


def _members(manifest: Manifest) -> list[str]:
    fields = manifest.tars.fields
    return [*fields.content[:1], *([] if fields.mask is None else [fields.mask]), "json"]


def _pil_grey(data: bytes) -> Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(data))))


def _torchvision(mode: ImageReadMode) -> Callable[[bytes], Tensor]:
    def decode(data: bytes) -> Tensor:
        pixels: Tensor = decode_png(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode)
        return pixels

    return decode


def epoch_after_epoch(epoch: Callable[[], Iterator[int]]) -> Iterator[int]:
    """Epochs without end. WebDataset's own `repeat` ends after one where samples are shuffled behind it."""
    while True:
        yield from epoch()


DECODERS: Mapping[str, tuple[Any, ...]] = {
    "PIL": (webdataset.handle_extension("mask.png", _pil_grey), "torchrgb8"),  # WebDataset's own for pictures
    "torchvision": (
        webdataset.handle_extension("mask.png", _torchvision(ImageReadMode.GRAY)),
        webdataset.handle_extension("png", _torchvision(ImageReadMode.RGB)),
    ),
}
