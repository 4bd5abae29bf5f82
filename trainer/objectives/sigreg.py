"""SIGReg (Balestriero and LeCun 2025, LeJEPA, arXiv 2511.08544): close views whose embeddings are normal; no negatives.

In each step, the embeddings of a view are projected onto random directions. Along each direction, a statistic compares
them with the standard normal distribution: that of Epps and Pulley (1983), which compares characteristic functions. If
every projection is standard normal, the embeddings are, so they neither collapse nor depend on each other.

Shapes: B samples of this rank, G samples of all ranks, V views, D dimensions, P projections, T points of the
integral.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.counter_rng import DrawKeys, normal
from data_pipeline.core.schema import Count, PositiveShare
from trainer.distributed.collectives import all_reduce_sum, world_size
from trainer.objectives.contrast import check_pair
from trainer.objectives.objective import (
    BaseObjectiveConfig,
    Objective,
    ObjectiveInputs,
    ObjectiveOutput,
    ViewPair,
    mean_cosine,
)

_PROJECTIONS: Final = 202  # `purpose` in `data_pipeline.core.counter_rng`
_LAST, _NUM_POINTS = 3.0, 17  # of the integral from 0, as published


class SIGRegConfig(BaseObjectiveConfig):
    """The config of SIGReg; the defaults are those of the published example.

    normality_weight: the weight of the statistic, lambda in the paper; the distance of the views has the rest of 1.
        This is the hyperparameter of the method.
    num_projections: the number of random directions of a step.
    """

    takes_further_views: ClassVar[bool] = True

    kind: Literal["sigreg"] = "sigreg"
    normality_weight: PositiveShare = 0.02
    num_projections: Count = 256

    def build(self, given: ObjectiveInputs) -> Objective:
        return SIGReg(self, seed=given.seed)


def drawn_projections(num_projections: int, size: int, *, seed: int, step: int, device: torch.device) -> Tensor:
    """Draw (P, D) float32 unit vectors as a function of (seed, step, number of the projection)."""
    index_P = torch.arange(num_projections, device=device)
    keys = DrawKeys(seed=seed, epoch=step, index_B=index_P, view=0)  # the step in place of the epoch
    return F.normalize(normal(keys, size, purpose=_PROJECTIONS), dim=1)


def sigreg_loss(
    z_a_BD: Tensor,
    z_b_BD: Tensor,
    *further_BD: Tensor,
    normality_weight: float = 0.02,
    num_projections: int = 256,
    seed: int = 0,
    step: int = 0,
) -> ObjectiveOutput:
    """Return `normality_weight` * normality + (1 - `normality_weight`) * invariance, and log both terms.

    - normality: G times the integral over t from -3 to 3 of exp(-t^2 / 2) |c(t) - exp(-t^2 / 2)|^2. Here c(t) is the
      mean over the samples of exp(i t x) for their projections x. It is the mean over views and projections. The
      integral is twice a sum of trapezoids between 17 points from 0 to 3, as published.
    - invariance: the mean squared difference of each view from the mean of the first two views.

    The projections are `drawn_projections`, equal on every rank. Rows are not normalised.

    With a process group, parts of the batch and the mean over the ranks are as in `nt_xent_loss`.

    Args:
        z_a_BD, z_b_BD, further_BD: (B, D) embeddings of each view, of any float type; computed in float32 at least,
            even under autocast.

    Raises:
        ValueError: if the embeddings are empty, or not (B, D) with equal shapes.

    Examples:
        >>> z_a = torch.tensor([[1.0, 0.0], [0.0, -1.0]])
        >>> z_b = torch.tensor([[1.0, 2.0], [0.0, -1.0]])
        >>> round(sigreg_loss(z_a, z_b, normality_weight=0.5).metrics["invariance"].item(), 4)
        0.25
    """
    for other_BD in (z_b_BD, *further_BD):
        check_pair(z_a_BD, other_BD)
    projections_PD = drawn_projections(num_projections, z_a_BD.shape[1], seed=seed, step=step, device=z_a_BD.device)
    with torch.autocast(z_a_BD.device.type, enabled=False):
        dtype = torch.promote_types(z_a_BD.dtype, torch.float32)
        z_VBD = torch.stack([z_BD.to(dtype) for z_BD in (z_a_BD, z_b_BD, *further_BD)])
        normality = _normality(z_VBD @ projections_PD.to(dtype).T)
        invariance = (z_VBD - z_VBD[:2].mean(0)).square().mean()
        loss = normality_weight * normality + (1 - normality_weight) * invariance
    metrics = {"invariance": invariance.detach(), "normality": normality.detach()}
    return ObjectiveOutput(loss, {"alignment": mean_cosine(z_a_BD, z_b_BD), **metrics})


def _normality(x_VBP: Tensor) -> Tensor:
    """Return the statistic of Epps and Pulley of the samples of all ranks, its mean over views and projections."""
    t_T11 = torch.linspace(0, _LAST, _NUM_POINTS, dtype=x_VBP.dtype, device=x_VBP.device)[:, None, None]
    target_T11 = torch.exp(-t_T11.square() / 2)
    angles_TVBP = t_T11[..., None] * x_VBP
    num_samples = x_VBP.shape[1] * world_size()
    sums_2TVP = all_reduce_sum(torch.stack([angles_TVBP.cos().sum(2), angles_TVBP.sin().sum(2)]))
    real_TVP, imaginary_TVP = sums_2TVP / num_samples
    squares_TVP = (real_TVP - target_T11).square() + imaginary_TVP.square()
    return 2 * num_samples * torch.trapezoid(squares_TVP * target_T11, t_T11, dim=0).mean()


class SIGReg(Objective):
    """The objective of SIGReg. It has no state: the projections are a function of (seed, step)."""

    def __init__(self, config: SIGRegConfig, *, seed: int) -> None:
        super().__init__()
        self._settings = config.model_dump(exclude={"kind"}) | {"seed": seed}

    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair, *further_BD: Tensor) -> ObjectiveOutput:
        return sigreg_loss(z_a_BD, z_b_BD, *further_BD, step=pair.step, **self._settings)
