"""Every pure loss, written from its formula in float64, with a loop over anchors and candidates or dimensions.

Shapes: B samples, D dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.objectives.sigreg import drawn_projections


def unit_rows(z_BD: Tensor) -> list[Tensor]:
    return [z / z.norm() for z in z_BD.double()]


def nt_xent(z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float | Tensor) -> Tensor:
    """Every view of every picture is an anchor; all views but itself are candidates."""
    views = [*unit_rows(z_a_BD), *unit_rows(z_b_BD)]
    losses = []
    for i, anchor in enumerate(views):
        terms = [(anchor @ other / temperature).exp() for j, other in enumerate(views) if j != i]
        positive = (anchor @ views[(i + len(z_a_BD)) % len(views)] / temperature).exp()
        losses.append(-(positive / torch.stack(terms).sum()).log())
    return torch.stack(losses).mean()


def published_nt_xent(z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float | Tensor) -> Tensor:
    """First views are anchors, every view is a candidate, and log(2 B) is subtracted."""
    firsts, seconds = unit_rows(z_a_BD), unit_rows(z_b_BD)
    losses = []
    for anchor, positive in zip(firsts, seconds, strict=True):
        denominator = torch.stack([(anchor @ other / temperature).exp() for other in [*firsts, *seconds]]).sum()
        losses.append(-(anchor @ positive / temperature - denominator.log()) - math.log(2 * len(firsts)))
    return torch.stack(losses).mean()


def _similarities(z_a_BD: Tensor, z_b_BD: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each of 2 B anchors: the cosine with its positive, and the cosines with its negatives."""
    views = [*unit_rows(z_a_BD), *unit_rows(z_b_BD)]
    num_samples = len(z_a_BD)
    found = []
    for i, anchor in enumerate(views):
        positive = anchor @ views[(i + num_samples) % len(views)]
        negatives = [anchor @ other for j, other in enumerate(views) if (i - j) % num_samples]
        found.append((positive, torch.stack(negatives)))
    return found


def nt_xent_against_samples(z_a_BD: Tensor, z_b_BD: Tensor, z_BD: Tensor, *, temperature: float) -> Tensor:
    """Every view is an anchor; its candidates are the other view of its picture, and all other pictures."""
    firsts, seconds, samples = unit_rows(z_a_BD), unit_rows(z_b_BD), unit_rows(z_BD)
    losses = []
    for anchors, positives in ((firsts, seconds), (seconds, firsts)):
        for i, anchor in enumerate(anchors):
            positive = (anchor @ positives[i] / temperature).exp()
            terms = [positive, *((anchor @ z / temperature).exp() for j, z in enumerate(samples) if j != i)]
            losses.append(-(positive / torch.stack(terms).sum()).log())
    return torch.stack(losses).mean()


def dcl(z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float | Tensor) -> Tensor:
    losses = [
        -(positive / temperature) + (negative_N / temperature).exp().sum().log()
        for positive, negative_N in _similarities(z_a_BD, z_b_BD)
    ]
    return torch.stack(losses).mean()


def ifm(z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float, epsilon: float, perturbed_weight: float) -> Tensor:
    losses = []
    for positive, negative_N in _similarities(z_a_BD, z_b_BD):
        terms = []
        for change in (0.0, epsilon):
            own = ((positive - change) / temperature).exp()
            terms.append(-(own / (own + ((negative_N + change) / temperature).exp().sum())).log())
        losses.append((terms[0] + perturbed_weight * terms[1]) / (1 + perturbed_weight))
    return torch.stack(losses).mean()


def macl(z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float, sensitivity: float, neutral_alignment: float) -> Tensor:
    found = _similarities(z_a_BD, z_b_BD)
    alignment = torch.stack([positive for positive, _ in found]).mean().detach()
    now = temperature * (1 + sensitivity * (alignment - neutral_alignment))
    losses = []
    for positive, negative_N in found:
        own = (positive / now).exp()
        probability = own / (own + (negative_N / now).exp().sum())
        losses.append(-probability.log() / (1 - probability.detach()))
    return torch.stack(losses).mean()


def symmetric_info_nce(z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float) -> Tensor:
    """The sum of two cross-entropies, each view of a sample against all views of the other kind."""
    total = torch.zeros((), dtype=torch.float64)
    for anchors, others in ((z_a_BD, z_b_BD), (z_b_BD, z_a_BD)):
        rows, columns = unit_rows(anchors), unit_rows(others)
        for number, anchor in enumerate(rows):
            terms = torch.stack([(anchor @ other / temperature).exp() for other in columns])
            total = total - (terms[number] / terms.sum()).log() / len(rows)
    return total


