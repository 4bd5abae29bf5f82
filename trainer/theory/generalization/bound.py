"""Compute the error bound of Huang et al. 2023 (Theorem 1) in a model in which each of its terms is known exactly.

A sample of class k has two nuisances: t, which augmentation changes, and u, which it does not. The input is
(2 c_k, t, u), and the c_k are corners of a regular simplex. The views of a sample have all t' at a distance of at most
`strength` b from t. Each sample has its own b. The encoder keeps the class except for an angle, phi = gain t + u,
towards a direction v that all classes share: f = cos(phi) c_k + sin(phi) v. So r = 1, and f is L-Lipschitz with
L = sqrt(1 + gain^2). Ordinary samples have u = 0. A share of each class are outliers with u = `outlier_angle`. This is
beyond a right angle, so they are on the wrong side.

Two augmented samples of a class have the distance d_A = max(0, |t1 - t2| - radii). Outliers are too far from others.
So a distance of at most delta means that the intervals of radius strength b + delta / 2 overlap. Intervals that overlap
pairwise have a point in common. So the largest delta-close subset is the greatest number of intervals over one point,
and sigma is exact. Means over views are integrals of sines, and the spread of a sample's views is a chord.

Shapes: S seeds, Q shares of outliers, G gains, T strengths, K classes, N samples of a class, W deltas, E epsilons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from data_pipeline.core.counter_rng import normal, uniform
from data_pipeline.core.schema import Factor, PositiveFactor, Schema
from trainer.theory.framework.experiment import TwoOrMore, draw_keys
from trainer.theory.generalization.divergence import greatest_off_diagonal

_NUISANCE, _RADIUS = range(2)  # purposes of `counter_rng`

Share = Annotated[float, Field(ge=0, lt=0.5)]


class BoundSettings(Schema):
    """Settings of the model and the grid.

    t is uniform in [-`half_width`, `half_width`]. b is log-normal with median 1 and `radius_log_sd`.

    The bound is computed for all pairs of `num_deltas` values of delta, from 0 to the width of t, and `num_epsilons`
    values of epsilon. R_epsilon, the share of samples with views farther apart than epsilon, goes from 0 to
    `largest_unaligned_share`.
    """

    num_classes: TwoOrMore = 4
    samples_a_class: TwoOrMore = 400
    half_width: PositiveFactor = 1
    outlier_angle: float = Field(default=2.5, gt=math.pi / 2, lt=3 * math.pi / 2)
    outlier_shares: tuple[Share, ...] = Field(default=(0, 0.02, 0.05, 0.1), min_length=1)
    gains: tuple[Factor, ...] = Field(default=(0, 0.003, 0.01, 0.03, 0.1), min_length=1)
    strengths: tuple[Factor, ...] = Field(
        default=(0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 8, 12, 20, 40, 80, 160), min_length=1
    )
    radius_log_sd: Factor = 0.5
    num_deltas: TwoOrMore = 33
    num_epsilons: TwoOrMore = 25
    largest_unaligned_share: PositiveFactor = Field(default=0.1, lt=1)

    @model_validator(mode="after")
    def _outliers_are_apart(self) -> Self:
        if self.outlier_angle <= 2 * self.half_width:
            raise ValueError(
                f"outlier_angle {self.outlier_angle:g} must exceed the width of t, {2 * self.half_width:g}: "
                "otherwise outliers would be delta-close to other samples"
            )
        return self


@dataclass(frozen=True)
class Samples:
    """The t and b of each sample, (S, Q, K, N) float64, and u, (Q, N), which is 0 except for outliers."""

    t_SQKN: Tensor
    u_QN: Tensor
    b_SQKN: Tensor


def draw_samples(settings: BoundSettings, *, seeds: Sequence[int], device: torch.device) -> Samples:
    """Draw samples. All shares of outliers have the same t and b."""
    keys = draw_keys(seeds, device)
    K, N, Q = settings.num_classes, settings.samples_a_class, len(settings.outlier_shares)
    t = settings.half_width * (2 * uniform(keys, K * N, purpose=_NUISANCE).double() - 1)
    b = (settings.radius_log_sd * normal(keys, K * N, purpose=_RADIUS).double()).exp()
    count_Q1 = torch.tensor([[round(share * N)] for share in settings.outlier_shares], device=device)
    u_QN = settings.outlier_angle * (torch.arange(N, device=device) < count_Q1).double()
    t_SQKN, b_SQKN = (values.view(-1, 1, K, N).expand(-1, Q, K, N) for values in (t, b))
    return Samples(t_SQKN, u_QN, b_SQKN)


def largest_overlap(position_XN: Tensor, radius_XN: Tensor) -> Tensor:
    """Return the greatest number of intervals [position - radius, position + radius] with a point in common, (...)."""
    low_XN, high_XN = ((position_XN + sign * radius_XN).contiguous() for sign in (-1, 1))
    begun_XN = torch.searchsorted(low_XN.sort(-1).values, low_XN, right=True)
    ended_XN = torch.searchsorted(high_XN.sort(-1).values, low_XN)
    return (begun_XN - ended_XN).amax(-1)  # some interval begins at a point with the greatest number


def concentration(samples: Samples, *, strength: float, deltas: Tensor, outlier_distance: float) -> Tensor:
    """Return sigma for every delta, (S, Q, W).

    It is the share of the largest delta-close subset of a class, for the class in which this share is least.
    """
    N = samples.t_SQKN.shape[-1]
    far_QKN = (10 * outlier_distance + 10 * strength * samples.b_SQKN.amax()) * (samples.u_QN[:, None] > 0)
    position_SQKN = samples.t_SQKN + far_QKN  # moves outliers so far that they overlap no other sample
    counts = [largest_overlap(position_SQKN, strength * samples.b_SQKN + delta / 2) for delta in deltas]
    return torch.stack(counts, dim=-1).amin(2).double() / N


def centre_condition(rho: Tensor, *, centre_shrinkage: Tensor) -> Tensor:
    """Return the upper bound on every mu_k.mu_l, for r = 1: 1 - rho - sqrt(2 rho) - Delta / 2 (Theorem 1)."""
    return 1 - rho - (2 * rho).sqrt() - centre_shrinkage / 2


def alignment_bound(epsilon: Tensor, *, alignment: Tensor, speed: Tensor) -> Tensor:
    """Return the bound on R_epsilon of Theorem 2, eta(epsilon) sqrt(alignment); inf for an epsilon of 0.

    eta is the infimum of 4 max(1, h^2) / (h^2 (epsilon - 2 speed h)) over 0 < h < epsilon / (2 speed): the paper's for
    one transform with one parameter in [0, 1]. `speed` is a Lipschitz constant of the embedding of a view in that
    parameter, L M in the paper; `alignment` is E|f1 - f2|^2. The infimum is at h = 1 or at the maximum of
    h^2 (epsilon - 2 speed h).
    """
    h = (epsilon / (3 * speed)).clamp(max=1)
    eta = 4 / (h**2 * (epsilon - 2 * speed * h))
    return torch.where(epsilon > 0, eta * alignment.sqrt(), torch.inf)


def measure_cells(settings: BoundSettings, *, seeds: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Return the true error and the terms of the bound in every cell (S, Q, G, T).

    error: error of the nearest-centre classifier, with centres over all views.
    bound: the least (1 - sigma) + R_epsilon over all (delta, epsilon) that meet the condition of the theorem; 1 if
        none does.
    met: whether some (delta, epsilon) meets the condition.
    unconditional: the least (1 - sigma) + R_epsilon over all (delta, epsilon).
    slack: the greatest difference of the right and the left side of the condition, over all (delta, epsilon). It is
        positive if the condition is met.
    centre_shrinkage: Delta = 1 - min_k |mu_k|^2.
    closest: the greatest mu_k.mu_l.
    alignment_excess: the greatest R_epsilon less its bound in Theorem 2, over `num_epsilons` quantiles of the spread.
    alignment_bound: the least such bound, over those with R_epsilon > 0.
    sigma_at_0: share of the largest subset in which every two samples have a view in common.
    """
    samples = draw_samples(settings, seeds=seeds, device=device)
    by_strength = [_at_strength(settings, samples, strength) for strength in settings.strengths]
    return {name: torch.stack([cells[name] for cells in by_strength], dim=-1) for name in by_strength[0]}


