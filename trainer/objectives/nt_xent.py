"""NT-Xent, the objective of SimCLR (Chen et al. 2020, section 2.1).

Each view of each picture must find the other view of the same picture among all views of the batch.

Shapes: B pictures of this rank, N = 2 B anchors, G = 2 B W candidates of all W ranks, D dimensions.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.schema import Temperature
from trainer.objectives.contrast import ContrastiveConfig, cross_entropy, margins
from trainer.objectives.objective import ObjectiveInputs, ObjectiveOutput, PureObjective, contrastive_output


class NTXentConfig(ContrastiveConfig):
    """The config of NT-Xent.

    negatives: both "views" of all other samples, or the other "samples" without a view, as in the theory of Wen and Li
        (2021). Samples take a third pass of the encoder, with batch statistics of their own.
    """

    kind: Literal["nt_xent"] = "nt_xent"
    temperature: Temperature = 0.5
    negatives: Literal["views", "samples"] = "views"

    @property
    def takes_samples(self) -> bool:
        return self.negatives == "samples"

    def check(self, run: Any) -> None:
        if self.takes_samples and run.data.mel is not None:
            raise ValueError("objective.negatives=samples is for pictures, not for sounds; set it to views")

    def build(self, given: ObjectiveInputs) -> PureObjective:
        loss = nt_xent_against_samples_loss if self.takes_samples else nt_xent_loss
        return PureObjective(loss, temperature=self.temperature, chunk_size=self.chunk_size)


def nt_xent_loss(
    z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float | Tensor, chunk_size: int | None = None
) -> ObjectiveOutput:
    """Return NT-Xent: the mean over 2 B anchors of -log softmax of the positive, without the anchor itself.

    With a process group, `z_a_BD` and `z_b_BD` are this rank's part of the batch, equally large on every rank, and
    negatives come from all ranks. The mean of the losses of the ranks is exactly the loss of the whole batch, and
    averaging parameter gradients over the ranks gives its gradient.

    Args:
        z_a_BD, z_b_BD: (B, D) embeddings of any length and float type; normalised here, in float32 even under autocast.
        temperature: above 0. A 0-d tensor gets a gradient, and its value is not checked.
        chunk_size: as in `ContrastiveConfig`; the loss is the same.

    Raises:
        ValueError: if the temperature is not positive, or if the embeddings are not (B, D) with equal shapes.

    Examples:
        >>> import torch
        >>> z_a = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> z_b = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
        >>> round(nt_xent_loss(z_a, z_b, temperature=0.5).loss.item(), 4)
        0.668
    """
    cross_entropy_N, alignment = cross_entropy(
        z_a_BD, z_b_BD, temperature=temperature, published=False, chunk_size=chunk_size
    )
    return contrastive_output(cross_entropy_N.mean(), -cross_entropy_N.detach(), z_a_BD, z_b_BD, alignment=alignment)


def nt_xent_against_samples_loss(
    z_a_BD: Tensor, z_b_BD: Tensor, z_BD: Tensor, *, temperature: float | Tensor, chunk_size: int | None = None
) -> ObjectiveOutput:
    """Return NT-Xent whose negatives are the embeddings `z_BD` of all other samples without a view.

    It is the mean over 2 B anchors of -log softmax of the positive among it and the negatives of all ranks, which get a
    gradient. Arguments and errors are as in `margins`, and the mean over the ranks is as in `nt_xent_loss`.
    """
    margin_N = margins(z_a_BD, z_b_BD, z_BD, temperature=temperature, chunk_size=chunk_size)
    log_probability_N = F.logsigmoid(margin_N)
    return contrastive_output(-log_probability_N.mean(), log_probability_N, z_a_BD, z_b_BD)
