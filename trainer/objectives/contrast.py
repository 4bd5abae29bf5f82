"""Shared parts of contrastive objectives: unit embeddings, candidates of all ranks, a softmax with linear memory.

Shapes: B pictures of this rank, N anchors of this rank, G or K candidates of all ranks, V views of a picture, D
dimensions; I and J rows and columns of one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import torch
from pydantic import model_validator
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from data_pipeline.core.schema import BatchSize, Temperature
from trainer.distributed.collectives import all_gather_rows, rank
from trainer.objectives.objective import BaseObjectiveConfig

# Tiles are summed without subtracting a maximum, which saves a pass over each tile. Similarities lie in
# [-1 / t, 1 / t]. exp(50) times a million candidates, its inverse, and the gradient of such a sum all fit into float32.
MIN_TILED_TEMPERATURE = 0.02

_LEAST_SQUARE = 1e-24  # is added to the mean square of a vector, so that a vector of zeros stays zero


class AnchorChunks(BaseObjectiveConfig):
    """The base of the configs of losses that compare their anchors a few at a time.

    chunk_size: the number of anchors that are compared with all candidates at a time. Memory is then linear in the
        batch, but similarities are computed twice. None compares all at once.
    """

    can_be_recorded: ClassVar[bool] = True

    chunk_size: BatchSize | None = None


class ContrastiveConfig(BaseObjectiveConfig):
    """The base of the configs with a temperature.

    chunk_size: the rows of a tile of the similarity matrix, for memory linear in the batch. None computes the whole
        matrix at once.
    """

    can_be_recorded: ClassVar[bool] = True

    temperature: Temperature
    chunk_size: BatchSize | None = None

    @model_validator(mode="after")
    def _tiles_need_a_high_temperature(self) -> Self:
        scale_of(self.temperature, chunk_size=self.chunk_size)
        return self


def check_pair(z_a_BD: Tensor, z_b_BD: Tensor) -> None:
    """Raise `ValueError` if the embeddings of the two views are empty, or not (B, D) with equal shapes."""
    if z_a_BD.dim() != 2 or z_a_BD.shape != z_b_BD.shape:
        shapes = f"{tuple(z_a_BD.shape)} and {tuple(z_b_BD.shape)}"
        raise ValueError(f"the embeddings of the two views must be (B, D) with equal shapes, got {shapes}")
    if not z_a_BD.numel():
        raise ValueError(f"an empty batch has no loss: the embeddings of the two views are {tuple(z_a_BD.shape)}")


def unit_pair(z_a_BD: Tensor, z_b_BD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the embeddings of both views at unit length, in float32 (float64 stays). Raises like `check_pair`."""
    check_pair(z_a_BD, z_b_BD)
    dtype = torch.promote_types(z_a_BD.dtype, torch.float32)
    return F.normalize(z_a_BD.to(dtype), dim=1), F.normalize(z_b_BD.to(dtype), dim=1)


def unit_rows(z_a_BD: Tensor, z_b_BD: Tensor, *, scale: float | Tensor) -> Tensor:
    """Return the rows of `unit_pair` times `scale`, (2 B, D), with the rows of the first view first."""
    check_pair(z_a_BD, z_b_BD)
    z_ND = torch.cat([z_a_BD, z_b_BD]).to(torch.promote_types(z_a_BD.dtype, torch.float32))
    size = z_ND.shape[1:]
    # Divides by the root of the mean square: on a GPU one kernel each way, and F.normalize takes 4 and 15.
    u_ND: Tensor = F.rms_norm(z_ND, size, eps=_LEAST_SQUARE) * (scale * size.numel() ** -0.5)
    return u_ND


def alignment_of(u_ND: Tensor, temperature: float | Tensor) -> Tensor:
    """Return the `mean_cosine` of the two views from the result of `unit_rows`, a scalar without gradient."""
    u_a_BD, u_b_BD = u_ND.detach().chunk(2)
    return ((u_a_BD * u_b_BD).sum() * (temperature / len(u_a_BD))).detach()


def scale_of(temperature: float | Tensor, *, chunk_size: int | None) -> float | Tensor:
    """Return 1 / sqrt(temperature): with embeddings of this length, inner products are the logits.

    Raises `ValueError` if the temperature is not positive, or too low for a `chunk_size`.
    """
    value = temperature.item() if isinstance(temperature, Tensor) else temperature
    if not value > 0:
        raise ValueError(f"temperature is {value}; it must be positive")
    if chunk_size is not None and value < MIN_TILED_TEMPERATURE:
        raise ValueError(f"temperature is {value}; with a chunk_size it must be at least {MIN_TILED_TEMPERATURE}")
    return temperature**-0.5


