"""What every objective is: something called with the two views' embeddings that gives a loss and scalars to log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from data_pipeline.core.schema import Schema


@dataclass(frozen=True)
class ViewPair:
    """What the embeddings were made from, for objectives that ask for more than embeddings.

    Attributes:
        views_a_BCHW, views_b_BCHW: the two views of this rank's part of the batch.
        index_B: (B,) int64, dataset indices of the samples.
        step: of training, from 0.
        updates_state: whether this call may change the objective's own state (queue, bank, momentum encoder). False
            where the viewmaker takes a step of its own on views that the encoder does not learn from.
    """

    views_a_BCHW: Tensor
    views_b_BCHW: Tensor
    index_B: Tensor
    step: int
    updates_state: bool = True


@dataclass(frozen=True)
class ObjectiveOutput:
    """`loss` is a scalar with gradient: this rank's part, so that the mean over the ranks is the global loss.

    `metrics` are scalars without gradient, of this rank's part of the batch, on the device of the loss.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


class ObjectiveSettings(Schema):
    """The base of the configs of objectives."""

    def note(self, *, global_batch_size: int) -> str | None:
        """Return what a reader of the log must know to read the loss, in one sentence; None if nothing is unusual."""
        return None


class Objective(nn.Module, ABC):
    """Called by every rank with embeddings (B, D) of the two views of its part of the batch, in any float type.

    Parameters that ask for a gradient (a predictor) are trained together with the encoder. Buffers and frozen modules
    (a queue, a bank, a momentum encoder) are state, which is saved with every checkpoint.
    """

    @abstractmethod
    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair) -> ObjectiveOutput: ...

    def saved_state(self) -> dict[str, Tensor]:
        """All state, the same for any number of ranks. Every rank calls this at the same time."""
        return self.state_dict()

    def load_saved(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `saved_state` gave, on any number of ranks."""
        self.load_state_dict(state)


def mean_cosine(z_a_BD: Tensor, z_b_BD: Tensor) -> Tensor:
    """The mean cosine of the two views' embeddings, a scalar without gradient: what every objective logs as alignment.

    1 where the views coincide (Wang and Isola 2020, up to an offset).
    """
    return F.cosine_similarity(z_a_BD.detach().float(), z_b_BD.detach().float()).mean()


def contrastive_output(loss: Tensor, log_probability_N: Tensor, z_a_BD: Tensor, z_b_BD: Tensor) -> ObjectiveOutput:
    """Adds what any contrastive objective logs.

    alignment: `mean_cosine` of the two views.
    positive_probability: mean softmax probability that an anchor gives its positive; 1 / candidates is chance.
    """
    metrics = {
        "alignment": mean_cosine(z_a_BD, z_b_BD),
        "positive_probability": log_probability_N.detach().exp().mean(),
    }
    return ObjectiveOutput(loss, metrics)
