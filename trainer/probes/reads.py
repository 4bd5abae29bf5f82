"""Choose what probes read, and in which precision: features of an encoder, its embedding, or the pixels as a floor.

Shapes: B pictures, C channels, H by W pixels, D embedding size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.encoder import Encoder
from trainer.probes.features import FeatureEncoder


def reader(encoder: Encoder, reads: str) -> FeatureEncoder:
    """Return a module from which probes read, with the weights of the encoder.

    "features" is the encoder itself: the linear probe reads its `features`, and kNN its `pooled`. "embedding" gives
    both the output of the head, on which the loss works. "pixels" gives both the normalised pictures, flattened.
    """
    match reads:
        case "embedding":
            return _Reader(encoder, Encoder.__call__)
        case "pixels":
            return _Reader(encoder, lambda encoder, views_BCHW: encoder.normalise(views_BCHW).flatten(1))
        case _:
            return encoder


class _Reader(nn.Module):
    """A module of the encoder's weights that gives one reading as both kinds of features."""

    def __init__(self, encoder: Encoder, read: Callable[[Encoder, Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder = encoder
        self._read = read  # takes the encoder as an argument, so that a deep copy of this module reads its own copy

    def features_and_pooled(self, views_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        reading = self._read(self.encoder, views_BCHW)
        return reading, reading


class InBfloat16(nn.Module):
    """A module for probes, computed under autocast to bfloat16 and returned in float32.

    Its `features_and_pooled` are those of an encoder, and a call is one of a view policy.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def features_and_pooled(self, views_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        with _bfloat16(views_BCHW):
            features_BF, pooled_BC = self.module.features_and_pooled(views_BCHW)
        return features_BF.float(), pooled_BC.float()

    def forward(self, inputs: Tensor, *others: object) -> Tensor:
        with _bfloat16(inputs):
            result: Tensor = self.module(inputs, *others)
        return result.float()


def _bfloat16(inputs: Tensor) -> AbstractContextManager[None]:
    return torch.autocast(inputs.device.type, dtype=torch.bfloat16)
