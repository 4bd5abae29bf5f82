from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.trainer.objectives.pair_losses import (
    assert_near,
    assert_ranks_equal_one_process,
    loss_and_gradient,
    related_views,
    unit_rows,
)
from trainer.objectives.linear_loss import LinearLoss, LinearLossConfig, linear_loss
from trainer.objectives.split_loss import split_loss


def by_loop(z_a_BD: Tensor, z_b_BD: Tensor, *, divergence_weight: float) -> Tensor:
    firsts, seconds = unit_rows(z_a_BD), unit_rows(z_b_BD)
    positives = [first @ second for first, second in zip(firsts, seconds, strict=True)]
    negatives = [first @ second for i, first in enumerate(firsts) for j, second in enumerate(seconds) if i != j]
    return divergence_weight * torch.stack(negatives).mean() - torch.stack(positives).mean()


def test_value_worked_out_by_hand() -> None:
    z_a_BD = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    z_b_BD = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
    # Negatives have similarities -0.8 and 0.8.
    assert linear_loss(z_a_BD, z_b_BD, divergence_weight=1.0).item() == pytest.approx(-0.6, abs=1e-7)
    assert linear_loss(z_a_BD[[0, 0]], z_b_BD, divergence_weight=3.0).item() == pytest.approx(-0.2, abs=1e-6)


@pytest.mark.parametrize("divergence_weight", [1.0, 5.0])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_loss_and_gradient_equal_a_loop(divergence_weight: float, dtype: torch.dtype, rtol: float) -> None:
    z_VBD = related_views(7, 5, dtype=dtype)
    expected = loss_and_gradient(partial(by_loop, divergence_weight=divergence_weight), z_VBD.double())
    assert_near(
        loss_and_gradient(partial(linear_loss, divergence_weight=divergence_weight), z_VBD), expected, rtol=rtol
    )


def info_nce_by_loop(z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float) -> Tensor:
    """With all other samples' second views as negatives."""
    logits_BB = torch.stack(unit_rows(z_a_BD)) @ torch.stack(unit_rows(z_b_BD)).T / temperature
    return (logits_BB.logsumexp(1) - logits_BB.diagonal()).mean()


def test_it_is_the_limit_of_info_nce_at_infinite_temperature() -> None:
    z_VBD = related_views(9, 5)
    temperature, num_negatives = 1e4, 8
    info_nce, gradient = loss_and_gradient(partial(info_nce_by_loop, temperature=temperature), z_VBD)
    scale = temperature * (num_negatives + 1) / num_negatives
    expected = scale * (info_nce - math.log(num_negatives + 1)), scale * gradient
    assert_near(expected, loss_and_gradient(partial(linear_loss, divergence_weight=1.0), z_VBD), rtol=1e-3)


def test_the_similarity_of_negatives_is_the_squared_mean_embedding() -> None:
    """Up to the pairs of a sample with itself, which are no negatives; where both views coincide."""
    z_BD = related_views(9, 5)[0]
    num_samples, u_BD = len(z_BD), torch.stack(unit_rows(z_BD))
    negatives = linear_loss(z_BD, z_BD, divergence_weight=1.0) + 1
    with_self = (num_samples * (num_samples - 1) * negatives + num_samples) / num_samples**2
    assert with_self.item() == pytest.approx(u_BD.mean(0).square().sum().item(), abs=1e-12)


def test_one_direction_is_as_good_as_all() -> None:
    """All it asks for is a mean of zero; the split loss, as InfoNCE, wants the samples spread."""
    spread_BD = torch.cat([torch.eye(8), -torch.eye(8)]).double()
    collapsed_BD = torch.cat([torch.eye(8)[:1].repeat(8, 1), -torch.eye(8)[:1].repeat(8, 1)]).double()
    linear = partial(linear_loss, divergence_weight=1.0)
    assert linear(spread_BD, spread_BD).item() == pytest.approx(linear(collapsed_BD, collapsed_BD).item(), abs=1e-12)
    split = partial(split_loss, temperature=0.2, divergence_weight=0.4)
    assert split(spread_BD, spread_BD) < split(collapsed_BD, collapsed_BD) - 1


@pytest.mark.ranks
@pytest.mark.parametrize(("num_ranks", "per_rank"), [(1, 12), (2, 6), (4, 3), (4, 1)])
def test_ranks_equal_one_process(num_ranks: int, per_rank: int) -> None:
    losses = {f"weight {weight}": partial(linear_loss, divergence_weight=weight) for weight in (1.0, 5.0)}
    assert_ranks_equal_one_process(losses, num_ranks, per_rank=per_rank)


def test_low_precision_and_autocast_change_nothing() -> None:
    z_VBD = related_views(20, 16, dtype=torch.bfloat16)
    expected = linear_loss(*z_VBD.float(), divergence_weight=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = linear_loss(*z_VBD, divergence_weight=1.0)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)


def test_the_objective_gives_the_loss_and_logs_its_parts() -> None:
    z_VBD = related_views(8, 16, dtype=torch.float32).requires_grad_()
    output = LinearLoss(LinearLossConfig(divergence_weight=2.0))(*z_VBD)
    torch.testing.assert_close(output.loss, linear_loss(*z_VBD, divergence_weight=2.0))
    torch.testing.assert_close(output.loss, 2 * output.metrics["divergence"] - output.metrics["alignment"])
    assert output.loss.requires_grad
    assert not any(metric.requires_grad for metric in output.metrics.values())


def test_wrong_input_is_refused() -> None:
    z_BD = torch.randn(4, 3)
    with pytest.raises(ValueError, match="a global batch of 1 sample has no negatives"):
        linear_loss(z_BD[:1], z_BD[:1], divergence_weight=1.0)
    with pytest.raises(ValueError, match=r"\(4, 3\) and \(3, 3\)"):
        linear_loss(z_BD, z_BD[:3], divergence_weight=1.0)
    with pytest.raises(ValidationError, match="greater than or equal to"):
        LinearLossConfig(divergence_weight=0.0)
