"""The interface of objectives: a module that turns the embeddings of two views into a loss and scalars to log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from data_pipeline.core.schema import Schema


@dataclass(frozen=True)
class ViewPair:
    """The inputs of a step, for objectives that need more than embeddings.

    Attributes:
        views_a_BCHW, views_b_BCHW: the two views of this rank's part of the batch.
        index_B: (B,) int64, dataset indices of the samples.
        step: the training step, from 0.
        updates_state: whether this call may change the state of the objective (queue, bank, momentum encoder). False
            if only the viewmaker learns from these views.
    """

    views_a_BCHW: Tensor
    views_b_BCHW: Tensor
    index_B: Tensor
    step: int
    updates_state: bool = True


@dataclass(frozen=True)
class ObjectiveOutput:
    """The result of an objective.

    `loss` is a scalar with gradient for this rank's part of the batch. Its mean over the ranks is the global loss.
    `metrics` are scalars without gradient for the same part, on the device of the loss.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


class BaseObjectiveConfig(Schema):
    """The base of the configs of objectives."""

    def note(self, *, global_batch_size: int) -> str | None:
        """Return a sentence for the log that explains an unusual loss; None if the loss is as expected."""
        return None


class Objective(nn.Module, ABC):
    """A loss. Every rank calls it with embeddings (B, D) of both views of its part of the batch, in any float type.

    Parameters with a gradient (a predictor) are trained together with the encoder. Buffers and frozen modules (a queue,
    a bank, a momentum encoder) are state, which every checkpoint saves.
    """

    @abstractmethod
    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair) -> ObjectiveOutput: ...

    def saved_state(self) -> dict[str, Tensor]:
        """Return all state, equal on any number of ranks. Every rank must call this at the same time."""
        return self.state_dict()

    def load_saved(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `saved_state`, on any number of ranks."""
        self.load_state_dict(state)


def mean_cosine(z_a_BD: Tensor, z_b_BD: Tensor) -> Tensor:
    """Return the mean cosine of the embeddings of the two views, a scalar without gradient.

    Every objective logs it as alignment. It is 1 if the views coincide (Wang and Isola 2020, up to scale and offset).
    """
    return F.cosine_similarity(z_a_BD.detach().float(), z_b_BD.detach().float()).mean()


def contrastive_output(loss: Tensor, log_probability_N: Tensor, z_a_BD: Tensor, z_b_BD: Tensor) -> ObjectiveOutput:
    """Return the loss with the metrics of every contrastive objective.

    alignment: the `mean_cosine` of the two views.
    positive_probability: the mean softmax probability of an anchor's positive; chance is 1 / number of candidates.
    """
    metrics = {
        "alignment": mean_cosine(z_a_BD, z_b_BD),
        "positive_probability": log_probability_N.detach().exp().mean(),
    }
    return ObjectiveOutput(loss, metrics)
