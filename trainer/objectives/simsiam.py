"""SimSiam (Chen and He 2021): the prediction from each view must point in the direction of the other embedding.

Shapes: B pictures of this rank, D dimensions.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from trainer.models.activation_checkpointing import buffers_untouched
from trainer.models.heads import HeadConfig, build_head
from trainer.objectives.contrast import unit_pair
from trainer.objectives.objective import (
    BaseObjectiveConfig,
    Objective,
    ObjectiveInputs,
    ObjectiveOutput,
    ViewPair,
    mean_cosine,
)


class SimSiamConfig(BaseObjectiveConfig):
    """The config of SimSiam.

    predictor: the network from embeddings to predictions; its batch norm is over the batch of all ranks.

    The predictor's learning rate is the encoder's. Chen and He (2021, section 4.1) keep it constant.
    """

    has_trained_layers: ClassVar[bool] = True
    can_be_recorded: ClassVar[bool] = True

    kind: Literal["simsiam"] = "simsiam"
    predictor: HeadConfig = HeadConfig(hidden_sizes=(512,), batch_norm=True)

    def build(self, given: ObjectiveInputs) -> Objective:
        return SimSiam(self, embedding_size=given.embedding_size)


def simsiam_loss(p_a_BD: Tensor, p_b_BD: Tensor, z_a_BD: Tensor, z_b_BD: Tensor) -> Tensor:
    """Return minus the mean cosine of each prediction with the other view's embedding (Chen and He 2021, eq. 4).

    The embeddings get no gradient. The mean over the ranks is as in `nt_xent_loss`.

    Args:
        p_a_BD, p_b_BD: (B, D) predictions of any length and float type, computed from `z_a_BD` and `z_b_BD`.
        z_a_BD, z_b_BD: (B, D) embeddings. All are normalised here, in float32 at least, even under autocast.

    Raises:
        ValueError: if a prediction and its embedding are not (B, D) with equal shapes.

    Examples:
        >>> p_a, p_b = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> z_a, z_b = torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0, 0.0]])
        >>> round(simsiam_loss(p_a, p_b, z_a, z_b).item(), 4)
        -0.9
    """
    return (_negative_cosine(p_a_BD, z_b_BD.detach()) + _negative_cosine(p_b_BD, z_a_BD.detach())) / 2


class SimSiam(Objective):
    """The objective of SimSiam with its predictor, which is trained; the running statistics of batch norm are state.

    Each view passes the predictor alone. Weights come from torch's default generator. A call that may not update state
    does not change the running statistics.
    """

    def __init__(self, config: SimSiamConfig, *, embedding_size: int) -> None:
        super().__init__()
        self.predictor = build_head(config.predictor, embedding_size, embedding_size, batch_norm="synchronized")

    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair) -> ObjectiveOutput:
        p_a_BD, p_b_BD = (
            predict(self.predictor, z_BD, updates_buffers=pair.updates_state) for z_BD in (z_a_BD, z_b_BD)
        )
        loss = simsiam_loss(p_a_BD, p_b_BD, z_a_BD, z_b_BD)
        return ObjectiveOutput(loss, {"alignment": mean_cosine(z_a_BD, z_b_BD)})


def predict(predictor: nn.Module, z_BD: Tensor, *, updates_buffers: bool) -> Tensor:
    """Return the predictions from embeddings (B, D), in float32 at least, even under autocast.

    With `updates_buffers=False`, the running statistics of the predictor do not change.
    """
    with (
        torch.autocast(z_BD.device.type, enabled=False),
        nullcontext() if updates_buffers else buffers_untouched(predictor),
    ):
        p_BD: Tensor = predictor(z_BD.to(torch.promote_types(z_BD.dtype, torch.float32)))
    return p_BD


def _negative_cosine(p_BD: Tensor, z_BD: Tensor) -> Tensor:
    with torch.autocast(p_BD.device.type, enabled=False):
        unit_p_BD, unit_z_BD = unit_pair(p_BD, z_BD)
        return -(unit_p_BD * unit_z_BD).sum(1).mean()
