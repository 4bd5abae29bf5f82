"""Supervised training: a linear classifier of one label on the embeddings, trained together with the encoder.

It shows what the same encoder learns of a label that it is told, on the same views: the ceiling of a probe for that
label. The classifier reads the embedding, as every other objective does, so the encoder of a run and its readings are
the same for all objectives. With an `encoder.head` without hidden layers, the classifier is linear in the pooled
features as well. Batch norm also sees samples without the label.

Shapes: B samples of this rank, N views of each, M = N B views, D dimensions, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data_pipeline.core.errors import UserError, nearest
from data_pipeline.core.sample import BASE, NO_LABEL
from data_pipeline.core.schema import LabelName
from trainer.distributed.collectives import all_reduce_sum, world_size
from trainer.objectives.objective import (
    BaseObjectiveConfig,
    Objective,
    ObjectiveInputs,
    ObjectiveOutput,
    ViewPair,
    mean_cosine,
)
from trainer.objectives.simsiam import predict


class LabelledConfig(BaseObjectiveConfig):
    """The base of the configs of objectives that are told one label.

    label: the name of the label. Samples without it take no part in the loss of the label.
    """

    needs_labels: ClassVar[bool] = True

    label: LabelName = BASE

    def check(self, run: Any) -> None:
        if run.data.overlay == "online_per_view" and self.label != BASE:
            raise ValueError(
                f"objective.label={self.label} is a label of the first view only with data.overlay=online_per_view, "
                "which draws another overlay for the second; set data.overlay=online"
            )

    def check_labels(self, num_classes: Mapping[str, int]) -> None:
        if self.label not in num_classes:
            raise UserError(
                f"objective.label={self.label} is no label of the train set{nearest(self.label, num_classes)}"
            )
        if num_classes[self.label] < 2:
            raise UserError(
                f"objective.label={self.label} has a single class, so there is nothing to learn; set another label"
            )


class SupervisedConfig(LabelledConfig):
    """The config of supervised training."""

    has_trained_layers: ClassVar[bool] = True
    takes_further_views: ClassVar[bool] = True
    can_be_recorded: ClassVar[bool] = True

    kind: Literal["supervised"] = "supervised"

    def build(self, given: ObjectiveInputs) -> Objective:
        self.check_labels(given.num_classes)
        return Supervised(self, embedding_size=given.embedding_size, num_classes=given.num_classes[self.label])


def labelled_cross_entropy(logits_BK: Tensor, label_B: Tensor) -> Tensor:
    """Return the mean cross-entropy of the samples that have the label; 0, with zero gradients, if none has it.

    With a process group, the mean is over the labelled samples of the whole batch. Its mean over the ranks is as in
    `nt_xent_loss`.

    Args:
        logits_BK: (B, K) of any float type; computed in float32 at least, even under autocast.
        label_B: (B,) int64 in [0, K), or `NO_LABEL`.

    Examples:
        >>> logits = torch.tensor([[0.0, 0.0], [9.0, -9.0], [5.0, 1.0]])
        >>> round(labelled_cross_entropy(logits, torch.tensor([1, 0, NO_LABEL])).item(), 4)
        0.3466
    """
    with torch.autocast(logits_BK.device.type, enabled=False):
        logits_BK = logits_BK.to(torch.promote_types(logits_BK.dtype, torch.float32))
        loss_B = F.cross_entropy(logits_BK, label_B, ignore_index=NO_LABEL, reduction="none")
        return _mean_of_labelled(loss_B, label_B)


class Supervised(Objective):
    """The objective of supervised training. Its classifier is trained, with weights from torch's default generator.

    Also logs `accuracy`, the share of the views of labelled samples whose class is right.
    """

    def __init__(self, config: SupervisedConfig, *, embedding_size: int, num_classes: int) -> None:
        super().__init__()
        self._label = config.label
        self.classifier = nn.Linear(embedding_size, num_classes)

    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair, *further_BD: Tensor) -> ObjectiveOutput:
        z_NBD = z_a_BD, z_b_BD, *further_BD
        label_M = pair.labels[self._label].repeat(len(z_NBD))
        logits_MK = predict(self.classifier, torch.cat(z_NBD), updates_buffers=pair.updates_state)
        is_right_M = (logits_MK.detach().argmax(1) == label_M).to(logits_MK.dtype)
        metrics = {"alignment": mean_cosine(z_a_BD, z_b_BD), "accuracy": _mean_of_labelled(is_right_M, label_M)}
        return ObjectiveOutput(labelled_cross_entropy(logits_MK, label_M), metrics)


def _mean_of_labelled(value_B: Tensor, label_B: Tensor) -> Tensor:
    """Return this rank's share of the mean over the labelled samples of all ranks; others have the value 0."""
    num_labelled = all_reduce_sum((label_B != NO_LABEL).sum().to(value_B.dtype))
    return world_size() * value_B.sum() / num_labelled.clamp_min(1)
