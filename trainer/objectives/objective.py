"""What every objective is: something called with the two views' embeddings that gives a loss and scalars to log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class ObjectiveOutput:
    """`loss` is a scalar with gradient: this rank's part, so that the mean over the ranks is the global loss.

    `metrics` are scalars without gradient, of this rank's part of the batch, on the device of the loss.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


class Objective(Protocol):
    """Called by every rank with embeddings (B, D) of the two views of its part of the batch, in any float type."""

    def __call__(self, z_a_BD: Tensor, z_b_BD: Tensor) -> ObjectiveOutput: ...


def contrastive_output(loss: Tensor, log_probability_N: Tensor, z_a_BD: Tensor, z_b_BD: Tensor) -> ObjectiveOutput:
    """Adds what any contrastive objective logs.

    alignment: mean cosine of the two views of a picture, 1 where they coincide (Wang and Isola 2020, up to an offset).
    positive_probability: mean softmax probability that an anchor gives its positive; 1 / candidates is chance.
    """
    metrics = {
        "alignment": F.cosine_similarity(z_a_BD.detach().float(), z_b_BD.detach().float()).mean(),
        "positive_probability": log_probability_N.detach().exp().mean(),
    }
    return ObjectiveOutput(loss, metrics)