def own_rows_first(x_ND: Tensor) -> Tensor:
    """Return the rows of all ranks, (G, D), with this rank's rows first; differentiable."""
    if rank() == 0:  # its rows are first already, and a roll would copy
        return all_gather_rows(x_ND)
    return torch.roll(all_gather_rows(x_ND), -rank() * len(x_ND), 0)


def candidates(*views_BD: Tensor) -> Tensor:
    """Return V views of the samples of all ranks, (V G, D), with this rank's views first, one after the other.

    Losses take their negatives from them. Differentiable. Raises `ValueError` if the global batch is a single sample,
    which has no negative.
    """
    rows = own_rows_first(torch.cat(views_BD))
    if len(rows) < 2 * len(views_BD):
        raise ValueError("a global batch of 1 sample has no negatives; it needs at least 2 samples")
    return rows


def cross_entropy(u_GD: Tensor, positive_N: Tensor, *, with_self: bool, chunk_size: int | None) -> Tensor:
    """Return minus the log of the softmax over an anchor's inner products with all candidates, at its positive; (N,).

    The first N of the candidates `u_GD` are the anchors. `positive_N` holds the numbers of their positives among the
    candidates. `with_self` keeps an anchor in its own denominator.

    Without `chunk_size`, the N by G matrix is in memory. With it, only one square tile of that many rows is in memory,
    computed once in the forward pass and once in the backward pass. A tile of anchors with anchors also counts for its
    mirror image. Then no inner product may exceed 1 / MIN_TILED_TEMPERATURE. The backward pass needs one more tensor of
    the size of `u_GD`, for the gradient.
    """
    if chunk_size is not None:
        tiled_N: Tensor = _TiledCrossEntropy.apply(u_GD, positive_N, with_self, chunk_size)  # type: ignore[no-untyped-call]
        return tiled_N
    logits_NG = u_GD[: len(positive_N)] @ u_GD.T
    if not with_self:
        with torch.no_grad():  # a probability of 0 has no gradient, so autograd need not know about this
            logits_NG.fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits_NG, positive_N, reduction="none")


def margins(
    z_a_BD: Tensor,
    z_b_BD: Tensor,
    *negatives_BD: Tensor,
    temperature: float | Tensor,
    chunk_size: int | None = None,
) -> Tensor:
    """Return the margin of the positive of each anchor over its negatives, (2 B,), anchors of the first view first.

    It is cosine / t with the positive, minus the log of the sum over the negatives of exp(cosine / t). The negatives
    are both views of all other samples, on all ranks, or the rows of all other samples of `negatives_BD` if they are
    given. The sigmoid of the margin is the probability of NT-Xent.

    With a process group, `z_a_BD` and `z_b_BD` are this rank's part of the batch, equally large on every rank.

    Args:
        z_a_BD, z_b_BD, negatives_BD: (B, D) embeddings of any length and float type; normalised here, in float32 even
            under autocast.
        temperature: above 0. A 0-d tensor gets a gradient, and its value is not checked.
        chunk_size: as in `AnchorChunks`; the result is the same.

    Raises:
        ValueError: if the temperature is not positive, if the embeddings are not (B, D) with equal shapes, or if all
            ranks together have a single sample.
    """
    if not isinstance(temperature, Tensor):
        scale_of(temperature, chunk_size=None)
    with torch.autocast(z_a_BD.device.type, enabled=False):
        u_BD, v_BD = unit_pair(z_a_BD, z_b_BD)
        anchors_ND = torch.cat([u_BD, v_BD]) / temperature
        compared_VBD = [unit_pair(z_a_BD, each_BD)[1] for each_BD in negatives_BD] or [u_BD, v_BD]
        own_B = torch.arange(len(u_BD), device=u_BD.device)
        own_NV = torch.stack([own_B + view * len(u_BD) for view in range(len(compared_VBD))], dim=1).repeat(2, 1)
        positive_N = ((u_BD * v_BD).sum(1) / temperature).repeat(2)
        return positive_N - log_sums(anchors_ND, candidates(*compared_VBD), own_NV, chunk_size)


