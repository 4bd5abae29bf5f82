"""InfoNCE with one negative, which Huang et al. 2023 analyse (section 4), and its exact split into two terms.

Each first view must distinguish the second view of its own sample from the second view of one other sample. The paper
draws the other sample at random. Here it is the next sample of the global batch, and the first sample for the last one.
Batches are shuffled, so this sample is random too. It needs no further draw, every sample is a negative once, and the
number of ranks does not matter.

Shapes: B samples of this rank, D dimensions. positive_B is the similarity with the own second view, negative_B with the
second view of the other sample.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.objectives.contrast import candidates, unit_pair
from trainer.objectives.objective import (
    BaseObjectiveConfig,
    ObjectiveInputs,
    ObjectiveOutput,
    PureObjective,
    contrastive_output,
)


class InfoNCEConfig(BaseObjectiveConfig):
    """The config of InfoNCE with unit embeddings, temperature 1 and one negative for each sample; no settings."""

    can_be_recorded: ClassVar[bool] = True

    kind: Literal["info_nce"] = "info_nce"

    def build(self, given: ObjectiveInputs) -> PureObjective:
        return PureObjective(info_nce_loss)


def info_nce_loss(z_a_BD: Tensor, z_b_BD: Tensor) -> ObjectiveOutput:
    """Return InfoNCE with one negative: the mean of -log(exp(p) / (exp(p) + exp(n))) with cosines p and n.

    It is the sum of an alignment, minus the mean of p, and a divergence, the mean of log(exp(p) + exp(n)). Both are
    logged, the alignment as the mean of p.

    Arguments, types and errors are as in `trainer.objectives.contrast.margins`, and the mean over the ranks is as in
    `nt_xent_loss`.

    Examples:
        >>> z_a = torch.tensor([[1.0, 0.0], [-0.96, -0.28]])
        >>> z_b = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
        >>> round(info_nce_loss(z_a, z_b).loss.item(), 6)  # similarities 0.6 with the positive, -0.8 with the negative
        0.220417
    """
    with torch.autocast(z_a_BD.device.type, enabled=False):
        u_BD, v_BD = unit_pair(z_a_BD, z_b_BD)
        negatives_BD = candidates(v_BD).roll(-1, 0)[: len(v_BD)]
        positive_B, negative_B = (u_BD * v_BD).sum(1), (u_BD * negatives_BD).sum(1)
    log_probability_B = F.logsigmoid(positive_B - negative_B)
    spread = torch.logaddexp(positive_B.detach(), negative_B.detach()).mean()
    return contrastive_output(-log_probability_B.mean(), log_probability_B, z_a_BD, z_b_BD, divergence=spread)
