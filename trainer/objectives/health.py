"""Compute cheap metrics that show whether the encoder has collapsed to a point or to a few directions.

Shapes: B pictures of this rank, G pictures of all ranks, N rows, D dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.distributed.collectives import all_gather_rows, world_size
from trainer.objectives.contrast import unit_pair

MAX_PICTURES = 256


@torch.no_grad()
def embedding_health(z_a_BD: Tensor, z_b_BD: Tensor) -> dict[str, Tensor]:
    """Return scalars of the embeddings of both views at unit length, float64 on their device.

    effective_rank: the `effective_rank` of the embeddings of both views, from 1 to the smaller of D and their number.
    mean_norm: the length of the mean embedding, 1 if all coincide.
    alignment: the mean cosine of the two views of a picture, 1 if they coincide. It is 1 minus half of the squared
        distance that Wang and Isola (2020) call alignment.
    uniformity: the mean of the `uniformity` of each view's embeddings.

    Every rank must call this at the same time, with equally many pictures, and gets the same values. One collective
    gathers the pictures of all ranks. Above `MAX_PICTURES` pictures, it gathers only the first few of each rank, so
    that the cost does not grow with the batch. The values need at least two pictures.

    Args:
        z_a_BD, z_b_BD: (B, D) embeddings of any length and float type.

    Raises:
        ValueError: if the embeddings are not (B, D) with equal shapes.
    """
    with torch.autocast(z_a_BD.device.type, enabled=False):
        num_rows = max(1, MAX_PICTURES // world_size())
        u_a_BD, u_b_BD = unit_pair(z_a_BD[:num_rows], z_b_BD[:num_rows])
        u_a_GD, u_b_GD = all_gather_rows(torch.cat([u_a_BD, u_b_BD], dim=1)).double().chunk(2, dim=1)
        u_ND = torch.cat([u_a_GD, u_b_GD])
        return {
            "effective_rank": effective_rank(u_ND),
            "mean_norm": u_ND.mean(0).norm(),
            "alignment": (u_a_GD * u_b_GD).sum(1).mean(),
            "uniformity": (uniformity(u_a_GD) + uniformity(u_b_GD)) / 2,
        }


def effective_rank(x_ND: Tensor) -> Tensor:
    """Return exp(entropy of the singular values, scaled to a sum of 1), a scalar (Roy and Vetterli 2007); not centred.

    It is k for k equal singular values, 1 for a matrix of zeros, and NaN if an entry is not finite. Pass float64,
    because the eigenvalues of the smaller of `x @ x.T` and `x.T @ x` are the squares of the singular values.
    """
    gram_KK = x_ND @ x_ND.T if len(x_ND) < x_ND.shape[1] else x_ND.T @ x_ND
    singular_K = torch.linalg.eigvalsh(gram_KK.nan_to_num()).clamp_min(0).sqrt()
    share_K = singular_K / singular_K.sum().clamp_min(torch.finfo(x_ND.dtype).tiny)
    rank = torch.special.entr(share_K).sum().exp()
    return torch.where(gram_KK.isfinite().all(), rank, torch.nan)


def uniformity(u_ND: Tensor) -> Tensor:
    """Return the log of the mean over all pairs of exp(-2 |u_i - u_j|^2), a scalar (Wang and Isola 2020, with t = 2).

    It is 0 if all rows coincide, and near -4 for random unit vectors in many dimensions.
    """
    return torch.pdist(u_ND).square().mul(-2).exp().mean().log()
