"""NT-Xent with a feature sieve that needs no label (after Tiwari and Shenoy 2023, arXiv 2301.13293).

In the paper, a small head on an early block learns to predict the label. In every so many steps, the layers below are
trained until its prediction is uniform, so what an early block can tell by itself is erased, and later blocks must find
other features. Here the head tells samples apart by NT-Xent, and its prediction is the softmax over all other views.
`encoder.early_head` keeps the gradients apart, so both are learned in each step, and the loss is a plain sum.

Shapes: B samples of this rank, N = 2 B anchors, G views of the samples of all ranks, D dimensions.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from data_pipeline.core.schema import PositiveFactor, Temperature
from trainer.objectives.contrast import ContrastiveConfig, candidates, log_sums, unit_pair
from trainer.objectives.nt_xent import nt_xent_loss
from trainer.objectives.objective import ObjectiveInputs, ObjectiveOutput, PureObjective


class SieveConfig(ContrastiveConfig):
    """The config of the feature sieve.

    forgetting_weight: the weight of the distance of the early head's predictions from uniform ones, by which the trunk
        forgets. NT-Xent and the loss of the early head have weight 1.
    """

    kind: Literal["sieve"] = "sieve"
    temperature: Temperature = 0.5
    forgetting_weight: PositiveFactor = 1.0

    def check(self, run: Any) -> None:
        if run.encoder.early_head == 0:
            raise ValueError("objective.kind=sieve reads an early head; set encoder.early_head=1, or a later block")

    def build(self, given: ObjectiveInputs) -> PureObjective:
        return PureObjective(sieve_loss, **self.model_dump(exclude={"kind"}))


def sieve_loss(
    z_a_BX: Tensor, z_b_BX: Tensor, *, temperature: float, forgetting_weight: float, chunk_size: int | None = None
) -> ObjectiveOutput:
    """Return the sum of three losses: NT-Xent of the embedding, NT-Xent of the early head, and the forgetting loss.

    The forgetting loss is `forgetting_weight` times the distance of the early head's predictions from uniform ones.
    Also logs `early_loss` and `early_distance`, both without weight. The input has 3 D columns: the embedding, then
    the columns of `EarlyHead`. All else is as in `nt_xent_loss`.
    """
    settings: dict[str, Any] = {"temperature": temperature, "chunk_size": chunk_size}
    embedding, learning, forgetting = zip(z_a_BX.chunk(3, dim=1), z_b_BX.chunk(3, dim=1), strict=True)
    output, early = nt_xent_loss(*embedding, **settings), nt_xent_loss(*learning, **settings)
    distance = distance_from_uniform(*forgetting, **settings)
    loss = output.loss + early.loss + forgetting_weight * distance
    return ObjectiveOutput(
        loss, {**output.metrics, "early_loss": early.loss.detach(), "early_distance": distance.detach()}
    )


def distance_from_uniform(
    z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float, chunk_size: int | None = None
) -> Tensor:
    """Return the mean over 2 B anchors of KL(uniform, softmax over all other views), 0 or more."""
    with torch.autocast(z_a_BD.device.type, enabled=False):
        u_BD, v_BD = unit_pair(z_a_BD, z_b_BD)
        own_ND, all_GD = torch.cat([u_BD, v_BD]), candidates(u_BD, v_BD)
        own_N1 = torch.arange(len(own_ND), device=own_ND.device)[:, None]
        log_sum_N = log_sums(own_ND / temperature, all_GD, own_N1, chunk_size)
        num_others = len(all_GD) - 1
        mean_N = (own_ND * (all_GD.sum(0) - own_ND)).sum(1) / (temperature * num_others)
        return (log_sum_N - mean_N).mean() - math.log(num_others)
