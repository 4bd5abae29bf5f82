"""BYOL (Grill et al. 2020): the prediction from each view must match a momentum teacher's embedding of the other view.

There are no negatives. The teacher is a momentum copy of the encoder and gets no gradient.

Shapes: B samples of this rank, D dimensions.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor, nn

from data_pipeline.core.schema import ShareBelowOne
from trainer.models.heads import HeadConfig, build_head
from trainer.models.momentum import MomentumCopy
from trainer.objectives.objective import (
    BaseObjectiveConfig,
    Objective,
    ObjectiveInputs,
    ObjectiveOutput,
    ViewPair,
    mean_cosine,
)
from trainer.objectives.simsiam import predict, simsiam_loss


class BYOLConfig(BaseObjectiveConfig):
    """The config of BYOL.

    predictor: the network from embeddings to predictions; its batch norm is over the batch of all ranks.
    momentum: the share of the teacher's old weights at every step towards the encoder. It is constant here. In the
        paper, it rises from this value to 1 along a half cosine.
    """

    copies_encoder: ClassVar[bool] = True
    has_trained_layers: ClassVar[bool] = True
    can_be_recorded: ClassVar[bool] = True

    kind: Literal["byol"] = "byol"
    predictor: HeadConfig = HeadConfig(hidden_sizes=(4096,), batch_norm=True)
    momentum: ShareBelowOne = 0.996

    def build(self, given: ObjectiveInputs) -> Objective:
        return BYOL(self, encoder=given.encoder, embedding_size=given.embedding_size)


def byol_loss(p_a_BD: Tensor, p_b_BD: Tensor, teacher_a_BD: Tensor, teacher_b_BD: Tensor) -> Tensor:
    """Return the sum over both views of the mean squared distance of unit vectors (Grill et al. 2020, equation 2).

    The vectors are a prediction and the teacher's embedding of the other view. The squared distance is 2 - 2 cosine, so
    the loss is between 0 and 8. The teacher's embeddings get no gradient. The mean over the ranks is as in
    `nt_xent_loss`.

    Args:
        p_a_BD, p_b_BD: (B, D) predictions from the first and the second view, of any length and float type.
        teacher_a_BD, teacher_b_BD: (B, D) embeddings of the first and the second view by the teacher. All are
            normalised here, in float32 at least, even under autocast.

    Raises:
        ValueError: if a prediction and its embedding are not (B, D) with equal shapes.

    Examples:
        >>> import torch
        >>> p_a, p_b = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> teacher_a, teacher_b = torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0, 0.0]])
        >>> round(byol_loss(p_a, p_b, teacher_a, teacher_b).item(), 4)
        0.4
    """
    return 4 + 4 * simsiam_loss(p_a_BD, p_b_BD, teacher_a_BD, teacher_b_BD)


class BYOL(Objective):
    """The objective of BYOL. Its predictor is trained; the teacher and the running statistics of both are state.

    The teacher follows the encoder at the beginning of each step, and so takes up the previous step of the optimizer. A
    call that may not update state does not change the teacher or the running statistics. Weights of the predictor come
    from torch's default generator.
    """

    def __init__(self, config: BYOLConfig, *, encoder: nn.Module, embedding_size: int) -> None:
        super().__init__()
        self.teacher = MomentumCopy(encoder, momentum=config.momentum)
        self.predictor = build_head(config.predictor, embedding_size, embedding_size, batch_norm="synchronized")

    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair) -> ObjectiveOutput:
        if pair.updates_state:
            self.teacher.follow()
        teacher_a_BD, teacher_b_BD = (
            self.teacher(views_BCHW, updates_buffers=pair.updates_state)
            for views_BCHW in (pair.views_a_BCHW, pair.views_b_BCHW)
        )
        p_a_BD, p_b_BD = (
            predict(self.predictor, z_BD, updates_buffers=pair.updates_state) for z_BD in (z_a_BD, z_b_BD)
        )
        loss = byol_loss(p_a_BD, p_b_BD, teacher_a_BD, teacher_b_BD)
        return ObjectiveOutput(loss, {"alignment": mean_cosine(z_a_BD, z_b_BD)})
