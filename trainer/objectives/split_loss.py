"""The split loss: alignment and divergence as two terms, each with its own weight (Huang et al. 2023).

With weight 2 t on the divergence, where t is the temperature, it is a constant plus 2 t times InfoNCE without the
positive in the denominator. For other weights, there is no such form of InfoNCE.

Shapes: B samples of this rank, D dimensions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.schema import PositiveFactor, Temperature
from trainer.objectives.contrast import ContrastiveConfig, candidates, check_temperature, log_sums, unit_pair
from trainer.objectives.objective import ObjectiveInputs, ObjectiveOutput, PureObjective, contrastive_output


class SplitLossConfig(ContrastiveConfig):
    """The config of the split loss.

    Attributes:
        temperature: the temperature of the divergence.
        divergence_weight: lambda in the paper, which does not give its value. 0.4 is twice the temperature, so that the
            gradient is nearly the gradient of InfoNCE.
    """

    kind: Literal["split"] = "split"
    temperature: Temperature = 0.2
    divergence_weight: PositiveFactor = 0.4

    def build(self, given: ObjectiveInputs) -> PureObjective:
        return PureObjective(split_loss, **self.model_dump(exclude={"kind"}))


def split_loss(
    z_a_BD: Tensor,
    z_b_BD: Tensor,
    *,
    temperature: float,
    divergence_weight: float,
    chunk_size: int | None = None,
) -> ObjectiveOutput:
    """Return the split loss.

    It is the mean squared distance of a sample's two views on the unit sphere, plus `divergence_weight` times the mean
    over first views of log sum exp(cosine with a negative / temperature). The negatives are the second views of all
    other samples. Also logs this mean as `divergence`. The distance is 2 - 2 * the logged alignment.

    Arguments, types and errors are as in `trainer.objectives.contrast.margins`, and the mean over the ranks is as in
    `nt_xent_loss`.

    Examples:
        >>> z_a = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> z_b = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
        >>> round(split_loss(z_a, z_b, temperature=0.5, divergence_weight=1.0).loss.item(), 4)
        0.8
    """
    check_temperature(temperature)
    with torch.autocast(z_a_BD.device.type, enabled=False):
        u_BD, v_BD = unit_pair(z_a_BD, z_b_BD)
        own_B1 = torch.arange(len(u_BD), device=u_BD.device)[:, None]
        distance_B = (u_BD - v_BD).square().sum(1)
        log_sum_B = log_sums(u_BD / temperature, candidates(v_BD), own_B1, chunk_size)
    loss = distance_B.mean() + divergence_weight * log_sum_B.mean()
    log_probability_B = F.logsigmoid((1 - distance_B.detach() / 2) / temperature - log_sum_B.detach())
    return contrastive_output(loss, log_probability_B, z_a_BD, z_b_BD, divergence=log_sum_B.mean())
