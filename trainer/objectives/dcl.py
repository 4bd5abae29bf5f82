"""Decoupled contrastive learning (Yeh et al. 2022): NT-Xent without the positive in the denominator.

Of NT-Xent's gradient, a factor 1 - p is left out, where p is the probability of the positive. So a pair that is easy
to tell from its negatives still pulls its views together.

Shapes: B samples of this rank, N = 2 B anchors, D dimensions.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.schema import Temperature
from trainer.objectives.contrast import ContrastiveConfig, margins
from trainer.objectives.objective import ObjectiveInputs, ObjectiveOutput, PureObjective, contrastive_output


class DCLConfig(ContrastiveConfig):
    """The config of the decoupled contrastive loss."""

    kind: Literal["dcl"] = "dcl"
    temperature: Temperature = 0.1

    def build(self, given: ObjectiveInputs) -> PureObjective:
        return PureObjective(dcl_loss, temperature=self.temperature, chunk_size=self.chunk_size)


def dcl_loss(
    z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float | Tensor, chunk_size: int | None = None
) -> ObjectiveOutput:
    """Return the decoupled loss: the mean over 2 B anchors of minus the margin (Yeh et al. 2022, equation 6).

    The margin is cosine / t with the positive, minus the log of the sum over the negatives of exp(cosine / t).

    Arguments, types and errors are as in `trainer.objectives.contrast.margins`, and the mean over
    the ranks is as in `nt_xent_loss`.

    Examples:
        >>> import torch
        >>> z_a = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> z_b = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
        >>> round(dcl_loss(z_a, z_b, temperature=0.5).loss.item(), 4)
        -0.2161
    """
    margin_N = margins(z_a_BD, z_b_BD, temperature=temperature, chunk_size=chunk_size)
    return contrastive_output(-margin_N.mean(), F.logsigmoid(margin_N.detach()), z_a_BD, z_b_BD)
