"""A triplet loss with a learned scale: the second view of the next sample of the batch is the negative."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data_pipeline.core.schema import PositiveFactor
from trainer.objectives import BaseObjectiveConfig, Objective, ObjectiveInputs, ObjectiveOutput, ViewPair
from trainer.objectives.contrast import candidates, unit_pair
from trainer.objectives.objective import mean_cosine


class TripletConfig(BaseObjectiveConfig):
    kind: Literal["seaside_triplet"] = "seaside_triplet"
    margin: PositiveFactor = 0.5

    def build(self, given: ObjectiveInputs) -> Triplet:
        return Triplet(self)


class Triplet(Objective):
    def __init__(self, config: TripletConfig) -> None:
        super().__init__()
        self.margin = config.margin
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair) -> ObjectiveOutput:
        u_BD, v_BD = unit_pair(z_a_BD, z_b_BD)
        next_BD = candidates(v_BD).roll(-1, 0)[: len(v_BD)]
        gap_B = (u_BD * next_BD).sum(1) - (u_BD * v_BD).sum(1)
        loss = F.softplus(self.log_scale.exp() * (gap_B + self.margin)).mean()
        return ObjectiveOutput(loss, {"alignment": mean_cosine(z_a_BD, z_b_BD), "scale": self.log_scale.exp().detach()})
