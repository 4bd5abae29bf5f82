from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.gloo import run_ranks
from trainer.distributed.collectives import rank, world_size
from trainer.objectives.barlow_twins import BarlowTwins, BarlowTwinsConfig, barlow_twins_loss


def by_loop(z_a_BD: Tensor, z_b_BD: Tensor, off_diagonal_weight: float) -> Tensor:
    """From the formula, in float64, one pair of dimensions after the other."""
    batch_size, size = z_a_BD.shape
    standardised = []
    for z_BD in (z_a_BD.double(), z_b_BD.double()):
        columns = [z_BD[:, i] - z_BD[:, i].sum() / batch_size for i in range(size)]
        standardised.append([column / (column.square().sum() / (batch_size - 1)).sqrt() for column in columns])
    loss = torch.zeros((), dtype=torch.float64)
    for i, a_B in enumerate(standardised[0]):
        for j, b_B in enumerate(standardised[1]):
            correlation = (a_B * b_B).sum() / batch_size
            loss = loss + ((1 - correlation) ** 2 if i == j else off_diagonal_weight * correlation**2)
    return loss


def embeddings(batch_size: int, size: int, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Two related views whose mean and spread change along the batch and differ between dimensions."""
    generator = torch.Generator().manual_seed(0)
    z_a_BD = torch.randn(batch_size, size, generator=generator, dtype=torch.float64)
    z_a_BD *= torch.linspace(1, 5, batch_size, dtype=torch.float64)[:, None]
    z_a_BD += torch.linspace(-3, 3, batch_size, dtype=torch.float64)[:, None] * torch.arange(size)
    z_b_BD = z_a_BD + torch.randn(batch_size, size, generator=generator, dtype=torch.float64) - 4
    return z_a_BD.to(dtype).requires_grad_(), z_b_BD.to(dtype).requires_grad_()


def loss_and_gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def assert_near(actual: list[Tensor], expected: list[Tensor], *, rtol: float) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.double() - theirs.double()).norm() <= rtol * theirs.double().norm()


def test_value_worked_out_by_hand() -> None:
    z_a_BD = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]])
    z_b_BD = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 2.0]])
    assert barlow_twins_loss(z_a_BD, z_b_BD).item() == pytest.approx(0.4318903, abs=1e-7)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=["float64", "float32"])
@pytest.mark.parametrize("off_diagonal_weight", [5e-3, 1.0, 3.0])
def test_loss_and_gradients_equal_a_loop_in_float64(
    off_diagonal_weight: float, dtype: torch.dtype, rtol: float
) -> None:
    inputs = embeddings(9, 5, dtype=dtype)
    a_64, b_64 = (z_BD.detach().double().requires_grad_() for z_BD in inputs)
    expected = loss_and_gradients(by_loop(a_64, b_64, off_diagonal_weight), a_64, b_64)
    actual = loss_and_gradients(barlow_twins_loss(*inputs, off_diagonal_weight=off_diagonal_weight), *inputs)
    assert actual[0].dtype == dtype
    assert_near(actual, expected, rtol=rtol)


def test_loss_and_gradients_equal_lightlys() -> None:
    """Lightly divides by the biased deviation, which a large batch makes the same, and adds 1e-5 to the variance."""
    from lightly.loss import BarlowTwinsLoss  # here, because every rank imports this file

    generator = torch.Generator().manual_seed(0)
    z_a_BD, noise_BD = (100 * torch.randn(20_000, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    inputs = [z_BD.requires_grad_() for z_BD in (z_a_BD, z_a_BD + noise_BD)]
    expected = loss_and_gradients(BarlowTwinsLoss()(*inputs), *inputs)
    assert_near(loss_and_gradients(barlow_twins_loss(*inputs), *inputs), expected, rtol=1e-3)


def test_identity_with_the_distance_to_the_identity_matrix() -> None:
    z_a_BD, z_b_BD = embeddings(20, 6, dtype=torch.float64)
    metrics = BarlowTwins(BarlowTwinsConfig())(z_a_BD, z_b_BD).metrics
    stacked = torch.cat([z_a_BD, z_b_BD], dim=1).T
    correlation_DD = torch.corrcoef(stacked)[:6, 6:] * 19 / 20
    distance = (correlation_DD - torch.eye(6)).square().sum()
    loss = 0.995 * metrics["invariance"] + 0.005 * distance
    torch.testing.assert_close(barlow_twins_loss(z_a_BD, z_b_BD), loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("constant", [0.0, 100.1])
def test_constant_dimensions_count_as_uncorrelated(constant: float) -> None:
    z_a_BD, z_b_BD = embeddings(7, 3)
    same = torch.full((7, 2), constant)
    wide = [torch.cat([z_BD.detach(), same], dim=1).requires_grad_() for z_BD in (z_a_BD, z_b_BD)]
    value, *gradients = loss_and_gradients(barlow_twins_loss(*wide), *wide)
    expected = loss_and_gradients(barlow_twins_loss(z_a_BD, z_b_BD), z_a_BD, z_b_BD)
    assert value.item() == pytest.approx(expected[0].item() + 2, rel=1e-6)
    for grad_BD, expected_BD in zip(gradients, expected[1:], strict=True):
        torch.testing.assert_close(grad_BD[:, :3], expected_BD)
        assert torch.equal(grad_BD[:, 3:], torch.zeros(7, 2))


def test_a_dimension_constant_in_one_view_gets_no_gradient_there() -> None:
    z_a_BD, z_b_BD = embeddings(7, 3)
    with torch.no_grad():
        z_a_BD[:, 1] = 100.1
    grad_a_BD, grad_b_BD = torch.autograd.grad(barlow_twins_loss(z_a_BD, z_b_BD), (z_a_BD, z_b_BD))
    assert torch.equal(grad_a_BD[:, 1], torch.zeros(7))
    assert grad_a_BD.abs().max() < 1
    assert grad_b_BD.abs().max() < 1


def test_a_large_mean_costs_no_digits_of_the_loss() -> None:
    z_a_BD, z_b_BD = (z_BD.detach().double() for z_BD in embeddings(40, 8))
    far = [(z_BD + 1000).float() for z_BD in (z_a_BD, z_b_BD)]
    assert barlow_twins_loss(*far).item() == pytest.approx(
        barlow_twins_loss(*(z.double() for z in far)).item(), rel=1e-5
    )


def test_autocast_changes_nothing_and_low_precision_is_raised() -> None:
    inputs = embeddings(16, 8)
    expected = loss_and_gradients(barlow_twins_loss(*inputs), *inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = barlow_twins_loss(*inputs)
    assert all(torch.equal(*both) for both in zip(loss_and_gradients(loss, *inputs), expected, strict=True))
    halves = [z_BD.detach().bfloat16() for z_BD in inputs]
    value = barlow_twins_loss(*halves)
    assert value.dtype == torch.float32
    assert torch.equal(value, barlow_twins_loss(*(z_BD.float() for z_BD in halves)))


def test_the_class_is_the_function_and_logs_its_terms() -> None:
    z_a_BD, z_b_BD = embeddings(12, 4)
    output = BarlowTwins(BarlowTwinsConfig(off_diagonal_weight=0.5))(z_a_BD, z_b_BD)
    assert torch.equal(output.loss, barlow_twins_loss(z_a_BD, z_b_BD, off_diagonal_weight=0.5))
    assert output.metrics.keys() == {"alignment", "invariance", "redundancy"}
    assert not any(value.requires_grad for value in output.metrics.values())
    assert torch.equal(output.loss, output.metrics["invariance"] + 0.5 * output.metrics["redundancy"])
    assert output.metrics["alignment"] > 0.5
    assert BarlowTwins(BarlowTwinsConfig()).saved_state() == {}


def test_refusals() -> None:
    z_BD = torch.rand(4, 3)
    with pytest.raises(ValueError, match=r"must be \(B, D\) with equal shapes, got \(4, 3\) and \(3, 3\)"):
        barlow_twins_loss(z_BD, z_BD[:3])
    with pytest.raises(ValueError, match="at least 2 pictures"):
        barlow_twins_loss(z_BD[:1], z_BD[:1])
    with pytest.raises(ValidationError):
        BarlowTwinsConfig(off_diagonal_weight=0)


def of_this_rank(z_a_BD: Tensor, z_b_BD: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    local = [z_BD.detach().chunk(world_size())[rank()].clone().requires_grad_() for z_BD in (z_a_BD, z_b_BD)]
    output = BarlowTwins(BarlowTwinsConfig())(*local)
    return loss_and_gradients(output.loss, *local), dict(output.metrics)


@pytest.mark.ranks
@pytest.mark.parametrize("size", [8, 5, 2])  # shares of 2; of 1 and 2; none for two of four ranks
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_equal_one_process(num_ranks: int, size: int) -> None:
    inputs = embeddings(12, size, dtype=torch.float64)
    expected = loss_and_gradients(by_loop(*inputs, 5e-3), *inputs)
    _, expected_metrics = of_this_rank(*inputs)
    by_rank = run_ranks(of_this_rank, num_ranks, *inputs)
    mean_loss = torch.stack([results[0] for results, _ in by_rank]).mean()
    # The engine divides by W when it averages parameter gradients, so an embedding's gradient is W times too large.
    gathered = [torch.cat([results[view] for results, _ in by_rank]) / num_ranks for view in (1, 2)]
    assert_near([mean_loss, *gathered], expected, rtol=1e-9)
    for name, value in expected_metrics.items():
        assert torch.stack([metrics[name] for _, metrics in by_rank]).mean().item() == pytest.approx(value.item())


@pytest.mark.ranks
def test_one_picture_on_each_of_two_ranks_is_a_batch() -> None:
    inputs = embeddings(2, 3, dtype=torch.float64)
    expected = by_loop(*inputs, 5e-3)
    by_rank = run_ranks(of_this_rank, 2, *inputs)
    assert torch.stack([results[0] for results, _ in by_rank]).mean().item() == pytest.approx(expected.item(), rel=1e-9)
