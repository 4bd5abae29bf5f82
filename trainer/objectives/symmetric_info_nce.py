"""Symmetric InfoNCE: each view must find the other view of its sample among the other views of all samples.

A view is compared with views of the other kind only, never with views of its own kind. Chen, Luo and Li (2021) study
feature suppression with this loss, and add the two cross-entropies. CLIP (Radford et al. 2021) takes their mean.

Shapes: B samples of this rank, G samples of all ranks, D dimensions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from data_pipeline.core.schema import Temperature
from trainer.objectives.contrast import ContrastiveConfig, candidates, check_temperature, log_sums, unit_pair
from trainer.objectives.objective import ObjectiveInputs, ObjectiveOutput, PureObjective, contrastive_output

Total = Literal["sum", "mean"]


class SymmetricInfoNCEConfig(ContrastiveConfig):
    """The config of symmetric InfoNCE.

    total: the "sum" of the two cross-entropies, as Chen, Luo and Li (2021), or their "mean", as CLIP.
    """

    kind: Literal["symmetric_info_nce"] = "symmetric_info_nce"
    temperature: Temperature = 0.1
    total: Total = "sum"

    def build(self, given: ObjectiveInputs) -> PureObjective:
        return PureObjective(symmetric_info_nce_loss, **self.model_dump(exclude={"kind"}))


def symmetric_info_nce_loss(
    z_a_BD: Tensor,
    z_b_BD: Tensor,
    *,
    temperature: float | Tensor,
    total: Total = "sum",
    chunk_size: int | None = None,
) -> ObjectiveOutput:
    """Return the cross-entropy of the rows of the similarity matrix plus that of its columns, or their mean.

    Row i of the matrix holds the cosines of the first view of sample i with all second views, divided by `temperature`.
    The right class of a row or column is on the diagonal.

    Arguments, types and errors are as in `trainer.objectives.contrast.margins`, and the mean over the ranks is as in
    `nt_xent_loss`.

    Examples:
        >>> z_a = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> z_b = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
        >>> round(symmetric_info_nce_loss(z_a, z_b, temperature=0.5).loss.item(), 4)
        0.972
    """
    check_temperature(temperature)
    with torch.autocast(z_a_BD.device.type, enabled=False):
        u_BD, v_BD = unit_pair(z_a_BD, z_b_BD)
        none_B0 = torch.empty(len(u_BD), 0, dtype=torch.int64, device=u_BD.device)
        log_sum_2B = torch.cat(
            [
                log_sums(anchors_BD / temperature, candidates(others_BD), none_B0, chunk_size)
                for anchors_BD, others_BD in ((u_BD, v_BD), (v_BD, u_BD))
            ]
        )
        log_probability_2B = ((u_BD * v_BD).sum(1) / temperature).repeat(2) - log_sum_2B  # of rows, then of columns
    loss = -log_probability_2B.mean() * {"sum": 2, "mean": 1}[total]
    return contrastive_output(loss, log_probability_2B, z_a_BD, z_b_BD)
