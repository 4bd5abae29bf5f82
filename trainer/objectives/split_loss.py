"""The split loss: alignment and divergence as two terms, each with its own weight (Huang et al. 2023).

With weight 2 t on the divergence, where t is the temperature, it is a constant plus 2 t times InfoNCE without the
positive in the denominator. For other weights, there is no such form of InfoNCE.

Shapes: B samples of this rank, G = B W samples of all W ranks, V views of a sample among the candidates, K = V G
candidates of all ranks, N rows of a chunk of anchors, D dimensions.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from data_pipeline.core.schema import BatchSize, PositiveFactor, Temperature
from trainer.objectives.contrast import candidates, scale_of, unit_pair
from trainer.objectives.objective import (
    BaseObjectiveConfig,
    Objective,
    ObjectiveInputs,
    ObjectiveOutput,
    ViewPair,
    contrastive_output,
)

Negatives = Literal["second_view", "both_views"]


class SplitLossConfig(BaseObjectiveConfig):
    """The config of the split loss.

    Attributes:
        temperature: the temperature of the divergence.
        divergence_weight: lambda in the paper, which does not give its value. 0.4 is twice the temperature, so that the
            gradient is nearly the gradient of InfoNCE.
        negatives: the negatives of a first view: the second views of all other samples, or both views of them.
        chunk_size: the number of first views that are compared with all candidates at a time. Memory is then linear in
            the batch, but similarities are computed twice. None compares all at once.
    """

    can_be_recorded: ClassVar[bool] = True

    kind: Literal["split"] = "split"
    temperature: Temperature = 0.2
    divergence_weight: PositiveFactor = 0.4
    negatives: Negatives = "second_view"
    chunk_size: BatchSize | None = None

    def build(self, given: ObjectiveInputs) -> Objective:
        return SplitLoss(self)


def split_loss(
    z_a_BD: Tensor,
    z_b_BD: Tensor,
    *,
    temperature: float,
    divergence_weight: float,
    negatives: Negatives = "second_view",
    chunk_size: int | None = None,
) -> Tensor:
    """Return the split loss, a scalar.

    It is the mean squared distance of a sample's two views on the unit sphere, plus `divergence_weight` times the mean
    over first views of log sum exp(cosine with a negative / temperature).

    With a process group, `z_a_BD` and `z_b_BD` are this rank's part of the batch, equally large on every rank, and
    negatives come from all ranks. The mean of the losses of the ranks is exactly the loss of the whole batch, and
    averaging parameter gradients over the ranks gives its gradient.

    Args:
        z_a_BD, z_b_BD: (B, D) embeddings of any length and float type; normalised here, in float32 even under autocast.
        temperature, divergence_weight, negatives, chunk_size: as in `SplitLossConfig`.

    Raises:
        ValueError: if temperature or chunk size is out of range, if the embeddings are not (B, D) with equal shapes, or
            if all ranks together have a single sample.

    Examples:
        >>> z_a = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> z_b = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
        >>> round(split_loss(z_a, z_b, temperature=0.5, divergence_weight=1.0).item(), 4)
        0.8
    """
    distance_B, log_sum_B = _parts(z_a_BD, z_b_BD, temperature, negatives, chunk_size)
    return distance_B.mean() + divergence_weight * log_sum_B.mean()


class SplitLoss(Objective):
    """The objective of the split loss.

    Also logs `divergence`, the mean log sum. The distance is 2 - 2 * the logged alignment.
    """

    def __init__(self, config: SplitLossConfig) -> None:
        super().__init__()
        self._config = config

    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair | None = None) -> ObjectiveOutput:
        config = self._config
        distance_B, log_sum_B = _parts(z_a_BD, z_b_BD, config.temperature, config.negatives, config.chunk_size)
        loss = distance_B.mean() + config.divergence_weight * log_sum_B.mean()
        with torch.no_grad():
            log_probability_B = F.logsigmoid((1 - distance_B / 2) / config.temperature - log_sum_B)
        output = contrastive_output(loss, log_probability_B, z_a_BD, z_b_BD)
        return ObjectiveOutput(loss, {**output.metrics, "divergence": log_sum_B.detach().mean()})


def _parts(
    z_a_BD: Tensor, z_b_BD: Tensor, temperature: float, negatives: Negatives, chunk_size: int | None
) -> tuple[Tensor, Tensor]:
    """Return the squared distance of each sample's views, and the log sum exp over its negatives; (B,) each."""
    scale_of(temperature, chunk_size=None)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be positive, or None for the full matrix")
    with torch.autocast(z_a_BD.device.type, enabled=False):
        u_BD, v_BD = unit_pair(z_a_BD, z_b_BD)
        views = (v_BD,) if negatives == "second_view" else (u_BD, v_BD)
        candidates_KD = candidates(*views)
        own_BV = torch.arange(len(views) * len(u_BD), device=u_BD.device).view(len(views), -1).T
        return (u_BD - v_BD).square().sum(1), _log_sums(u_BD / temperature, candidates_KD, own_BV, chunk_size)


def _log_sums(anchors_BD: Tensor, candidates_KD: Tensor, own_BV: Tensor, chunk_size: int | None) -> Tensor:
    """Return the log sum exp of each anchor's inner products with all candidates except `own_BV`, (B,)."""
    if chunk_size is None:
        return _logits(anchors_BD, candidates_KD, own_BV).logsumexp(1)
    sums_B: Tensor = _ChunkedLogSums.apply(  # type: ignore[no-untyped-call]
        anchors_BD, candidates_KD, own_BV, chunk_size
    )
    return sums_B


def _logits(anchors_ND: Tensor, candidates_KD: Tensor, own_NV: Tensor) -> Tensor:
    logits_NK = anchors_ND @ candidates_KD.T
    with torch.no_grad():  # a term of 0 has no gradient, so autograd need not know about this
        return logits_NK.scatter_(1, own_NV, -torch.inf)


class _ChunkedLogSums(torch.autograd.Function):
    """`_log_sums` for one chunk of anchors at a time: each pass, forward and backward, computes the logits."""

    @staticmethod
    def forward(ctx: Any, anchors_BD: Tensor, candidates_KD: Tensor, own_BV: Tensor, chunk_size: int) -> Tensor:
        sums_B = anchors_BD.new_empty(len(anchors_BD))  # one tensor: many small ones would fragment memory
        for rows in _chunks(len(anchors_BD), chunk_size):
            sums_B[rows] = _logits(anchors_BD[rows], candidates_KD, own_BV[rows]).logsumexp(1)
        ctx.save_for_backward(anchors_BD, candidates_KD, own_BV, sums_B)
        ctx.chunk_size = chunk_size
        return sums_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor, Tensor, None, None]:
        anchors_BD, candidates_KD, own_BV, sums_B = ctx.saved_tensors
        grad_anchors_BD, grad_candidates_KD = torch.empty_like(anchors_BD), torch.zeros_like(candidates_KD)
        with torch.autocast(anchors_BD.device.type, enabled=False):
            for rows in _chunks(len(anchors_BD), ctx.chunk_size):
                weight_NK = _logits(anchors_BD[rows], candidates_KD, own_BV[rows])
                weight_NK.sub_(sums_B[rows, None]).exp_().mul_(grad_B[rows, None])
                torch.mm(weight_NK, candidates_KD, out=grad_anchors_BD[rows])
                grad_candidates_KD.addmm_(weight_NK.T, anchors_BD[rows])
        return grad_anchors_BD, grad_candidates_KD, None, None


def _chunks(num_rows: int, size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, num_rows, size)]
