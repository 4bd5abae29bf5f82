"""Measure the divergence of class centres, and its bounds by Theorems 3 and 4 of Huang et al. 2023.

The population is finite: K classes of N samples of A views each, all equally probable. Its expectations are sums, so
inequalities on them have no sampling error. f1 and f2 are embeddings of two views of a sample, drawn with replacement.
f- is the embedding of a view of an independent sample. mu_k is the mean embedding of class k, and p = 1 / K its
probability.

The theorems have a term tau(sigma, delta). Its formula is in an appendix, not in the paper's text. Here tau is the
value that the steps of the proofs need, computed from the population. So each bound is a theorem without an open
constant:

- Theorem 3: log(e^x + e^y) is convex, so the mean of log(e^f1.f2 + e^f1.f-) over class k and class l is at least
  log(e^a_k + e^mu_k.mu_l). Here a_k is the mean of f1.f2 over class k, and a is the least a_k. It is at least
  1 - epsilon if views are at most epsilon apart. All pairs of classes together give L2. All pairs but one subtract at
  most tau.
- Theorem 4: C is the mean of f1 f2^T, and tau = |C - sum_k p mu_k mu_k^T|^2. So |sum_k p mu_k mu_k^T - I|^2 is at most
  2 |C - I|^2 + 2 tau. It equals sum_kl (p mu_k.mu_l - [k = l])^2 + D - K.

The sharpened bounds use the same inequalities, and keep the terms that the printed form drops. In Theorem 3 these are
the other pairs of classes. In Theorem 4 the sharpened bound uses |x + y| <= |x| + |y|, and that the pair occurs twice.

Shapes: M encoders, K classes, N samples of a class, A views of a sample, D dimensions, P = K N A embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.objectives.health import effective_rank

_BISECTIONS = 60


@dataclass(frozen=True)
class Population:
    """Expectations over the population of each encoder, (M, ...) in float64.

    Attributes:
        centre_MKD: mu_k.
        alignment_MK: mean of f1.f2 over class k.
        info_nce_divergence_M: mean of log(e^f1.f2 + e^f1.f-), which is L2 of Theorem 3.
        correlation_MDD: mean of f1 f2^T.
        rank_M: exp(entropy of the eigenvalues of the covariance of all embeddings, scaled to a sum of 1).
    """

    centre_MKD: Tensor
    alignment_MK: Tensor
    info_nce_divergence_M: Tensor
    correlation_MDD: Tensor
    rank_M: Tensor


def population_of(z_MKNAD: Tensor) -> Population:
    """Return the expectations that the bounds need, from unit embeddings."""
    z_MKNAD = z_MKNAD.double()
    mean_MKND = z_MKNAD.mean(3)
    z_MPD, rows_MND = z_MKNAD.flatten(1, 3), mean_MKND.flatten(1, 2)
    centred_MPD = z_MPD - z_MPD.mean(1, keepdim=True)
    covariance_MDD = centred_MPD.mT @ centred_MPD / z_MPD.shape[1]
    return Population(
        centre_MKD=mean_MKND.mean(2),
        alignment_MK=mean_MKND.square().sum(-1).mean(2),
        info_nce_divergence_M=torch.stack([_divergence(z_KNAD) for z_KNAD in z_MKNAD]),
        correlation_MDD=rows_MND.mT @ rows_MND / rows_MND.shape[1],
        rank_M=torch.func.vmap(effective_rank)(covariance_MDD),
    )


def _divergence(z_KNAD: Tensor) -> Tensor:
    """Return the mean of log(e^f1.f2 + e^f1.f-) over all P embeddings f1, their A views f2, and all P embeddings f-."""
    z_PD = z_KNAD.flatten(0, 2)
    own_PA = (z_KNAD @ z_KNAD.mT).flatten(0, 2)
    others_PP = z_PD @ z_PD.T
    # log(e^x + e^y) = y + log(1 + e^(x - y))
    return others_PP.mean() + F.softplus(own_PA[:, :, None] - others_PP[:, None, :]).mean()


def closest_centres(centre_MKD: Tensor) -> Tensor:
    """Return the greatest mu_k.mu_l of any two different classes, (M,)."""
    return greatest_off_diagonal(centre_MKD @ centre_MKD.mT)


def greatest_off_diagonal(values_KK: Tensor) -> Tensor:
    """Return the greatest value off the diagonal of (..., K, K) values, (...)."""
    own_KK = torch.eye(values_KK.shape[-1], dtype=torch.bool, device=values_KK.device)
    return values_KK.masked_fill(own_KK, -torch.inf).amax((-2, -1))


def theorem_3_bound(population: Population) -> Tensor:
    """Return log(exp((L2 + tau) / p^2) - exp(a)), (M,), which bounds mu_k.mu_l from above; the trivial bound is 1."""
    p = 1 / population.centre_MKD.shape[1]
    a_M = population.alignment_MK.amin(1)
    tau_M = -torch.logaddexp(a_M, torch.full_like(a_M, -1.0)).clamp(max=0)
    exponent_M = (population.info_nce_divergence_M + tau_M) / p**2
    return exponent_M + torch.log1p(-(a_M - exponent_M).exp())


def theorem_3_sharpened(population: Population) -> Tensor:
    """Return the greatest t = mu_k.mu_l, at most 1, for which the divergence of all pairs of classes can be L2; (M,).

    A class with itself has the product |mu_k|^2. The pair k, l has t, and occurs twice. The other pairs together have
    at least the divergence at their mean alignment and mean product. Their mean product follows from |sum_k p mu_k|^2,
    which is the mean product of all pairs.
    """
    centre_MKD, a_MK = population.centre_MKD, population.alignment_MK
    K = centre_MKD.shape[1]
    p = 1 / K
    square_MK = centre_MKD.square().sum(-1)
    own_M11 = (p**2 * torch.logaddexp(a_MK, square_MK)).sum(1)[:, None, None]
    remaining_M11 = (centre_MKD.mean(1).square().sum(-1) - (p**2 * square_MK).sum(1))[:, None, None]
    weight = 1 - p - 2 * p**2
    a_of_pair_MKK = (a_MK[:, :, None] + a_MK[:, None, :]) / 2
    a_of_rest_MKK = (p * (1 - p) * a_MK.sum(1)[:, None, None] - 2 * p**2 * a_of_pair_MKK) / weight

    def least_divergence(t_MKK: Tensor) -> Tensor:
        rest_MKK = (remaining_M11 - 2 * p**2 * t_MKK) / weight
        of_pair_MKK = 2 * p**2 * torch.logaddexp(a_of_pair_MKK, t_MKK)
        return own_M11 + of_pair_MKK + weight * torch.logaddexp(a_of_rest_MKK, rest_MKK)

    # Bisect above the minimum of this convex function, at which its derivative by t is 0.
    low_MKK = (weight * (a_of_pair_MKK - a_of_rest_MKK) + remaining_M11) / (1 - p)
    high_MKK = torch.ones_like(low_MKK)
    for _ in range(_BISECTIONS):
        middle_MKK = (low_MKK + high_MKK) / 2
        possible_MKK = least_divergence(middle_MKK) <= population.info_nce_divergence_M[:, None, None]
        low_MKK = torch.where(possible_MKK, middle_MKK, low_MKK)
        high_MKK = torch.where(possible_MKK, high_MKK, middle_MKK)
    return greatest_off_diagonal(high_MKK)


def theorem_4_bounds(population: Population) -> tuple[Tensor, Tensor]:
    """Return sqrt(2 (L2 + tau - (D - K) / 2)) / p and sqrt(((sqrt(L2) + sqrt(tau))^2 - (D - K)) / 2) / p, (M,) each.

    Here L2 = |C - I|^2. The first is the printed bound, the second the sharpened one. They are for embeddings of length
    sqrt(D), divided by D so that the trivial bound is 1.
    """
    K, D = population.centre_MKD.shape[1:]
    p = 1 / K
    correlation_MDD = D * population.correlation_MDD
    moment_MDD = D * p * population.centre_MKD.mT @ population.centre_MKD
    identity_DD = torch.eye(D, dtype=moment_MDD.dtype, device=moment_MDD.device)
    loss_M = (correlation_MDD - identity_DD).square().sum((-2, -1))
    tau_M = (correlation_MDD - moment_MDD).square().sum((-2, -1))
    printed_M = (2 * (loss_M + tau_M - (D - K) / 2)).clamp(min=0).sqrt() / p
    sharpened_M = (((loss_M.sqrt() + tau_M.sqrt()).square() - (D - K)) / 2).clamp(min=0).sqrt() / p
    return printed_M / D, sharpened_M / D


def classify(train_MKPD: Tensor, test_MKPD: Tensor, *, num_steps: int, learning_rate: float) -> dict[str, Tensor]:
    """Compare the nearest-centre classifier with a trained linear one, from P training embeddings of each class.

    The linear classifier starts as the nearest-centre classifier, argmax_k mu_k.f - |mu_k|^2 / 2. Adam reduces its
    cross-entropy on all embeddings at once.

    Returns the test errors "nearest_centre_error" and "linear_error", and "disagreements", the number of test
    embeddings on which nearest centre and its linear form differ; (M,) each.
    """
    train_MKPD, test_MKPD = train_MKPD.double(), test_MKPD.double()
    M, K, P, _ = train_MKPD.shape
    centre_MKD = train_MKPD.mean(2)
    label_KP = torch.arange(K, device=train_MKPD.device)[:, None]
    features_MND, test_MND = train_MKPD.flatten(1, 2), test_MKPD.flatten(1, 2)
    weight_MDK = centre_MKD.mT.clone().requires_grad_()
    bias_M1K = (-centre_MKD.square().sum(-1) / 2)[:, None].clone().requires_grad_()
    by_score_MKP = (test_MND @ weight_MDK + bias_M1K).detach().argmax(-1).view(M, K, -1)
    by_distance_MKP = torch.cdist(test_MND, centre_MKD).argmin(-1).view(M, K, -1)
    optimizer = torch.optim.Adam([weight_MDK, bias_M1K], lr=learning_rate)
    targets = label_KP.expand(K, P).flatten().repeat(M)
    for _ in range(num_steps):
        scores = (features_MND @ weight_MDK + bias_M1K).flatten(0, 1)
        optimizer.zero_grad()
        (F.cross_entropy(scores, targets) * M).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    trained_MKP = (test_MND @ weight_MDK + bias_M1K).detach().argmax(-1).view(M, K, -1)
    return {
        "nearest_centre_error": (by_distance_MKP != label_KP).double().mean((1, 2)),
        "linear_error": (trained_MKP != label_KP).double().mean((1, 2)),
        "disagreements": (by_distance_MKP != by_score_MKP).sum((1, 2)).double(),
    }
