"""Implicit feature modification (Robinson et al. 2021): NT-Xent beside NT-Xent on embeddings that were made harder.

An adversary that moves each embedding by at most epsilon lowers the similarity with the positive by epsilon, and raises
the similarity with each negative by epsilon. So features that suffice for the easy task do not suffice for the harder
one. Both changes lower the margin, together by 2 epsilon / temperature.

Shapes: B samples of this rank, N = 2 B anchors, D dimensions.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.schema import PositiveFactor, Temperature
from trainer.objectives.contrast import ContrastiveConfig, margins
from trainer.objectives.objective import ObjectiveInputs, ObjectiveOutput, PureObjective, contrastive_output

# Cosines lie in [-1, 1], so a positive that is lowered and negatives that are raised by 1 can change places.
Perturbation = Annotated[float, Field(ge=0, le=1)]


class IFMConfig(ContrastiveConfig):
    """The config of implicit feature modification.

    epsilon: the change of each similarity, in cosines; the paper tries 0.05, 0.1 and 0.2. With 0, it is NT-Xent.
    perturbed_weight: the weight of the harder loss, alpha in the paper. The plain loss has weight 1, and the sum is
        divided by 1 + alpha.
    """

    kind: Literal["ifm"] = "ifm"
    temperature: Temperature = 0.5
    epsilon: Perturbation = 0.1
    perturbed_weight: PositiveFactor = 1.0

    def build(self, given: ObjectiveInputs) -> PureObjective:
        return PureObjective(ifm_loss, **self.model_dump(exclude={"kind"}))


def ifm_loss(
    z_a_BD: Tensor,
    z_b_BD: Tensor,
    *,
    temperature: float | Tensor,
    epsilon: float,
    perturbed_weight: float = 1.0,
    chunk_size: int | None = None,
) -> ObjectiveOutput:
    """Return (plain + alpha * harder) / (1 + alpha), where alpha is `perturbed_weight`.

    `plain` is NT-Xent. `harder` is NT-Xent with `epsilon` subtracted from the cosine of each positive and added to the
    cosine of each negative. The logged probability is the probability of the plain loss.

    The other arguments, types and errors are as in `trainer.objectives.contrast.margins`, and the mean over
    the ranks is as in `nt_xent_loss`.

    Examples:
        >>> import torch
        >>> z_a = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> z_b = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
        >>> round(ifm_loss(z_a, z_b, temperature=0.5, epsilon=0.1).loss.item(), 4)
        0.7674
    """
    margin_N = margins(z_a_BD, z_b_BD, temperature=temperature, chunk_size=chunk_size)
    plain = F.softplus(-margin_N).mean()
    harder = F.softplus(2 * epsilon / temperature - margin_N).mean()
    loss = (plain + perturbed_weight * harder) / (1 + perturbed_weight)
    return contrastive_output(loss, F.logsigmoid(margin_N.detach()), z_a_BD, z_b_BD)
