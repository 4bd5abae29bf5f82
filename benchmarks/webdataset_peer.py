"""The peer that reads the same shards: plain WebDataset pipelines, up to stored bytes and up to decoded batches.

Its shuffle is of the shards, then within a buffer of 1,000 samples.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate
from torchvision.io import ImageReadMode, decode_png

from data_pipeline.manifest import Manifest

SHUFFLE_BUFFER = 1000


def stored_samples(urls: Sequence[str], *, repeat: bool) -> Any:
    """Samples as stored bytes, for one epoch or without end."""
    dataset = webdataset.WebDataset(list(urls), shardshuffle=len(urls), repeat=repeat, empty_check=False)
    return dataset.shuffle(SHUFFLE_BUFFER)


def stored_counts(urls: Sequence[str]) -> Iterator[int]:
    """Numbers of samples as they are delivered, a hundred at a time, without end."""
    samples = iter(stored_samples(urls, repeat=True))
    while True:
        yield sum(1 for _ in islice(samples, 100))


def batch_counts(
    urls: Sequence[str], manifest: Manifest, *, decoder: str, batch_size: int, repeat: bool
) -> Iterator[int]:
    """Numbers of samples in decoded batches of all that a sample holds; the decoder is one of `DECODERS`."""
    dataset = stored_samples(urls, repeat=repeat).decode(*DECODERS[decoder]).to_tuple(*reversed(manifest.members))
    batches = dataset.batched(batch_size, collation_fn=default_collate)
    return (len(fields[0]) for fields in webdataset.WebLoader(batches, batch_size=None))


def _pil_grey(data: bytes) -> Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(data))))


def _torchvision(mode: ImageReadMode) -> Callable[[bytes], Tensor]:
    def decode(data: bytes) -> Tensor:
        pixels: Tensor = decode_png(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode)
        return pixels

    return decode


DECODERS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "PIL": (webdataset.handle_extension("mask.png", _pil_grey), "torchrgb8"),  # WebDataset's own for pictures
        "torchvision": (
            webdataset.handle_extension("mask.png", _torchvision(ImageReadMode.GRAY)),
            webdataset.handle_extension("png", _torchvision(ImageReadMode.RGB)),
        ),
    }
)
