"""What the tests of streams compare batches by, and the sounds that they overlay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from data_pipeline.core.batch import Batch
from data_pipeline.overlays.noise import Noise
from tests.tiny_data import NUM_POINTS


def noise() -> Noise:
    sounds = [torch.from_numpy(np.random.default_rng(seed).normal(size=9_000).astype(np.float32)) for seed in range(3)]
    return Noise.of(sounds, num_points=NUM_POINTS, volume=0.05, crop="first_or_last")


def whole_batches(by_rank: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """The global batch of each step, from what each rank saw at it."""
    return [list(chain.from_iterable(parts)) for parts in zip(*by_rank, strict=True)]


def assert_same(ours: Iterable[Batch], theirs: Iterable[Batch]) -> None:
    """Bit for bit."""
    num = 0
    for batch, other in zip(ours, theirs, strict=True):
        num += 1
        assert batch.labels.keys() == other.labels.keys()
        for name, value in {**vars(batch), **batch.labels}.items():
            if name in ("seconds", "labels"):  # what its making took is no part of what a batch is
                continue
            other_value = other.labels[name] if name in batch.labels else getattr(other, name)
            if isinstance(value, torch.Tensor):
                assert value.dtype == other_value.dtype, name
                assert torch.equal(value, other_value), name
            else:
                assert value == other_value, name
        assert (batch.inputs_a is batch.inputs_b) == (other.inputs_a is other.inputs_b)
    assert num
