"""Barlow Twins (Zbontar et al. 2021): drive the cross-correlation of the two views' embeddings towards the identity.

Statistics are computed over the batch of all ranks. Each rank correlates its own share of the first view's dimensions
with all dimensions of the second view. This divides time and memory for the matrix by the number of ranks.

Shapes: B pictures of this rank, G pictures of all ranks, D dimensions of an embedding, I dimensions in the share of
this rank, F = 2 D.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from data_pipeline.core.schema import PositiveFactor
from trainer.distributed.collectives import all_gather_rows, rank, world_size
from trainer.objectives.contrast import check_pair
from trainer.objectives.objective import (
    BaseObjectiveConfig,
    ObjectiveInputs,
    ObjectiveOutput,
    PureObjective,
    mean_cosine,
)

_EPSILON = 1e-5  # added to a variance


class BarlowTwinsConfig(BaseObjectiveConfig):
    """The config of Barlow Twins.

    off_diagonal_weight: the weight of the squared correlation of two different dimensions.
    unbiased: whether dimensions are divided by their unbiased deviation, as in the code of Huang et al. (2023). The
        published code divides by the root of the biased variance plus 1e-5.
    """

    can_be_recorded: ClassVar[bool] = True

    kind: Literal["barlow_twins"] = "barlow_twins"
    off_diagonal_weight: PositiveFactor = 5e-3
    unbiased: bool = False

    def build(self, given: ObjectiveInputs) -> PureObjective:
        return PureObjective(barlow_twins_loss, **self.model_dump(exclude={"kind"}))


def barlow_twins_loss(
    z_a_BD: Tensor, z_b_BD: Tensor, *, off_diagonal_weight: float = 5e-3, unbiased: bool = False
) -> ObjectiveOutput:
    """Return the sum of (1 - C_ii)^2 and of `off_diagonal_weight` C_ij^2 (Zbontar et al. 2021, equation 1).

    C_ij is the mean over the batch of dimension i of the first view times dimension j of the second. Both are
    standardised with the batch's mean and deviation, as `BarlowTwinsConfig.unbiased` says. A dimension that is constant
    over the batch counts as uncorrelated. Rows are not normalised. Also logs the two parts without weights:
    `invariance`, the sum of (1 - C_ii)^2, and `redundancy`, the sum of C_ij^2.

    Parts of the batch and the mean over the ranks are as in `nt_xent_loss`; the value of a single rank has no meaning.

    Args:
        z_a_BD, z_b_BD: (B, D) embeddings of any float type; computed in float32 at least, even under autocast.
        off_diagonal_weight, unbiased: as in `BarlowTwinsConfig`.

    Raises:
        ValueError: if the embeddings are not (B, D) with equal shapes, or if the batch is a single picture.

    Examples:
        >>> z_a = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]])
        >>> z_b = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 2.0]])
        >>> round(barlow_twins_loss(z_a, z_b).loss.item(), 4)
        0.1264
    """
    check_pair(z_a_BD, z_b_BD)
    size, num_ranks = z_a_BD.shape[1], world_size()
    if len(z_a_BD) * num_ranks < 2:
        raise ValueError("correlations need a batch of at least 2 pictures")
    start, stop = (size * number // num_ranks for number in (rank(), rank() + 1))
    with torch.autocast(z_a_BD.device.type, enabled=False):
        dtype = torch.promote_types(z_a_BD.dtype, torch.float32)
        z_GF = all_gather_rows(torch.cat([z_a_BD, z_b_BD], dim=1).to(dtype))
        a_GI, b_GD = (_standardised(part, unbiased) for part in (z_GF[:, start:stop], z_GF[:, size:]))
        correlation_ID = (a_GI / len(a_GI)).T @ b_GD
        diagonal_I = correlation_ID.diagonal(start)
        # Sums over this rank's share of C, times the number of ranks.
        invariance = num_ranks * (1 - diagonal_I).square().sum()
        # A norm needs no second matrix; setting the diagonal to zero instead takes a quarter more time.
        redundancy = num_ranks * (torch.linalg.vector_norm(correlation_ID).square() - diagonal_I.square().sum())
    metrics = {"invariance": invariance.detach(), "redundancy": redundancy.detach()}
    loss = invariance + off_diagonal_weight * redundancy
    return ObjectiveOutput(loss, {"alignment": mean_cosine(z_a_BD, z_b_BD), **metrics})


def _standardised(x_GD: Tensor, unbiased: bool) -> Tensor:
    """Return columns with mean 0 and deviation 1. Columns that are constant up to rounding become 0."""
    std_D, mean_D = torch.std_mean(x_GD, dim=0, correction=int(unbiased))
    constant_D = std_D <= torch.finfo(x_GD.dtype).eps * mean_D.abs()
    if not unbiased:  # as batch norm does, in the published code
        std_D = (std_D.square() + _EPSILON).sqrt()
    return (x_GD - mean_D) / std_D.masked_fill(constant_D, torch.inf)
