from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from data_pipeline.core.errors import UserError
from tests.trainer.objectives.pair_losses import (
    assert_near,
    assert_ranks_equal_one_process,
    loss_and_gradient,
    related_views,
    unit_rows,
)
from trainer.objectives.contrast import candidates
from trainer.objectives.info_nce import InfoNCE, InfoNCEConfig, alignment, divergence, info_nce_loss


def by_loop(z_a_BD: Tensor, z_b_BD: Tensor) -> Tensor:
    firsts, seconds = unit_rows(z_a_BD), unit_rows(z_b_BD)
    losses = []
    for i, first in enumerate(firsts):
        positive = (first @ seconds[i]).exp()
        negative = (first @ seconds[(i + 1) % len(seconds)]).exp()
        losses.append(-(positive / (positive + negative)).log())
    return torch.stack(losses).mean()


def test_value_worked_out_by_hand() -> None:
    # Each first view has similarity 0.6 with its positive and -0.8 with its negative.
    z_a_BD = torch.tensor([[1.0, 0.0], [-0.96, -0.28]])
    z_b_BD = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
    assert info_nce_loss(z_a_BD, 3 * z_b_BD).item() == pytest.approx(0.2204174, abs=1e-7)
    assert alignment(z_a_BD, z_b_BD).item() == pytest.approx(-0.6, abs=1e-6)
    assert divergence(z_a_BD, z_b_BD).item() == pytest.approx(math.log(math.exp(0.6) + math.exp(-0.8)), abs=1e-6)


@pytest.mark.parametrize("num_samples", [2, 7])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_loss_and_gradient_equal_a_loop(num_samples: int, dtype: torch.dtype, rtol: float) -> None:
    z_VBD = related_views(num_samples, 5, dtype=dtype)
    assert_near(loss_and_gradient(info_nce_loss, z_VBD), loss_and_gradient(by_loop, z_VBD.double()), rtol=rtol)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.integers(2, 9), st.integers(1, 6), st.integers(0, 1000), st.floats(1e-3, 1e3))
def test_the_loss_is_alignment_plus_divergence(num_samples: int, size: int, seed: int, length: float) -> None:
    z_VBD = length * related_views(num_samples, size, seed=seed)
    split = alignment(*z_VBD) + divergence(*z_VBD)
    assert (split - info_nce_loss(*z_VBD)).abs().item() <= 1e-12


def test_alignment_is_minus_the_mean_cosine() -> None:
    z_VBD = related_views(6, 4)
    assert (alignment(*z_VBD) + torch.cosine_similarity(*z_VBD).mean()).abs().item() <= 1e-12
    assert alignment(z_VBD[0], z_VBD[0]).item() == -1
    assert alignment(z_VBD[0], -z_VBD[0]).item() == pytest.approx(1)


@pytest.mark.ranks
@pytest.mark.parametrize(("num_ranks", "per_rank"), [(1, 12), (2, 6), (4, 3), (4, 1)])
def test_ranks_equal_one_process(num_ranks: int, per_rank: int) -> None:
    losses = {"info_nce": info_nce_loss, "divergence": divergence, "alignment": alignment}
    assert_ranks_equal_one_process(losses, num_ranks, per_rank=per_rank)


def test_low_precision_and_autocast_change_nothing() -> None:
    z_VBD = related_views(20, 16, dtype=torch.bfloat16)
    expected = loss_and_gradient(info_nce_loss, z_VBD.float())[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for value in (info_nce_loss(*z_VBD), alignment(*z_VBD) + divergence(*z_VBD)):
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)


def test_the_objective_gives_the_loss_and_logs_its_parts() -> None:
    z_VBD = related_views(8, 16, dtype=torch.float32).requires_grad_()
    output = InfoNCE()(*z_VBD)
    torch.testing.assert_close(output.loss, info_nce_loss(*z_VBD))
    torch.testing.assert_close(output.metrics["divergence"], divergence(*z_VBD).detach())
    torch.testing.assert_close(output.metrics["alignment"], -alignment(*z_VBD).detach())
    assert 0 < output.metrics["positive_probability"].item() < 1
    assert output.loss.requires_grad
    assert not any(metric.requires_grad for metric in output.metrics.values())


def test_wrong_input_is_refused() -> None:
    z_BD = torch.randn(4, 3)
    for loss in (info_nce_loss, divergence):
        with pytest.raises(ValueError, match="a global batch of 1 sample has no negatives"):
            loss(z_BD[:1], z_BD[:1])
    for loss in (info_nce_loss, divergence, alignment):
        with pytest.raises(ValueError, match=r"\(4, 3\) and \(3, 3\)"):
            loss(z_BD, z_BD[:3])
    with pytest.raises(ValueError, match="at least 2 samples"):
        candidates(z_BD[:1], z_BD[:1])
    with pytest.raises(UserError, match='unknown key "temperature"'):
        InfoNCEConfig.parse({"temperature": 0.5}, where="recipe")