def log_sums(anchors_ND: Tensor, candidates_KD: Tensor, left_out_NV: Tensor, chunk_size: int | None) -> Tensor:
    """Return the log sum exp of each anchor's inner products with the candidates, (N,).

    `left_out_NV` holds the numbers of V candidates that an anchor is not compared with. `chunk_size` is as in
    `AnchorChunks`.
    """
    if chunk_size is None:
        return _log_sums(anchors_ND, candidates_KD, left_out_NV)
    chunks = zip(torch.split(anchors_ND, chunk_size), torch.split(left_out_NV, chunk_size), strict=True)
    return torch.cat(
        [
            checkpoint(_log_sums, chunk_ID, candidates_KD, left_out_IV, use_reentrant=False, preserve_rng_state=False)
            for chunk_ID, left_out_IV in chunks
        ]
    )


def _log_sums(anchors_ND: Tensor, candidates_KD: Tensor, left_out_NV: Tensor) -> Tensor:
    logits_NK = anchors_ND @ candidates_KD.T
    with torch.no_grad():  # a term of 0 has no gradient, so autograd need not know about this
        logits_NK.scatter_(1, left_out_NV, -torch.inf)
    return logits_NK.logsumexp(1)


class _TiledCrossEntropy(torch.autograd.Function):
    """`cross_entropy` in tiles: the log of the sum over the candidates minus the inner product with the positive."""

    @staticmethod
    def forward(ctx: Any, u_GD: Tensor, positive_N: Tensor, with_self: bool, chunk_size: int) -> Tensor:
        ctx.how = len(positive_N), with_self, chunk_size
        sums_N = u_GD.new_zeros(len(positive_N))
        for rows, columns, is_mirrored, exp_IJ in _tiles(u_GD, *ctx.how):
            sums_N[rows] += exp_IJ.sum(1)
            if is_mirrored:
                sums_N[columns] += exp_IJ.sum(0)
        ctx.save_for_backward(u_GD, positive_N, sums_N)
        own_N = [(u_GD[rows] * u_GD[positive_N[rows]]).sum(1) for rows in _slices(0, len(positive_N), chunk_size)]
        return sums_N.log() - torch.cat(own_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        u_GD, positive_N, sums_N = ctx.saved_tensors
        grad_GD = torch.zeros_like(u_GD)
        weight_N = grad_N / sums_N
        with torch.autocast(u_GD.device.type, enabled=False):
            for rows, columns, is_mirrored, exp_IJ in _tiles(u_GD, *ctx.how):
                weight_I1 = weight_N[rows, None]
                exp_IJ.mul_(weight_I1 + weight_N[columns] if is_mirrored else weight_I1)
                grad_GD[rows].addmm_(exp_IJ, u_GD[columns])
                grad_GD[columns].addmm_(exp_IJ.T, u_GD[rows])
            for rows in _slices(0, len(positive_N), ctx.how[-1]):
                grad_GD[rows].addcmul_(grad_N[rows, None], u_GD[positive_N[rows]], value=-1)
                grad_GD.index_add_(0, positive_N[rows], grad_N[rows, None] * u_GD[rows], alpha=-1)
        return grad_GD, None, None, None


def _tiles(
    u_GD: Tensor, num_anchors: int, with_self: bool, chunk_size: int
) -> Iterator[tuple[slice, slice, bool, Tensor]]:
    """Yield the tiles of anchors with themselves, with later anchors, and with candidates that are not anchors.

    A tile is its rows (anchors) and columns (candidates), whether the columns are later anchors, so that it also counts
    for its mirror image, and the exp of the inner products. All tiles share one buffer: a tile is valid until the next
    one is requested.
    """
    anchors = _slices(0, num_anchors, chunk_size)
    others = _slices(num_anchors, len(u_GD), chunk_size)
    buffer = u_GD.new_empty(min(chunk_size, num_anchors) * min(chunk_size, len(u_GD)))
    for i, rows in enumerate(anchors):
        for j, columns in enumerate(anchors[i:] + others, start=i):
            num_rows, num_columns = rows.stop - rows.start, columns.stop - columns.start
            exp_IJ = buffer[: num_rows * num_columns].view(num_rows, num_columns)
            torch.mm(u_GD[rows], u_GD[columns].T, out=exp_IJ).exp_()
            if i == j and not with_self:
                exp_IJ.fill_diagonal_(0)
            yield rows, columns, i < j < len(anchors), exp_IJ


def _slices(start: int, stop: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]
