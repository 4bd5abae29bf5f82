"""Both forms of NT-Xent, written from their formulas in float64 with a loop over every anchor and candidate."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def nt_xent_by_loop(z_a_BD: Tensor, z_b_BD: Tensor, temperature: float | Tensor) -> Tensor:
    """SimCLR's: every view of every picture is an anchor; all views but itself are candidates."""
    views = [z / z.norm() for z in [*z_a_BD.double(), *z_b_BD.double()]]
    num_pictures = len(z_a_BD)
    losses = []
    for i, anchor in enumerate(views):
        terms = [(anchor @ other / temperature).exp() for j, other in enumerate(views) if j != i]
        positive = (anchor @ views[(i + num_pictures) % len(views)] / temperature).exp()
        losses.append(-(positive / torch.stack(terms).sum()).log())
    return torch.stack(losses).mean()


def published_by_loop(z_a_BD: Tensor, z_b_BD: Tensor, temperature: float | Tensor) -> Tensor:
    """The published one: first views are anchors, every view is a candidate, log(2 B) is subtracted."""
    firsts, seconds = ([z / z.norm() for z in z_BD.double()] for z_BD in (z_a_BD, z_b_BD))
    losses = []
    for anchor, positive in zip(firsts, seconds, strict=True):
        denominator = torch.stack([(anchor @ other / temperature).exp() for other in [*firsts, *seconds]]).sum()
        losses.append(-(anchor @ positive / temperature - denominator.log()) - math.log(2 * len(firsts)))
    return torch.stack(losses).mean()