def _at_strength(settings: BoundSettings, samples: Samples, strength: float) -> dict[str, Tensor]:
    device, K = samples.u_QN.device, settings.num_classes
    gain_G = torch.tensor(settings.gains, dtype=torch.float64, device=device)
    gain_G11 = gain_G[:, None, None]
    phi_SQGKN = gain_G11 * samples.t_SQKN[:, :, None] + samples.u_QN[:, None, None]
    reach_SQGKN = (
        gain_G11 * strength * samples.b_SQKN[:, :, None]
    )  # greatest difference of a view's phi from the sample's

    # The mean of cos(phi') over the views is cos(phi) sin(reach) / reach. The mean of sin(phi') has the same factor.
    shrunk_SQGKN = torch.sinc(reach_SQGKN / math.pi)
    along_SQGK, across_SQGK = ((wave * shrunk_SQGKN).mean(-1) for wave in (phi_SQGKN.cos(), phi_SQGKN.sin()))
    corner_KK = torch.full((K, K), -1 / (K - 1), dtype=torch.float64, device=device).fill_diagonal_(1)
    product_SQGKK = along_SQGK[..., None] * along_SQGK[..., None, :] * corner_KK
    product_SQGKK = product_SQGKK + across_SQGK[..., None] * across_SQGK[..., None, :]
    square_SQGK = product_SQGKK.diagonal(dim1=-2, dim2=-1)
    shrinkage_SQG = 1 - square_SQGK.amin(-1)
    closest_SQG = greatest_off_diagonal(product_SQGKK)

    # The nearest centre has the greatest f.mu_l - |mu_l|^2 / 2.
    score_SQGKNK = phi_SQGKN.cos()[..., None] * (along_SQGK[..., None, :] * corner_KK)[..., None, :]
    score_SQGKNK = score_SQGKNK + phi_SQGKN.sin()[..., None] * across_SQGK[..., None, None, :]
    score_SQGKNK = score_SQGKNK - square_SQGK[..., None, None, :] / 2
    label_K1 = torch.arange(K, device=device)[:, None]
    error_SQG = (score_SQGKNK.argmax(-1) != label_K1).double().mean((-2, -1))

    delta_W = torch.linspace(0, 2 * settings.half_width, settings.num_deltas, dtype=torch.float64, device=device)
    sigma_SQW = concentration(samples, strength=strength, deltas=delta_W, outlier_distance=settings.outlier_angle)
    spread_SQGM = (
        2 * (reach_SQGKN.flatten(-2).clamp(max=math.pi / 2)).sin()
    )  # a chord: how far apart views of a sample are
    total = spread_SQGM.shape[-1]

    def unaligned(most: int) -> tuple[Tensor, Tensor]:
        """Return the spreads at places 0 to `most`, the widest first, and the share above each, (S, Q, G, E)."""
        place_E = torch.linspace(0, most, settings.num_epsilons, device=device).round().long()
        epsilon_SQGE = spread_SQGM.sort(-1, descending=True).values[..., place_E]
        return epsilon_SQGE, (spread_SQGM[..., None, :] > epsilon_SQGE[..., None]).double().mean(-1)

    epsilon_SQGE, unaligned_SQGE = unaligned(int(settings.largest_unaligned_share * total))
    anywhere_SQGE, share_SQGE = unaligned(total - 1)
    # E|f1 - f2|^2 of two views with uniform parameters. The parameter moves phi by at most twice the greatest reach.
    alignment_SQG1 = 2 * (1 - shrunk_SQGKN.square()).mean((-2, -1))[..., None]
    speed_SQG1 = 2 * reach_SQGKN.amax((-2, -1))[..., None]
    limit_SQGE = alignment_bound(anywhere_SQGE, alignment=alignment_SQG1, speed=speed_SQG1)

    lipschitz_G = (1 + gain_G**2).sqrt()
    sigma_SQGWE = sigma_SQW[:, :, None, :, None]
    apart_GWE = (lipschitz_G[:, None] * delta_W)[:, :, None]
    rho = (
        2 * (1 - sigma_SQGWE)
        + K * unaligned_SQGE[..., None, :]
        + sigma_SQGWE * (apart_GWE + 2 * epsilon_SQGE[..., None, :])
    )
    allowed = centre_condition(rho, centre_shrinkage=shrinkage_SQG[..., None, None])
    slack = (allowed - closest_SQG[..., None, None]).flatten(-2)
    claimed = (1 - sigma_SQGWE + unaligned_SQGE[..., None, :]).flatten(-2)
    best_slack_SQG = slack.amax(-1)
    return {
        "error": error_SQG,
        "bound": torch.where(slack > 0, claimed, torch.ones_like(claimed)).amin(-1),
        "met": best_slack_SQG > 0,
        "unconditional": claimed.amin(-1),
        "slack": best_slack_SQG,
        "centre_shrinkage": shrinkage_SQG,
        "closest": closest_SQG,
        "alignment_excess": (share_SQGE - limit_SQGE).amax(-1),
        "alignment_bound": limit_SQGE.masked_fill(share_SQGE == 0, torch.inf).amin(-1),
        "sigma_at_0": sigma_SQW[:, :, None, 0].expand_as(error_SQG),
    }
