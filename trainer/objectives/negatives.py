"""What losses that name their negatives share: a first view's negatives are views of other samples, of every rank.

Shapes: B samples of this rank, G = B W of all W ranks, V views of a sample, D dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.objectives.contrast import own_rows_first


def candidates(*views_BD: Tensor) -> Tensor:
    """V views of the samples of all ranks, (V G, D), those of this rank first, view after view; differentiable.

    Raises `ValueError` if the global batch is a single sample, which has no negative.
    """
    rows = own_rows_first(torch.cat(views_BD))
    if len(rows) < 2 * len(views_BD):
        raise ValueError("a global batch of 1 sample holds no negatives; it needs at least 2 samples")
    return rows
