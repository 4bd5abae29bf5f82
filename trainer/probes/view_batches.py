"""Yield samples with one view of each, in batches. Views are drawn as in the first epoch of training.

Shapes: N samples, B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys
from trainer.probes.features import Pictures, ViewFunction, frozen, to_float

_BATCH_SIZE = 256


@dataclass(frozen=True)
class ViewBatch:
    """Samples as the encoder sees them without a view, and one view of each: (B, C, H, W) float32 on the device.

    `masks_BHW` are on the host, None for sounds.
    """

    seen_BCHW: Tensor
    views_BCHW: Tensor
    masks_BHW: Tensor | None


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
    index_N = pictures.index_N[rows_N] if index_N is None else index_N
    with frozen(policy):
        for rows_B, index_B in zip(torch.split(rows_N, _BATCH_SIZE), torch.split(index_N, _BATCH_SIZE), strict=True):
            batch = pictures.inputs(rows_B)
            inputs = to_float(batch.inputs, device)
            keys = DrawKeys(seed=seed, epoch=0, index_B=index_B.to(device), view=view)
            masks_BHW = None if batch.masks_BHW is None else batch.masks_BHW.to(device)
            views_BCHW = policy(inputs, keys, masks_BHW).float()
            yield ViewBatch(pictures.seen(inputs), views_BCHW, batch.masks_BHW)
