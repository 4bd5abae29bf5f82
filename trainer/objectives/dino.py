"""DINO (Caron et al. 2021): every view must predict the classes that a momentum teacher finds in the first two views.

There are no negatives and no labels: the classes are prototypes that are learned. The teacher's scores are centred and
sharpened, which keeps all samples from falling into one class or into all classes alike.

The head of the paper is cut in two: its layers are the head of the encoder (`encoder.head`, `encoder.embedding_size`),
and its last layer, with unit rows, is here.

Shapes: B samples of this rank, D dimensions, K prototypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from data_pipeline.core.schema import CountOrZero, ShareBelowOne, Temperature
from trainer.distributed.collectives import all_reduce_sum, world_size
from trainer.models.momentum import MomentumCopy
from trainer.objectives.objective import (
    BaseObjectiveConfig,
    Objective,
    ObjectiveInputs,
    ObjectiveOutput,
    ViewPair,
    mean_cosine,
)


class DINOConfig(BaseObjectiveConfig):
    """The config of DINO.

    num_prototypes: the number of classes, K; 65,536 in the paper.
    student_temperature, teacher_temperature: the scores are divided by them before the softmax.
    first_teacher_temperature, warmup_epochs: the teacher's temperature goes from the first one to `teacher_temperature`
        in equal steps within that many epochs.
    momentum: the share of the teacher's old weights at every step. It is constant here. In the paper, it rises from
        this value to 1 along a half cosine.
    center_momentum: the share of the old centre of the teacher's scores at every step.
    """

    copies_encoder: ClassVar[bool] = True
    has_trained_layers: ClassVar[bool] = True
    takes_further_views: ClassVar[bool] = True

    kind: Literal["dino"] = "dino"
    num_prototypes: Annotated[int, Field(ge=2, le=2**18)] = 4096
    student_temperature: Temperature = 0.1
    teacher_temperature: Temperature = 0.07
    first_teacher_temperature: Temperature = 0.04
    warmup_epochs: CountOrZero = 30
    momentum: ShareBelowOne = 0.996
    center_momentum: ShareBelowOne = 0.9

    def teacher_temperature_at(self, epoch: int) -> float:
        """Return the teacher's temperature in an epoch, from 0."""
        if epoch >= self.warmup_epochs:
            return self.teacher_temperature
        done = epoch / max(1, self.warmup_epochs - 1)
        return self.first_teacher_temperature + done * (self.teacher_temperature - self.first_teacher_temperature)

    def build(self, given: ObjectiveInputs) -> Objective:
        return DINO(self, encoder=given.encoder, embedding_size=given.embedding_size)


def dino_loss(
    student_BK: Sequence[Tensor],
    teacher_BK: Sequence[Tensor],
    center_K: Tensor,
    *,
    student_temperature: float = 0.1,
    teacher_temperature: float = 0.07,
) -> Tensor:
    """Return the mean cross-entropy of a student's view under a teacher's other view (Caron et al. 2021, equation 2).

    The mean is over the samples and over all pairs of a teacher's and a student's view, except pairs of the same view.
    The teacher's scores get no gradient. With a process group, this is the loss of this rank's part of the batch. The
    mean over equally large parts is the loss of the whole batch.

    Args:
        student_BK: (B, K) scores of each view, of any float type; computed in float32 at least, even under autocast.
        teacher_BK: (B, K) scores of the first views by the teacher, in the same order.
        center_K: (K,) is subtracted from the teacher's scores.

    Examples:
        >>> student = torch.tensor([[0.1, 0.0]]), torch.tensor([[0.0, 0.1]])
        >>> teacher = torch.tensor([[0.07, 0.0]]), torch.tensor([[0.0, 0.0]])
        >>> round(dino_loss(student, teacher, torch.zeros(2)).item(), 4)
        0.9288
    """
    with torch.autocast(center_K.device.type, enabled=False):
        student_BK, teacher_BK = (
            [each.to(torch.promote_types(each.dtype, torch.float32)) for each in scores]
            for scores in (student_BK, teacher_BK)
        )
        targets_BK = [((each.detach() - center_K) / teacher_temperature).softmax(1) for each in teacher_BK]
        log_probabilities_BK = [(each / student_temperature).log_softmax(1) for each in student_BK]
        terms = [
            -(target_BK * log_probability_BK).sum(1).mean()
            for number, target_BK in enumerate(targets_BK)
            for other, log_probability_BK in enumerate(log_probabilities_BK)
            if number != other
        ]
    return torch.stack(terms).mean()


class Prototypes(nn.Module):
    """A linear layer without bias on unit vectors, with rows of unit length: its scores are cosines.

    Weights come from torch's default generator.
    """

    def __init__(self, num_in: int, num_prototypes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(num_prototypes, num_in), std=0.02))

    def forward(self, z_BD: Tensor) -> Tensor:
        """Return the scores, (B, K), in float32 at least, even under autocast."""
        with torch.autocast(z_BD.device.type, enabled=False):
            unit_BD = F.normalize(z_BD.to(torch.promote_types(z_BD.dtype, torch.float32)), dim=1)
            return F.linear(unit_BD, F.normalize(self.weight, dim=1))


class DINO(Objective):
    """The objective of DINO. Its prototypes are trained; the teacher with its prototypes and the centre are state.

    The teacher sees the first two views. It follows at the beginning of each step, and so takes up the previous step of
    the optimizer. A call that may not update state changes neither the teacher nor the centre. Also logs
    `teacher_entropy`, the mean entropy of the teacher's classes: 0 or log K mean that the views do not differ.
    """

    center_K: Tensor

    def __init__(self, config: DINOConfig, *, encoder: nn.Module, embedding_size: int) -> None:
        super().__init__()
        self._config = config
        self.prototypes = Prototypes(embedding_size, config.num_prototypes)
        self.teacher = MomentumCopy(encoder, momentum=config.momentum)
        self.teacher_prototypes = MomentumCopy(self.prototypes, momentum=config.momentum)
        self.register_buffer("center_K", torch.zeros(config.num_prototypes))

    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair, *further_BD: Tensor) -> ObjectiveOutput:
        config = self._config
        temperature = config.teacher_temperature_at(pair.required_epoch())
        if pair.updates_state:
            self.teacher.follow()
            self.teacher_prototypes.follow()
        views = pair.views_a_BCHW, pair.views_b_BCHW
        teacher_2BD = [self.teacher(views_BCHW, updates_buffers=pair.updates_state) for views_BCHW in views]
        teacher_BK = [self.teacher_prototypes(z_BD) for z_BD in teacher_2BD]
        loss = dino_loss(
            [self.prototypes(z_BD) for z_BD in (z_a_BD, z_b_BD, *further_BD)],
            teacher_BK,
            self.center_K,
            student_temperature=config.student_temperature,
            teacher_temperature=temperature,
        )
        log_probability_2BK = ((torch.cat(teacher_BK) - self.center_K) / temperature).log_softmax(1)
        entropy = -(log_probability_2BK.exp() * log_probability_2BK).sum(1).mean()
        if pair.updates_state:
            mean_K = all_reduce_sum(torch.cat(teacher_BK).mean(0)) / world_size()
            self.center_K.lerp_(mean_K.to(self.center_K.dtype), 1 - config.center_momentum)
        return ObjectiveOutput(loss, {"alignment": mean_cosine(z_a_BD, z_b_BD), "teacher_entropy": entropy})
