"""Shared parts of contrastive objectives: unit embeddings, candidates of all ranks, a softmax with linear memory.

Shapes: B pictures of this rank, N anchors of this rank, I of them at a time, G or K candidates of all ranks, V views of
a picture, D dimensions.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from data_pipeline.core.schema import BatchSize, Temperature
from trainer.distributed.collectives import all_gather_rows, rank
from trainer.objectives.objective import BaseObjectiveConfig

_LEAST_SQUARE = 1e-24  # is added to the mean square of a vector, so that a vector of zeros stays zero


class ContrastiveConfig(BaseObjectiveConfig):
    """The base of the configs of losses that compare anchors with candidates.

    chunk_size: the number of anchors that are compared with all candidates at a time. Memory is then linear in the
        batch, but similarities are computed twice. None compares all at once.
    """

    can_be_recorded: ClassVar[bool] = True

    temperature: Temperature
    chunk_size: BatchSize | None = None


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


def unit_rows(z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float | Tensor) -> Tensor:
    """Return the rows of `unit_pair`, first view first, divided by the root of the temperature, (2 B, D).

    Their inner products are the logits. Raises like `check_pair` and `check_temperature`.
    """
    check_pair(z_a_BD, z_b_BD)
    check_temperature(temperature)
    z_ND = torch.cat([z_a_BD, z_b_BD]).to(torch.promote_types(z_a_BD.dtype, torch.float32))
    size = z_ND.shape[1:]
    # Divides by the root of the mean square: on a GPU one kernel each way, and F.normalize takes 4 and 15.
    u_ND: Tensor = F.rms_norm(z_ND, size, eps=_LEAST_SQUARE) * (temperature**-0.5 * size.numel() ** -0.5)
    return u_ND


def check_temperature(temperature: float | Tensor) -> None:
    """Raise `ValueError` if a temperature is not positive. A tensor is not checked: the host would wait for a GPU."""
    if not (isinstance(temperature, Tensor) or temperature > 0):
        raise ValueError(f"temperature is {temperature}; it must be positive")


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


def cross_entropy(
    z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float | Tensor, published: bool, chunk_size: int | None
) -> tuple[Tensor, Tensor]:
    """Return minus the log of the softmax at the positive of each anchor, and the `mean_cosine` of the two views.

    Anchors are both views of this rank, (2 B,), and their candidates the views of all ranks but the anchor itself. In
    the `published` form, anchors are the first views alone, (B,), and an anchor is one of its own candidates. The
    positive is the other view. `chunk_size` is as in `ContrastiveConfig`. Raises like `unit_rows`.
    """
    with torch.autocast(z_a_BD.device.type, enabled=False):
        u_ND = unit_rows(z_a_BD, z_b_BD, temperature=temperature)
        u_a_BD, u_b_BD = u_ND.chunk(2)
        alignment = ((u_a_BD.detach() * u_b_BD.detach()).sum() * (temperature / len(u_a_BD))).detach()
        u_GD = own_rows_first(u_ND)
        num_anchors = len(u_a_BD) if published else len(u_ND)
        anchors_ND, own_N = u_GD[:num_anchors], torch.arange(len(u_ND), device=u_ND.device)
        if chunk_size is not None:
            own_N1 = own_N[:num_anchors, None]
            log_sum_N = log_sums(anchors_ND, u_GD, own_N1[:, :0] if published else own_N1, chunk_size)
            return log_sum_N - (u_a_BD * u_b_BD).sum(1).repeat(num_anchors // len(u_a_BD)), alignment
        logits_NG = anchors_ND @ u_GD.T
        if not published:
            with torch.no_grad():  # a probability of 0 has no gradient, so autograd need not know about this
                logits_NG.fill_diagonal_(-torch.inf)
        positive_N = own_N[num_anchors:] if published else own_N.roll(len(u_a_BD))
        return F.cross_entropy(logits_NG, positive_N, reduction="none"), alignment


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
        chunk_size: as in `ContrastiveConfig`; the result is the same.

    Raises:
        ValueError: if the temperature is not positive, if the embeddings are not (B, D) with equal shapes, or if all
            ranks together have a single sample.
    """
    check_temperature(temperature)
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
    `ContrastiveConfig`.
    """
    if chunk_size is not None:
        log_sum_N: Tensor = _LogSums.apply(anchors_ND, candidates_KD, left_out_NV, chunk_size)  # type: ignore[no-untyped-call]
        return log_sum_N
    logits_NK = anchors_ND @ candidates_KD.T
    with torch.no_grad():  # a term of 0 has no gradient, so autograd need not know about this
        logits_NK.scatter_(1, left_out_NV, -torch.inf)
    return logits_NK.logsumexp(1)


class _LogSums(torch.autograd.Function):
    """`log_sums` of a few anchors at a time, with one matrix in memory; it is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, anchors_ND: Tensor, candidates_KD: Tensor, left_out_NV: Tensor, chunk_size: int) -> Tensor:
        log_sum_N = anchors_ND.new_empty(len(anchors_ND))
        given = (torch.split(each, chunk_size) for each in (anchors_ND, left_out_NV, log_sum_N))
        for chunk_ID, left_out_IV, log_sum_I in zip(*given, strict=True):
            logits_IK = (chunk_ID @ candidates_KD.T).scatter_(1, left_out_IV, -torch.inf)
            most_I1 = logits_IK.amax(1, keepdim=True)
            log_sum_I.copy_(logits_IK.sub_(most_I1).exp_().sum(1).log_().add_(most_I1[:, 0]))
        ctx.chunk_size = chunk_size
        ctx.save_for_backward(anchors_ND, candidates_KD, left_out_NV, log_sum_N)
        return log_sum_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, Tensor, None, None]:
        anchors_ND, candidates_KD, left_out_NV, log_sum_N = ctx.saved_tensors
        grad_ND, grad_KD = torch.empty_like(anchors_ND), torch.zeros_like(candidates_KD)
        given = (torch.split(each, ctx.chunk_size) for each in (anchors_ND, left_out_NV, log_sum_N, grad_N, grad_ND))
        with torch.autocast(anchors_ND.device.type, enabled=False):
            for chunk_ID, left_out_IV, log_sum_I, grad_I, grad_ID in zip(*given, strict=True):
                share_IK = (chunk_ID @ candidates_KD.T).sub_(log_sum_I[:, None]).exp_().scatter_(1, left_out_IV, 0)
                share_IK.mul_(grad_I[:, None])
                torch.mm(share_IK, candidates_KD, out=grad_ID)
                grad_KD.addmm_(share_IK.T, chunk_ID)
        return grad_ND, grad_KD, None, None
