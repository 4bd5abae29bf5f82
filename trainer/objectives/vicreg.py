"""VICReg (Bardes et al. 2022): close views, varied dimensions, uncorrelated dimensions; no negatives.

Variances and covariances are computed over the batch of all ranks. Each rank computes them for its own share of the
dimensions. This divides time and memory for the matrices by the number of ranks.

Shapes: B samples of this rank, G samples of all ranks, D dimensions of an embedding, I dimensions in the share of this
rank.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.schema import Epsilon, PositiveFactor
from trainer.distributed.collectives import all_gather_rows, rank, world_size
from trainer.objectives.contrast import check_pair
from trainer.objectives.objective import (
    BaseObjectiveConfig,
    ObjectiveInputs,
    ObjectiveOutput,
    PureObjective,
    mean_cosine,
)


class VICRegConfig(BaseObjectiveConfig):
    """The config of VICReg; the defaults are those of the paper.

    epsilon: added to each variance under its root.
    """

    can_be_recorded: ClassVar[bool] = True

    kind: Literal["vicreg"] = "vicreg"
    invariance_weight: PositiveFactor = 25.0
    variance_weight: PositiveFactor = 25.0
    covariance_weight: PositiveFactor = 1.0
    epsilon: Epsilon = 1e-4

    def build(self, given: ObjectiveInputs) -> PureObjective:
        return PureObjective(vicreg_loss, **self.model_dump(exclude={"kind"}))


def vicreg_loss(
    z_a_BD: Tensor,
    z_b_BD: Tensor,
    *,
    invariance_weight: float = 25.0,
    variance_weight: float = 25.0,
    covariance_weight: float = 1.0,
    epsilon: float = 1e-4,
) -> ObjectiveOutput:
    """Return the weighted sum of three terms, as in the published code, and log each without its weight.

    - invariance: the mean squared difference of the two views, over samples and dimensions.
    - variance: the mean over dimensions and views of max(0, 1 - sqrt(variance + `epsilon`)).
    - covariance: the sum of the squared covariances of different dimensions / D, summed over the views.

    Variances and covariances are unbiased. Rows are not normalised.

    Parts of the batch and the mean over the ranks are as in `nt_xent_loss`; the value of a single rank has no meaning.

    Args:
        z_a_BD, z_b_BD: (B, D) embeddings of any float type; computed in float32 at least, even under autocast.

    Raises:
        ValueError: if the embeddings are not (B, D) with equal shapes, or if the batch of all ranks is a single sample.

    Examples:
        >>> z_a = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]])
        >>> z_b = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 2.0]])
        >>> round(vicreg_loss(z_a, z_b).loss.item(), 4)
        14.5
    """
    check_pair(z_a_BD, z_b_BD)
    size, num_ranks = z_a_BD.shape[1], world_size()
    if len(z_a_BD) * num_ranks < 2:
        raise ValueError("covariances need a batch of at least 2 samples")
    start, stop = (size * number // num_ranks for number in (rank(), rank() + 1))
    with torch.autocast(z_a_BD.device.type, enabled=False):
        dtype = torch.promote_types(z_a_BD.dtype, torch.float32)
        z_a_BD, z_b_BD = z_a_BD.to(dtype), z_b_BD.to(dtype)
        invariance = F.mse_loss(z_a_BD, z_b_BD)
        variance = covariance = invariance.new_zeros(())
        for z_GD in all_gather_rows(torch.cat([z_a_BD, z_b_BD], dim=1)).chunk(2, dim=1):
            centred_GD = z_GD - z_GD.mean(0)
            covariance_ID = (centred_GD[:, start:stop] / (len(z_GD) - 1)).T @ centred_GD
            variance_I = covariance_ID.diagonal(start)
            variance = variance + F.relu(1 - (variance_I + epsilon).sqrt()).sum() / (2 * size)
            # A norm needs no second matrix, as in Barlow Twins.
            squares = torch.linalg.vector_norm(covariance_ID).square() - variance_I.square().sum()
            covariance = covariance + squares / size
        # The sums over this rank's share of dimensions, times the number of ranks.
        variance, covariance = num_ranks * variance, num_ranks * covariance
    loss = invariance_weight * invariance + variance_weight * variance + covariance_weight * covariance
    terms = {"invariance": invariance, "variance": variance, "covariance": covariance}
    metrics = {name: term.detach() for name, term in terms.items()}
    return ObjectiveOutput(loss, {"alignment": mean_cosine(z_a_BD, z_b_BD), **metrics})
