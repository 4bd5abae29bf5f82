"""NT-Xent in the form of the code published with Tamkin et al. 2022, which differs from SimCLR.

Only the embeddings of the first view are anchors. An anchor's similarity with itself stays in its denominator, where it
adds exp(1 / t) and no gradient. The loss subtracts log(number of candidates). It is therefore negative when SimCLR's
loss is near 0, and the softmax probability of the positive never exceeds one half.

Shapes: B pictures of this rank, G = 2 B W candidates of all W ranks, D dimensions.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from torch import Tensor

from data_pipeline.core.schema import Temperature
from trainer.distributed.collectives import world_size
from trainer.objectives.contrast import ContrastiveConfig, cross_entropy
from trainer.objectives.objective import ObjectiveInputs, ObjectiveOutput, PureObjective, contrastive_output


class PublishedNTXentConfig(ContrastiveConfig):
    """The config of the published NT-Xent."""

    note: ClassVar[str | None] = (
        "the published NT-Xent is negative by design: it keeps the anchor's similarity with itself in the denominator "
        "and subtracts log(2B)"
    )

    kind: Literal["nt_xent_published"] = "nt_xent_published"
    temperature: Temperature = 0.07

    def build(self, given: ObjectiveInputs) -> PureObjective:
        return PureObjective(published_nt_xent_loss, temperature=self.temperature, chunk_size=self.chunk_size)


def published_nt_xent_loss(
    z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float | Tensor, chunk_size: int | None = None
) -> ObjectiveOutput:
    """Return the published form: the mean over B anchors of -log softmax of the positive, minus log of G.

    If both views of every picture coincide, orthogonal to all others, it is log(2 exp(1 / t) + G - 2) - 1 / t - log G:
    -5.5450 at t = 0.07, G = 512. It can fall a little lower, because the cosines of two pictures can be negative: in a
    batch of B, all -1 / (B - 1). Arguments, types, errors and the mean over the ranks are as in `nt_xent_loss`.
    """
    cross_entropy_B, alignment = cross_entropy(
        z_a_BD, z_b_BD, temperature=temperature, published=True, chunk_size=chunk_size
    )
    loss = cross_entropy_B.mean() - math.log(2 * len(z_a_BD) * world_size())
    return contrastive_output(loss, -cross_entropy_B.detach(), z_a_BD, z_b_BD, alignment=alignment)
