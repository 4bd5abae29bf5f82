"""The linear loss: InfoNCE without the logarithm and the exponential (Huang et al. 2023).

InfoNCE tends to it, up to scale, as its temperature grows. It only requires that the embeddings of all samples have
mean zero. A few directions are enough for this, so embeddings may collapse onto them.

Shapes: B samples of this rank, G = B W samples of all W ranks, D dimensions.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from data_pipeline.core.schema import PositiveFactor
from trainer.objectives.contrast import candidates, unit_pair
from trainer.objectives.objective import BaseObjectiveConfig, ObjectiveInputs, ObjectiveOutput, PureObjective


class LinearLossConfig(BaseObjectiveConfig):
    """The config of the linear loss.

    divergence_weight: the weight of the similarity with negatives; 1 is the limit of InfoNCE.
    """

    can_be_recorded: ClassVar[bool] = True

    kind: Literal["linear"] = "linear"
    divergence_weight: PositiveFactor = 1.0

    def build(self, given: ObjectiveInputs) -> PureObjective:
        return PureObjective(linear_loss, divergence_weight=self.divergence_weight)


def linear_loss(z_a_BD: Tensor, z_b_BD: Tensor, *, divergence_weight: float) -> ObjectiveOutput:
    """Return the linear loss: -mean cosine of positives + `divergence_weight` * mean cosine of negatives.

    Logs the mean cosine of positives as alignment, and of negatives as divergence. The negatives of a first view are
    the second views of all other samples. Time and memory are linear in the batch, because the mean over them is one
    product with the sum of all second views.

    `divergence_weight` is lambda in the paper.

    Arguments, types and errors are as in `trainer.objectives.contrast.margins`, and the mean over the ranks is as in
    `nt_xent_loss`.

    Examples:
        >>> z_a = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> z_b = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
        >>> round(linear_loss(z_a, z_b, divergence_weight=1.0).loss.item(), 4)
        -0.6
    """
    with torch.autocast(z_a_BD.device.type, enabled=False):
        u_BD, v_BD = unit_pair(z_a_BD, z_b_BD)
        v_GD = candidates(v_BD)
        others_BD = (v_GD.sum(0) - v_BD) / (len(v_GD) - 1)
        positive, negative = (u_BD * v_BD).sum(1).mean(), (u_BD * others_BD).sum(1).mean()
    metrics = {"alignment": positive.detach(), "divergence": negative.detach()}
    return ObjectiveOutput(divergence_weight * negative - positive, metrics)