def split(
    z_a_BD: Tensor,
    z_b_BD: Tensor,
    *,
    temperature: float,
    divergence_weight: float,
) -> Tensor:
    firsts, seconds = unit_rows(z_a_BD), unit_rows(z_b_BD)
    losses = []
    for i, first in enumerate(firsts):
        others = [second for j, second in enumerate(seconds) if j != i]
        terms = torch.stack([(first @ other / temperature).exp() for other in others])
        losses.append((first - seconds[i]).square().sum() + divergence_weight * terms.sum().log())
    return torch.stack(losses).mean()


def linear(z_a_BD: Tensor, z_b_BD: Tensor, *, divergence_weight: float) -> Tensor:
    firsts, seconds = unit_rows(z_a_BD), unit_rows(z_b_BD)
    positives = [first @ second for first, second in zip(firsts, seconds, strict=True)]
    negatives = [first @ second for i, first in enumerate(firsts) for j, second in enumerate(seconds) if i != j]
    return divergence_weight * torch.stack(negatives).mean() - torch.stack(positives).mean()


def info_nce(z_a_BD: Tensor, z_b_BD: Tensor) -> Tensor:
    """One negative: the second view of the next sample."""
    firsts, seconds = unit_rows(z_a_BD), unit_rows(z_b_BD)
    losses = []
    for i, first in enumerate(firsts):
        positive = (first @ seconds[i]).exp()
        negative = (first @ seconds[(i + 1) % len(seconds)]).exp()
        losses.append(-(positive / (positive + negative)).log())
    return torch.stack(losses).mean()


def barlow_twins(z_a_BD: Tensor, z_b_BD: Tensor, *, off_diagonal_weight: float, unbiased: bool = False) -> Tensor:
    """One pair of dimensions after the other."""
    batch_size, size = z_a_BD.shape
    standardised = []
    for z_BD in (z_a_BD.double(), z_b_BD.double()):
        columns = [z_BD[:, i] - z_BD[:, i].sum() / batch_size for i in range(size)]
        sums = [column.square().sum() for column in columns]
        variances = [each / (batch_size - 1) if unbiased else each / batch_size + 1e-5 for each in sums]
        standardised.append([column / variance.sqrt() for column, variance in zip(columns, variances, strict=True)])
    loss = torch.zeros((), dtype=torch.float64)
    for i, a_B in enumerate(standardised[0]):
        for j, b_B in enumerate(standardised[1]):
            correlation = (a_B * b_B).sum() / batch_size
            loss = loss + ((1 - correlation) ** 2 if i == j else off_diagonal_weight * correlation**2)
    return loss


def vicreg(
    z_a_BD: Tensor,
    z_b_BD: Tensor,
    *,
    invariance_weight: float,
    variance_weight: float,
    covariance_weight: float,
    epsilon: float,
) -> Tensor:
    """One pair of dimensions after the other."""
    num_rows, size = z_a_BD.shape
    loss = invariance_weight * (z_a_BD - z_b_BD).double().square().sum() / (num_rows * size)
    for z_BD in (z_a_BD.double(), z_b_BD.double()):
        columns = [column - column.mean() for column in z_BD.T]
        for i, column in enumerate(columns):
            deviation = ((column @ column) / (num_rows - 1) + epsilon).sqrt()
            loss = loss + variance_weight * (1 - deviation).clamp_min(0) / size / 2
            for j, other in enumerate(columns):
                if i != j:
                    loss = loss + covariance_weight * ((column @ other) / (num_rows - 1)).square() / size
    return loss


def sigreg(z_a_BD: Tensor, z_b_BD: Tensor, *, normality_weight: float, num_projections: int) -> Tensor:
    """One view, projection and point of the integral after the other, on both sides of 0."""
    size = z_a_BD.shape[1]
    projections = drawn_projections(num_projections, size, seed=0, step=0, device=z_a_BD.device).double()
    loss = (1 - normality_weight) * (z_a_BD - z_b_BD).double().square().mean() / 4  # from the mean of both views
    for z_BD in (z_a_BD.double(), z_b_BD.double()):
        for projection in projections:
            x_B = z_BD @ projection
            for number in range(-16, 17):
                t = 3 * number / 16
                gap = torch.exp(1j * t * x_B).mean() - math.exp(-(t**2) / 2)
                share = (3 / 16 if abs(number) < 16 else 3 / 32) * math.exp(-(t**2) / 2)
                loss = loss + normality_weight * share * len(x_B) * gap.abs().square() / (2 * num_projections)
    return loss
