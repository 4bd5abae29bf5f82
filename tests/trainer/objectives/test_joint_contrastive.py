"""The joint loss: against a loop in float64, against a peer, in chunks, and with samples without a label."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL
from tests.trainer.objectives.loops import unit_rows
from tests.trainer.objectives.pair_losses import assert_near, loss_and_gradient, related_views
from trainer.models import ResNetConfig, build_encoder
from trainer.objectives import JointContrastiveConfig, ObjectiveInputs, ViewPair, joint_contrastive_loss

LABELS = torch.tensor([2, NO_LABEL, 0, 2, NO_LABEL, 2, 1])
T, WEIGHT = 0.3, 0.7
JOINT = partial(joint_contrastive_loss, num_classes=4, temperature=T, supervised_weight=WEIGHT)


def loop(z_a_BD: Tensor, z_b_BD: Tensor, label_B: Tensor, *, supervised_weight: float) -> Tensor:
    """Equation 2 of Khosla et al. (2020) and NT-Xent, with a loop over anchors and over the positives of each."""
    views, num = [*unit_rows(z_a_BD), *unit_rows(z_b_BD)], len(label_B)
    labels = label_B.tolist() * 2
    losses = []
    for i, anchor in enumerate(views):
        denominator = torch.stack([(anchor @ other / T).exp() for j, other in enumerate(views) if j != i]).sum()
        other_view = (i + num) % len(views)
        alike = [j for j in range(len(views)) if j != i and labels[j] == labels[i] != NO_LABEL] or [other_view]
        of_label, of_view = (
            -torch.stack([(anchor @ views[p] / T - denominator.log()) for p in positives]).mean()
            for positives in (alike, [other_view])
        )
        losses.append(supervised_weight * of_label + (1 - supervised_weight) * of_view)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("chunk_size", [None, 4, 1000])
@pytest.mark.parametrize("weight", [WEIGHT, 1.0])
def test_loss_and_gradient_equal_a_loop_in_float64(weight: float, chunk_size: int | None) -> None:
    z_VBD = related_views(len(LABELS), 5)
    ours = partial(JOINT, label_B=LABELS, supervised_weight=weight, chunk_size=chunk_size)
    expected = loss_and_gradient(partial(loop, label_B=LABELS, supervised_weight=weight), z_VBD)
    assert_near(loss_and_gradient(ours, z_VBD), expected, rtol=1e-12)
    assert_near(loss_and_gradient(ours, z_VBD.float()), expected, rtol=2e-5)


@pytest.mark.parametrize("label_B", [torch.arange(43), torch.full((43,), NO_LABEL)])
def test_where_no_two_samples_share_a_label_it_is_a_peers_nt_xent(label_B: Tensor) -> None:
    from lightly.loss import NTXentLoss

    z_VBD = related_views(43, 16)
    ours = partial(JOINT, label_B=label_B, num_classes=43)
    assert_near(loss_and_gradient(ours, z_VBD), loss_and_gradient(NTXentLoss(temperature=T), z_VBD), rtol=1e-6)


def test_an_objective_reads_the_label_of_its_config() -> None:
    encoder = build_encoder(ResNetConfig(kind="resnet10", width=1, mean=(0.5,) * 3, std=(0.25,) * 3))
    given = ObjectiveInputs(encoder, 5, 20, seed=0, num_classes={"base": 1, "digit": 4})
    objective = JointContrastiveConfig(label="digit", temperature=T, supervised_weight=WEIGHT).build(given)
    z_a, z_b = related_views(len(LABELS), 5)
    pair = ViewPair(z_a, z_b, LABELS, step=0, labels={"base": torch.zeros_like(LABELS), "digit": LABELS})
    output = objective(z_a, z_b, pair)
    assert torch.equal(output.loss, JOINT(z_a, z_b, LABELS).loss)
    assert 0 < output.metrics["positive_probability"] < 1
    assert objective.saved_state() == {}
    with pytest.raises(UserError, match=r"objective\.label=base has a single class"):
        JointContrastiveConfig().build(given)
