"""VICReg: against a loop in float64, against lightly, and on several ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from data_pipeline.core.errors import UserError
from tests.trainer.objectives.pair_losses import (
    assert_near,
    assert_ranks_equal_one_process,
    loss_and_gradient,
    related_views,
)
from trainer.objectives import VICRegConfig, vicreg_loss
from trainer.objectives.vicreg import VICReg

WEIGHTS: dict[str, Any] = {"invariance_weight": 3.0, "variance_weight": 2.0, "covariance_weight": 0.7, "epsilon": 1e-3}


def by_loop(z_a_BD: Tensor, z_b_BD: Tensor) -> Tensor:
    """The formula with the weights above, one pair of dimensions after the other."""
    num_rows, size = z_a_BD.shape
    loss = 3.0 * (z_a_BD - z_b_BD).square().sum() / (num_rows * size)
    for z_BD in (z_a_BD, z_b_BD):
        columns = [column - column.mean() for column in z_BD.T]
        for i, column in enumerate(columns):
            deviation = ((column @ column) / (num_rows - 1) + 1e-3).sqrt()
            loss = loss + 2.0 * (1 - deviation).clamp_min(0) / size / 2
            for j, other in enumerate(columns):
                if i != j:
                    loss = loss + 0.7 * ((column @ other) / (num_rows - 1)).square() / size
    return loss


@pytest.mark.parametrize("scale", [0.1, 1.0])  # with deviations below 1, and with some above
def test_loss_and_gradient_equal_a_loop_in_float64(scale: float) -> None:
    z_VBD = scale * related_views(9, 5)
    expected = loss_and_gradient(by_loop, z_VBD)
    loss = partial(vicreg_loss, **WEIGHTS)
    assert_near(loss_and_gradient(loss, z_VBD), expected, rtol=1e-12)
    assert_near(loss_and_gradient(loss, z_VBD.float()), expected, rtol=1e-5)


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_loss_and_gradient_equal_lightlys(scale: float) -> None:
    from lightly.loss import VICRegLoss  # here, because every rank imports this file

    z_VBD = scale * related_views(40, 12)
    assert_near(loss_and_gradient(vicreg_loss, z_VBD), loss_and_gradient(VICRegLoss(), z_VBD), rtol=1e-12)


def test_a_far_mean_costs_no_digits() -> None:
    z_VBD = related_views(40, 8)
    near, far = vicreg_loss(*z_VBD), vicreg_loss(*(z_VBD + 1000).float())
    assert far.item() == pytest.approx(near.item(), rel=1e-3)


def test_collapsed_embeddings_have_a_finite_gradient() -> None:
    value, gradient = loss_and_gradient(vicreg_loss, torch.ones(2, 6, 4))
    assert value.item() == pytest.approx(25 * 0.99)
    assert gradient.isfinite().all()


def test_autocast_changes_nothing_and_low_precision_is_raised() -> None:
    z_VBD = related_views(7, 6, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = vicreg_loss(*z_VBD)
    assert torch.equal(value, vicreg_loss(*z_VBD))
    low = vicreg_loss(*z_VBD.bfloat16())
    assert low.dtype == torch.float32
    assert torch.equal(low, vicreg_loss(*z_VBD.bfloat16().float()))


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("per_rank", [1, 3])
def test_ranks_equal_one_process(num_ranks: int, per_rank: int) -> None:
    assert_ranks_equal_one_process({"vicreg": partial(vicreg_loss, **WEIGHTS)}, num_ranks, per_rank=per_rank)


def test_the_class_is_the_function_and_logs_its_terms() -> None:
    z_a, z_b = related_views(12, 4)
    output = VICReg(VICRegConfig(**WEIGHTS), embedding_size=4)(z_a, z_b)
    assert torch.equal(output.loss, vicreg_loss(z_a, z_b, **WEIGHTS))
    assert output.metrics.keys() == {"alignment", "invariance", "variance", "covariance"}
    assert not any(value.requires_grad for value in output.metrics.values())
    assert VICReg(VICRegConfig(), embedding_size=4).saved_state() == {}


def test_refusals() -> None:
    z_BD = torch.rand(4, 3)
    with pytest.raises(ValueError, match=r"must be \(B, D\) with equal shapes, got \(4, 3\) and \(3, 3\)"):
        vicreg_loss(z_BD, z_BD[:3])
    with pytest.raises(ValueError, match="at least 2 samples"):
        vicreg_loss(z_BD[:1], z_BD[:1])
    with pytest.raises(ValueError, match="embeddings of at least 2 dimensions, got 1"):
        vicreg_loss(z_BD[:, :1], z_BD[:, :1])
    with pytest.raises(UserError, match=r"encoder\.embedding_size is 1; set it to 2 or more"):
        VICReg(VICRegConfig(), embedding_size=1)
    with pytest.raises(ValidationError):
        VICRegConfig(variance_weight=0)
