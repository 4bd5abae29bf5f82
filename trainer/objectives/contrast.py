"""What contrastive objectives share: unit embeddings, everybody's candidates, and a log-sum-exp of linear memory.

Shapes: B pictures of this rank, N anchors of this rank, G candidates of all ranks, D dimensions; I and J rows and
columns of one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from pydantic import PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from data_pipeline.schema import Schema
from trainer.distributed.collectives import all_gather_rows, rank

# Tiles are summed without subtracting a maximum, which saves a pass over each. Similarities lie in [-1 / t, 1 / t], and
# exp(50) times a million candidates, its inverse, and the gradient of such a sum all fit into float32.
MIN_TILED_TEMPERATURE = 0.02


class ContrastiveConfig(Schema):
    """`chunk_size`: rows of a tile of the similarity matrix, for memory linear in the batch; None: the whole matrix."""

    temperature: PositiveFloat
    chunk_size: PositiveInt | None = None

    @model_validator(mode="after")
    def _tiles_need_warmth(self) -> Self:
        scale_of(self.temperature, chunk_size=self.chunk_size)
        return self


def unit_pair(z_a_BD: Tensor, z_b_BD: Tensor) -> tuple[Tensor, Tensor]:
    """Both views' embeddings at unit length, in float32 (float64 stays); raises `ValueError` if their shapes differ."""
    if z_a_BD.dim() != 2 or z_a_BD.shape != z_b_BD.shape:
        shapes = f"{tuple(z_a_BD.shape)} and {tuple(z_b_BD.shape)}"
        raise ValueError(f"the two views' embeddings must be (B, D) and alike, got {shapes}")
    dtype = torch.promote_types(z_a_BD.dtype, torch.float32)
    return F.normalize(z_a_BD.to(dtype), dim=1), F.normalize(z_b_BD.to(dtype), dim=1)


def scale_of(temperature: float | Tensor, *, chunk_size: int | None) -> float | Tensor:
    """1 / sqrt(temperature): the length of embeddings whose inner products are the logits. Raises `ValueError`."""
    lowest = 0.0 if chunk_size is None else MIN_TILED_TEMPERATURE
    if not float(temperature) > 0 or float(temperature) < lowest:
        mend = "it must be positive" if chunk_size is None else f"with a chunk_size it must be at least {lowest}"
        raise ValueError(f"temperature is {float(temperature)}; {mend}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be positive, or None for the full matrix")
    return temperature**-0.5


def own_rows_first(x_ND: Tensor) -> Tensor:
    """The rows of all ranks, (G, D), those of this rank first; differentiable."""
    return torch.roll(all_gather_rows(x_ND), -rank() * len(x_ND), 0)


def log_sum_exp(u_GD: Tensor, *, num_anchors: int, with_self: bool, chunk_size: int | None) -> Tensor:
    """For each anchor, log of the sum of exp(inner product) over all candidates; (num_anchors,).

    The first `num_anchors` of the candidates `u_GD` are the anchors; `with_self` keeps an anchor in its own sum.
    Without `chunk_size` the whole matrix is in memory; with it, square tiles of that many rows, made once forward and
    once more backward, and each serves its mirror image too where anchors meet anchors. Then no inner product may
    exceed 1 / MIN_TILED_TEMPERATURE.
    """
    if chunk_size is not None:
        sums_N: Tensor = _TiledSumExp.apply(u_GD, num_anchors, with_self, chunk_size)  # type: ignore[no-untyped-call]
        return sums_N.log()
    logits_NG = u_GD[:num_anchors] @ u_GD.T
    if not with_self:
        logits_NG = logits_NG.masked_fill(torch.eye(*logits_NG.shape, dtype=torch.bool, device=u_GD.device), -torch.inf)
    return logits_NG.logsumexp(1)


class _TiledSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u_GD: Tensor, num_anchors: int, with_self: bool, chunk_size: int) -> Tensor:
        ctx.save_for_backward(u_GD)
        ctx.how = num_anchors, with_self, chunk_size
        sums_N = u_GD.new_zeros(num_anchors)
        for rows, columns, exp_IJ in _tiles(u_GD, *ctx.how):
            sums_N[rows] += exp_IJ.sum(1)
            if rows.start < columns.start < num_anchors:
                sums_N[columns] += exp_IJ.sum(0)
        return sums_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        (u_GD,) = ctx.saved_tensors
        grad_GD = torch.zeros_like(u_GD)
        for rows, columns, exp_IJ in _tiles(u_GD, *ctx.how):
            if rows.start < columns.start < len(grad_N):
                exp_IJ.mul_(grad_N[rows, None] + grad_N[columns])
            else:
                exp_IJ.mul_(grad_N[rows, None])
            grad_GD[rows].addmm_(exp_IJ, u_GD[columns])
            grad_GD[columns].addmm_(exp_IJ.T, u_GD[rows])
        return grad_GD, None, None, None


def _tiles(u_GD: Tensor, num_anchors: int, with_self: bool, chunk_size: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tiles of exp(inner products): anchors with themselves and later anchors, then with the other candidates."""
    anchors = _slices(0, num_anchors, chunk_size)
    candidates = anchors + _slices(num_anchors, len(u_GD), chunk_size)
    with torch.autocast(u_GD.device.type, enabled=False):
        for number, rows in enumerate(anchors):
            for columns in candidates[number:]:
                exp_IJ = (u_GD[rows] @ u_GD[columns].T).exp_()
                if rows == columns and not with_self:
                    exp_IJ.fill_diagonal_(0)
                yield rows, columns, exp_IJ


def _slices(start: int, stop: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]
