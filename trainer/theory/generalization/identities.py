"""Check the identities of Huang et al. 2023 in float64, on the losses of `trainer.objectives`.

Most checks take the embeddings of two views (B, D) and return the error of the identity relative to its size.

Shapes: S seeds, B pairs, D dimensions, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from data_pipeline.core.counter_rng import normal, uniform
from data_pipeline.core.schema import PositiveFactor, Schema
from trainer.objectives.barlow_twins import barlow_twins_loss
from trainer.objectives.info_nce import alignment, divergence, info_nce_loss
from trainer.objectives.linear_loss import linear_loss
from trainer.theory.framework.experiment import TwoOrMore, draw_keys

_EMBEDDING, _PROBABILITY = range(2)  # purposes of `counter_rng`


class IdentitySettings(Schema):
    """Settings of the checks. The embeddings of the second view are those of the first plus noise of `view_sd`."""

    batch_size: TwoOrMore = 64
    dim: TwoOrMore = 16
    num_classes: TwoOrMore = 10
    view_sd: PositiveFactor = 0.5


def info_nce_split(z_a_BD: Tensor, z_b_BD: Tensor) -> Tensor:
    """Check that InfoNCE is alignment plus divergence."""
    whole = info_nce_loss(z_a_BD, z_b_BD).loss
    return (alignment(z_a_BD, z_b_BD) + divergence(z_a_BD, z_b_BD) - whole).abs() / whole.abs()


def correlation_split(z_a_BD: Tensor, z_b_BD: Tensor, *, weight: float = 5e-3) -> Tensor:
    """Check that the cross-correlation loss is (1 - lambda) L1 + lambda |C - I|^2, with C from `torch.corrcoef`."""
    num, dim = z_a_BD.shape
    # Huang et al. standardise by unbiased deviations, and divide the sums by B.
    correlation_DD = torch.corrcoef(torch.cat([z_a_BD, z_b_BD], 1).T)[:dim, dim:] * (num - 1) / num
    first = (1 - correlation_DD.diagonal()).square().sum()
    distance = (correlation_DD - torch.eye(dim, dtype=z_a_BD.dtype, device=z_a_BD.device)).square().sum()
    whole = barlow_twins_loss(z_a_BD, z_b_BD, off_diagonal_weight=weight, unbiased=True).loss
    return ((1 - weight) * first + weight * distance - whole).abs() / whole


def alignment_lemma(z_a_BD: Tensor, z_b_BD: Tensor) -> Tensor:
    """Return E |f1 - f2|^2 / (2 sqrt(D L1)) for standardised embeddings. The lemma says that it is at most 1."""
    a_BD, b_BD = ((z_BD - z_BD.mean(0)) / z_BD.std(0) for z_BD in (z_a_BD, z_b_BD))
    first = barlow_twins_loss(z_a_BD, z_b_BD, off_diagonal_weight=0, unbiased=True).loss
    return (a_BD - b_BD).square().sum(1).mean() / (2 * (z_a_BD.shape[1] * first).sqrt())


def linear_divergence(z_a_BD: Tensor, z_b_BD: Tensor) -> Tensor:
    """Check that the second term of the linear loss is |E f|^2, if its mean includes each view's pair with itself."""
    u_BD = torch.nn.functional.normalize(torch.cat([z_a_BD, z_b_BD]), dim=1)
    at_1, at_2 = (linear_loss(u_BD, u_BD, divergence_weight=weight).loss for weight in (1, 2))
    others, num = at_2 - at_1, len(u_BD)
    expected = u_BD.mean(0).square().sum()
    return (((num - 1) * others + 1) / num - expected).abs() / expected


def centre_moment(centre_KD: Tensor, p_K: Tensor) -> Tensor:
    """Check that |sum_k p_k mu_k mu_k^T - I|^2 is sum_kl (sqrt(p_k p_l) mu_k.mu_l - [k = l])^2 + D - K."""
    num, dim = centre_KD.shape
    eyes = (torch.eye(size, dtype=centre_KD.dtype, device=centre_KD.device) for size in (dim, num))
    eye_DD, eye_KK = eyes
    left = (centre_KD.T @ (p_K[:, None] * centre_KD) - eye_DD).square().sum()
    scaled_KD = p_K.sqrt()[:, None] * centre_KD
    return ((scaled_KD @ scaled_KD.T - eye_KK).square().sum() + dim - num - left).abs() / left


ON_PAIRS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "info_nce_split": info_nce_split,
    "correlation_split": correlation_split,
    "alignment_lemma": alignment_lemma,
    "linear_divergence": linear_divergence,
}


def measure_identities(settings: IdentitySettings, *, seeds: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Return the relative error of each identity, and the left side of the lemma over its right side; (S,) each."""
    keys = draw_keys(seeds, device)
    B, D, K = settings.batch_size, settings.dim, settings.num_classes
    drawn = normal(keys, 2 * B * D + K * D, purpose=_EMBEDDING).double()
    first_SBD, noise_SBD = drawn[:, : 2 * B * D].view(-1, 2, B, D).unbind(1)
    second_SBD, centre_SKD = first_SBD + settings.view_sd * noise_SBD, drawn[:, 2 * B * D :].view(-1, K, D)
    weight_SK = uniform(keys, K, purpose=_PROBABILITY).double() + 0.1
    found = {
        name: torch.stack([check(a_BD, b_BD) for a_BD, b_BD in zip(first_SBD, second_SBD, strict=True)])
        for name, check in ON_PAIRS.items()
    }
    p_SK = weight_SK / weight_SK.sum(1, keepdim=True)
    found["centre_moment"] = torch.stack([centre_moment(c, p) for c, p in zip(centre_SKD, p_SK, strict=True)])
    return found
