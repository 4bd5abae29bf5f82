"""The joint loss: a contrastive loss with a label beside one without (Xue et al. 2023, arXiv 2305.16536).

With the label, all views of all samples of a class are positives (Khosla et al. 2020), which may lose what differs
within a class. Without it, the other view is the positive, and an easy feature may suppress the class. The sum of both
shows what an encoder can hold of both features if it is told one of them: a ceiling for cures that know no label.

Shapes: B samples of this rank, N = 2 B anchors, G views of the samples of all ranks, K classes, D dimensions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from data_pipeline.core.schema import PositiveShare, Temperature
from trainer.objectives.contrast import (
    ContrastiveConfig,
    candidates,
    check_temperature,
    log_sums,
    own_rows_first,
    unit_pair,
)
from trainer.objectives.objective import Objective, ObjectiveInputs, ObjectiveOutput, ViewPair, contrastive_output
from trainer.objectives.supervised import LabelledConfig


class JointContrastiveConfig(LabelledConfig, ContrastiveConfig):
    """The config of the joint loss.

    supervised_weight: the weight of the loss with the label; the loss without it has the rest of 1.
    """

    kind: Literal["joint_contrastive"] = "joint_contrastive"
    temperature: Temperature = 0.1
    supervised_weight: PositiveShare = 0.5

    def build(self, given: ObjectiveInputs) -> Objective:
        self.check_labels(given.num_classes)
        return JointContrastive(self, num_classes=given.num_classes[self.label])


def joint_contrastive_loss(
    z_a_BD: Tensor,
    z_b_BD: Tensor,
    label_B: Tensor,
    *,
    num_classes: int,
    temperature: float,
    supervised_weight: float,
    chunk_size: int | None = None,
) -> ObjectiveOutput:
    """Return `supervised_weight` * the loss with the label + (1 - `supervised_weight`) * NT-Xent.

    The loss with the label is the mean over 2 B anchors and over the positives of each of -log softmax of the positive
    among all other views (Khosla et al. 2020, equation 2). The positives are all other views with the anchor's label; a
    sample without a label has its other view alone. An anchor's cosines with its positives add up to one product with
    the sum of its class, so no matrix but that of the softmax is in memory, and `chunk_size` cuts that one.

    `label_B` is (B,) int64 in [0, `num_classes`), or `NO_LABEL`. The other arguments, types and errors are as in
    `trainer.objectives.contrast.margins`, and the mean over the ranks is as in `nt_xent_loss`.

    Examples:
        >>> z_a = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> z_b = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
        >>> one_class = {"label_B": torch.tensor([0, 0]), "num_classes": 1, "temperature": 0.5}
        >>> round(joint_contrastive_loss(z_a, z_b, **one_class, supervised_weight=1.0).loss.item(), 4)
        1.468
    """
    check_temperature(temperature)
    with torch.autocast(z_a_BD.device.type, enabled=False):
        u_BD, v_BD = unit_pair(z_a_BD, z_b_BD)
        own_ND, all_GD = torch.cat([u_BD, v_BD]), candidates(u_BD, v_BD)
        own_N1 = torch.arange(len(own_ND), device=u_BD.device)[:, None]
        log_sum_N = log_sums(own_ND / temperature, all_GD, own_N1, chunk_size)
        other_view_N = (u_BD * v_BD).sum(1).repeat(2)
        label_G1 = own_rows_first(label_B.repeat(2))[:, None]
        is_class_GK = (label_G1 == torch.arange(num_classes, device=u_BD.device)).to(u_BD.dtype)
        is_class_NK = is_class_GK[: len(own_ND)]
        num_others_N = is_class_NK @ is_class_GK.sum(0) - 1  # -1 without a label, else 1 at least
        of_class_N = (own_ND * (is_class_NK @ (is_class_GK.T @ all_GD) - own_ND)).sum(1) / num_others_N
        of_class_N = torch.where(num_others_N > 0, of_class_N, other_view_N)
        positive_N = supervised_weight * of_class_N + (1 - supervised_weight) * other_view_N
        loss = (log_sum_N - positive_N / temperature).mean()
    return contrastive_output(loss, other_view_N / temperature - log_sum_N, z_a_BD, z_b_BD)


class JointContrastive(Objective):
    """The objective of the joint loss, which reads one label of a batch."""

    def __init__(self, config: JointContrastiveConfig, *, num_classes: int) -> None:
        super().__init__()
        self._label = config.label
        self._settings = {"num_classes": num_classes, **config.model_dump(exclude={"kind", "label"})}

    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair) -> ObjectiveOutput:
        return joint_contrastive_loss(z_a_BD, z_b_BD, pair.labels[self._label], **self._settings)
