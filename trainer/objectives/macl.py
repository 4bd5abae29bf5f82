"""Model-aware contrastive learning (Huang et al. 2023, arXiv 2207.07874): the temperature follows the alignment.

When the views of a sample lie close together, the temperature rises, so that near negatives are pushed away less. Each
anchor's loss is divided by 1 - p, without gradient, where p is the probability of the positive: otherwise an anchor
with an easy task would have next to no gradient.

Shapes: B samples of this rank, N = 2 B anchors, D dimensions.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.schema import Share, Temperature
from trainer.distributed.collectives import all_reduce_sum, world_size
from trainer.objectives.contrast import ContrastiveConfig, check_temperature, margins, unit_pair
from trainer.objectives.objective import ObjectiveInputs, ObjectiveOutput, PureObjective, contrastive_output

_LEAST = 1e-8  # the smallest 1 - p that a loss is divided by


class MACLConfig(ContrastiveConfig):
    """The config of model-aware contrastive learning.

    temperature: the temperature at the neutral alignment, tau_0 in the paper.
    sensitivity: the relative rise of the temperature if the alignment rises by 1, alpha in the paper.
    neutral_alignment: the mean cosine of positives at which the temperature does not change, A_0 in the paper.
    """

    kind: Literal["macl"] = "macl"
    temperature: Temperature = 0.1
    sensitivity: Share = 0.5
    neutral_alignment: Share = 0.0

    @model_validator(mode="after")
    def _the_temperature_stays_positive(self) -> Self:
        if self.sensitivity * (1 + self.neutral_alignment) >= 1:  # at a mean cosine of -1
            raise ValueError(
                f"sensitivity {self.sensitivity} and neutral_alignment {self.neutral_alignment} let the temperature "
                "fall to 0 if all positives point in opposite directions; set sensitivity below "
                f"{1 / (1 + self.neutral_alignment):.3g}"
            )
        return self

    def build(self, given: ObjectiveInputs) -> PureObjective:
        return PureObjective(macl_loss, **self.model_dump(exclude={"kind"}))


def macl_loss(
    z_a_BD: Tensor,
    z_b_BD: Tensor,
    *,
    temperature: float,
    sensitivity: float = 0.5,
    neutral_alignment: float = 0.0,
    chunk_size: int | None = None,
) -> ObjectiveOutput:
    """Return the model-aware loss: the mean over 2 B anchors of -log(p) / (1 - p), with no gradient by 1 - p.

    p is the probability of NT-Xent at the temperature t (1 + `sensitivity` (A - `neutral_alignment`)). A is the mean
    cosine of the positives of all ranks, without gradient. Also logs this `temperature`.

    The other arguments, types and errors are as in `trainer.objectives.contrast.margins`, and the mean over
    the ranks is as in `nt_xent_loss`.

    Examples:
        >>> z_a = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> z_b = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
        >>> round(macl_loss(z_a, z_b, temperature=0.5).loss.item(), 4)
        1.4065
    """
    check_temperature(temperature)
    with torch.no_grad(), torch.autocast(z_a_BD.device.type, enabled=False):
        u_BD, v_BD = unit_pair(z_a_BD, z_b_BD)
        alignment = all_reduce_sum((u_BD * v_BD).sum(1).mean()) / world_size()
        now = temperature * (1 + sensitivity * (alignment - neutral_alignment))
    margin_N = margins(z_a_BD, z_b_BD, temperature=now, chunk_size=chunk_size)
    rest_N = torch.sigmoid(-margin_N.detach()).clamp_min(_LEAST)  # 1 - p
    loss = (F.softplus(-margin_N) / rest_N).mean()
    return contrastive_output(loss, F.logsigmoid(margin_N.detach()), z_a_BD, z_b_BD, temperature=now)
