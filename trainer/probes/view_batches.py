"""Yield samples with one view of each, in batches. Views are drawn as in the first epoch of training.

Shapes: N samples, B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys
from trainer.probes.features import Pictures, ViewFunction, frozen
from trainer.views.inputs import to_floating

_BATCH_SIZE = 256
_MAX_PIXELS = 1 << 20  # of the pictures of a batch: 256 of 64 x 64, 20 of 224 x 224


@dataclass(frozen=True)
class ViewBatch:
    """Samples as the encoder sees them without a view, and one view of each: (B, C, H, W) float32 on the device.

    `masks_BHW` are on the host, None for sounds.
    """

    seen_BCHW: Tensor
    views_BCHW: Tensor
    masks_BHW: Tensor | None

    def change(self) -> Tensor:
        """Return the mean absolute change of each pixel, (B, H, W) on the device."""
        return (self.views_BCHW - self.seen_BCHW).abs().mean(1)


def view_batches(
    policy: ViewFunction,
    pictures: Pictures,
    rows_N: Tensor,
    *,
    seed: int,
    view: int,
    device: torch.device,
    index_N: Tensor | None = None,
) -> Iterator[ViewBatch]:
    """Yield the samples of `rows_N` in order, each with its view number `view`.

    With `index_N`, views are drawn as if the samples had those indices.
    """
    index_N = pictures.samples.index_B[rows_N] if index_N is None else index_N
    height, width = pictures.size
    size = max(1, min(_BATCH_SIZE, _MAX_PIXELS // (height * width)))
    with frozen(policy):
        rows = pictures.ahead(torch.split(rows_N, size), title="views")
        for rows_B, index_B in zip(rows, torch.split(index_N, size), strict=True):
            batch = pictures.inputs(rows_B)
            inputs = to_floating(batch.inputs_a.to(device))
            keys = DrawKeys(seed=seed, epoch=0, index_B=index_B.to(device), view=view)
            masks_BHW = None if batch.masks_BHW is None else batch.masks_BHW.to(device)
            views_BCHW = policy(inputs, keys, masks_BHW).float()
            yield ViewBatch(pictures.seen(inputs), views_BCHW, batch.masks_BHW)
