"""What contrastive objectives share: unit embeddings, everybody's candidates, and a softmax of linear memory.

Shapes: B pictures of this rank, N anchors of this rank, G candidates of all ranks, D dimensions; I and J rows and
columns of one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    value = temperature.item() if isinstance(temperature, Tensor) else temperature
    if not value > 0:
        raise ValueError(f"temperature is {value}; it must be positive")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be positive, or None for the full matrix")
    if chunk_size is not None and value < MIN_TILED_TEMPERATURE:
        raise ValueError(f"temperature is {value}; with a chunk_size it must be at least {MIN_TILED_TEMPERATURE}")
    return temperature**-0.5


def own_rows_first(x_ND: Tensor) -> Tensor:
    """The rows of all ranks, (G, D), those of this rank first; differentiable."""
    return torch.roll(all_gather_rows(x_ND), -rank() * len(x_ND), 0)


def log_probability(u_GD: Tensor, positive_N: Tensor, *, with_self: bool, chunk_size: int | None) -> Tensor:
    """Log of the softmax, over an anchor's inner products with all candidates, at its positive; (N,).

    The first N of the candidates `u_GD` are the anchors, and `positive_N` numbers their positives among the candidates;
    `with_self` keeps an anchor in its own denominator. Without `chunk_size` the N by G matrix is in memory. With it,
    only square tiles of that many rows are, made once forward and once more backward, and where anchors meet anchors a
    tile serves its mirror image too; then no inner product may exceed 1 / MIN_TILED_TEMPERATURE.
    """
    num_anchors = len(positive_N)
    if chunk_size is not None:
        sums_N: Tensor = _TiledSumExp.apply(u_GD, num_anchors, with_self, chunk_size)  # type: ignore[no-untyped-call]
        return (u_GD[:num_anchors] * u_GD[positive_N]).sum(1) - sums_N.log()
    logits_NG = u_GD[:num_anchors] @ u_GD.T
    if not with_self:
        with torch.no_grad():  # a probability of 0 has no gradient either, so autograd need not know
            logits_NG.fill_diagonal_(-torch.inf)
    return -F.cross_entropy(logits_NG, positive_N, reduction="none")


@dataclass(frozen=True)
class _Tile:
    """exp(inner products) of the anchors `rows` with the candidates `columns`; mirrored: these are later anchors."""

    rows: slice
    columns: slice
    mirrored: bool
    exp_IJ: Tensor


class _TiledSumExp(torch.autograd.Function):
    """Of each anchor, the sum of exp(inner product) over the candidates."""

    @staticmethod
    def forward(ctx: Any, u_GD: Tensor, num_anchors: int, with_self: bool, chunk_size: int) -> Tensor:
        ctx.save_for_backward(u_GD)
        ctx.how = num_anchors, with_self, chunk_size
        sums_N = u_GD.new_zeros(num_anchors)
        for tile in _tiles(u_GD, *ctx.how):
            sums_N[tile.rows] += tile.exp_IJ.sum(1)
            if tile.mirrored:
                sums_N[tile.columns] += tile.exp_IJ.sum(0)
        return sums_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        (u_GD,) = ctx.saved_tensors
        grad_GD = torch.zeros_like(u_GD)
        with torch.autocast(u_GD.device.type, enabled=False):
            for tile in _tiles(u_GD, *ctx.how):
                weight_I1 = grad_N[tile.rows, None]
                tile.exp_IJ.mul_(weight_I1 + grad_N[tile.columns] if tile.mirrored else weight_I1)
                grad_GD[tile.rows].addmm_(tile.exp_IJ, u_GD[tile.columns])
                grad_GD[tile.columns].addmm_(tile.exp_IJ.T, u_GD[tile.rows])
        return grad_GD, None, None, None


def _tiles(u_GD: Tensor, num_anchors: int, with_self: bool, chunk_size: int) -> Iterator[_Tile]:
    """Anchors with themselves and with later anchors, then with the candidates that are no anchors."""
    anchors = _slices(0, num_anchors, chunk_size)
    others = _slices(num_anchors, len(u_GD), chunk_size)
    for i, rows in enumerate(anchors):
        for j, columns in enumerate(anchors[i:] + others, start=i):
            exp_IJ = (u_GD[rows] @ u_GD[columns].T).exp_()
            if i == j and not with_self:
                exp_IJ.fill_diagonal_(0)
            yield _Tile(rows, columns, mirrored=i < j < len(anchors), exp_IJ=exp_IJ)


def _slices(start: int, stop: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]
