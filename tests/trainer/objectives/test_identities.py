"""What the papers say of single losses: identities, limits, floors, what is logged."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tests.trainer.objectives.loops import unit_rows
from tests.trainer.objectives.pair_losses import assert_near, loss_and_gradient, related_views
from trainer.objectives import (
    NTXentCycleConfig,
    ViewPair,
    barlow_twins_loss,
    dcl_loss,
    ifm_loss,
    info_nce_loss,
    linear_loss,
    macl_loss,
    nt_xent_loss,
    published_nt_xent_loss,
    sigreg_loss,
    split_loss,
    symmetric_info_nce_loss,
    vicreg_loss,
)
from trainer.objectives.nt_xent_cycle import NTXentCycle, cycled_temperature
from trainer.objectives.sigreg import SIGReg, SIGRegConfig, drawn_projections

APART_BD = torch.eye(8)


@pytest.mark.parametrize(
    ("temperature", "batch_size", "floor"), [(0.07, 256, -5.5450), (0.1, 256, -5.5337), (0.07, 128, -4.8520)]
)
def test_floor_of_the_published_form(temperature: float, batch_size: int, floor: float) -> None:
    # Views coincide, and pictures are at right angles to each other, so that every negative contributes exp(0) = 1.
    z_BD = torch.eye(batch_size)
    found = published_nt_xent_loss(z_BD, z_BD, temperature=temperature).loss.item()
    assert found == pytest.approx(floor, abs=5e-5)


def test_the_probability_of_positives_is_that_of_each_softmax() -> None:
    """Views coincide, far from all others: the positive is certain, but for the published form's self-similarity."""
    pair = APART_BD, APART_BD
    logits = torch.tensor([1.0] + 7 * [0.0]) / 0.2
    found = {
        "nt_xent": (nt_xent_loss(*pair, temperature=0.1), 1.0),
        "published": (published_nt_xent_loss(*pair, temperature=0.07), 0.5),
        "split": (split_loss(*pair, temperature=0.2, divergence_weight=0.4), logits.softmax(0)[0].item()),
        "symmetric": (symmetric_info_nce_loss(*pair, temperature=0.2), logits.softmax(0)[0].item()),
    }
    for name, (output, probability) in found.items():
        assert output.metrics["positive_probability"].item() == pytest.approx(probability, abs=1e-3), name


def test_what_losses_log_are_their_parts() -> None:
    z_a, z_b = related_views(8, 6)
    cosine = torch.cosine_similarity(z_a, z_b).mean().item()
    split = split_loss(z_a, z_b, temperature=0.2, divergence_weight=0.4)
    assert split.loss.item() == pytest.approx(2 - 2 * cosine + 0.4 * split.metrics["divergence"].item(), rel=1e-6)
    linear = linear_loss(z_a, z_b, divergence_weight=2.0)
    assert linear.loss.item() == pytest.approx(2 * linear.metrics["divergence"].item() - cosine)
    twins = barlow_twins_loss(z_a, z_b, off_diagonal_weight=0.5)
    torch.testing.assert_close(twins.loss, twins.metrics["invariance"] + 0.5 * twins.metrics["redundancy"])
    reg = vicreg_loss(z_a, z_b, invariance_weight=2.0, variance_weight=3.0, covariance_weight=0.5)
    parts = [reg.metrics[name] for name in ("invariance", "variance", "covariance")]
    torch.testing.assert_close(reg.loss, 2 * parts[0] + 3 * parts[1] + 0.5 * parts[2])
    macl = macl_loss(z_a, z_b, temperature=0.2)
    assert macl.metrics["temperature"].item() == pytest.approx(0.2 * (1 + 0.5 * cosine))


# Contrastive losses


def test_without_a_perturbation_or_a_reaction_they_are_losses_that_are_known() -> None:
    z_VBD = related_views(9, 5)
    without = loss_and_gradient(partial(ifm_loss, temperature=0.2, epsilon=0.0), z_VBD)
    assert_near(without, loss_and_gradient(partial(nt_xent_loss, temperature=0.2), z_VBD), rtol=1e-12)
    # Minus log p over 1 - p has the gradient of minus the margin: 1 - p cancels.
    macl_gradient = loss_and_gradient(partial(macl_loss, temperature=0.2, sensitivity=0.0), z_VBD)[1]
    dcl_gradient = loss_and_gradient(partial(dcl_loss, temperature=0.2), z_VBD)[1]
    torch.testing.assert_close(macl_gradient, dcl_gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_info_nce_is_alignment_plus_divergence(seed: int) -> None:
    z_VBD = 10.0 ** (seed - 1) * related_views(2 + seed, 1 + seed, seed=seed)
    u_BD, v_BD = normalize(z_VBD, dim=2)
    positive_B, negative_B = ((u_BD * other_BD).sum(1) for other_BD in (v_BD, v_BD.roll(-1, 0)))
    alignment = (u_BD - v_BD).square().sum(1).mean() / 2 - 1
    divergence = (positive_B.exp() + negative_B.exp()).log().mean()
    output = info_nce_loss(*z_VBD)
    torch.testing.assert_close(output.loss, alignment + divergence, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(output.metrics["divergence"], divergence)


@pytest.mark.parametrize("temperature", [0.2, 0.5])
def test_the_split_loss_with_twice_the_temperature_is_info_nce_without_the_positive(temperature: float) -> None:
    z_VBD = related_views(7, 5)
    u_BD, v_BD = (torch.stack(unit_rows(z_BD)) for z_BD in z_VBD)
    logits_BB = u_BD @ v_BD.T / temperature
    without_positive_B = logits_BB.masked_fill(torch.eye(7, dtype=torch.bool), -torch.inf).logsumexp(1)
    info_nce = (without_positive_B - logits_BB.diagonal()).mean()
    loss = split_loss(*z_VBD, temperature=temperature, divergence_weight=2 * temperature).loss
    assert loss.item() == pytest.approx((2 + 2 * temperature * info_nce).item(), abs=1e-12)


def test_the_mean_of_symmetric_info_nce_is_half_of_the_sum() -> None:
    z_a, z_b = related_views(9, 4)
    mean = symmetric_info_nce_loss(z_a, z_b, temperature=0.2, total="mean").loss
    torch.testing.assert_close(2 * mean, symmetric_info_nce_loss(z_a, z_b, temperature=0.2).loss)


def info_nce_at(z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float) -> Tensor:
    """InfoNCE with all other samples' second views as negatives."""
    logits_BB = torch.stack(unit_rows(z_a_BD)) @ torch.stack(unit_rows(z_b_BD)).T / temperature
    return (logits_BB.logsumexp(1) - logits_BB.diagonal()).mean()


def test_the_linear_loss_is_the_limit_of_info_nce_at_infinite_temperature() -> None:
    z_VBD = related_views(9, 5)
    temperature, num_negatives = 1e4, 8
    info_nce, gradient = loss_and_gradient(partial(info_nce_at, temperature=temperature), z_VBD)
    scale = temperature * (num_negatives + 1) / num_negatives
    expected = scale * (info_nce - math.log(num_negatives + 1)), scale * gradient
    assert_near(expected, loss_and_gradient(partial(linear_loss, divergence_weight=1.0), z_VBD), rtol=1e-3)


def test_the_linear_loss_asks_for_a_mean_of_zero() -> None:
    """Its second term is the squared length of the mean embedding, if it includes each embedding's pair with itself."""
    u_BD = normalize(related_views(9, 5)[0], dim=1)
    others = linear_loss(u_BD, u_BD, divergence_weight=1.0).metrics["divergence"]
    torch.testing.assert_close((8 * others + 1) / 9, u_BD.mean(0).square().sum())


def test_for_the_linear_loss_one_direction_is_as_good_as_all() -> None:
    """All it asks for is a mean of zero; the split loss, as InfoNCE, wants the samples spread."""
    spread = 2 * [torch.cat([torch.eye(8), -torch.eye(8)]).double()]
    collapsed = 2 * [torch.cat([torch.eye(8)[:1].repeat(8, 1), -torch.eye(8)[:1].repeat(8, 1)]).double()]
    linear = partial(linear_loss, divergence_weight=1.0)
    assert linear(*spread).loss.item() == pytest.approx(linear(*collapsed).loss.item(), abs=1e-12)
    split = partial(split_loss, temperature=0.2, divergence_weight=0.4)
    assert split(*spread).loss < split(*collapsed).loss - 1


def test_the_temperature_of_a_cycle_is_that_of_the_published_code() -> None:
    settings = NTXentCycleConfig().model_dump(include={"lowest", "highest", "period_epochs"})
    for epoch in (*range(0, 801, 50), 4 * 10**8 + 50):  # far out, without a loss of digits
        expected = 0.1 + 0.9 * (1 + math.cos(math.pi * (epoch % 400) / 200)) / 2
        assert cycled_temperature(epoch, **settings) == pytest.approx(expected)


def test_nt_xent_in_cycles_is_nt_xent_at_the_temperature_of_the_epoch() -> None:
    z_a, z_b = related_views(8, 6)
    objective = NTXentCycle(NTXentCycleConfig(period_epochs=4, chunk_size=3))
    for epoch, temperature in enumerate([1, 0.55, 0.1, 0.55, 1]):
        output = objective(z_a, z_b, ViewPair(z_a, z_b, torch.arange(8), step=9, epoch=epoch))
        torch.testing.assert_close(output.loss, nt_xent_loss(z_a, z_b, temperature=temperature).loss)
        assert output.metrics["temperature"].item() == pytest.approx(temperature)


# Losses of correlations


def test_the_invariance_of_barlow_twins_bounds_the_distance_of_views() -> None:
    """E |f1 - f2|^2 <= 2 sqrt(D L1) for standardised embeddings (Huang et al. 2023), and not for half of the right."""
    z_VBD = related_views(64, 16)
    a_BD, b_BD = (z_VBD - z_VBD.mean(1, keepdim=True)) / z_VBD.std(1, keepdim=True)
    invariance = barlow_twins_loss(*z_VBD, unbiased=True).metrics["invariance"]
    share = (a_BD - b_BD).square().sum(1).mean() / (2 * (16 * invariance).sqrt())
    assert 0.5 < share <= 1


@pytest.mark.parametrize("constant", [0.0, 100.1])
def test_constant_dimensions_count_as_uncorrelated(constant: float) -> None:
    z_VBD = related_views(7, 3, dtype=torch.float32)
    wide = torch.cat([z_VBD, torch.full((2, 7, 2), constant)], dim=2)
    (value, gradient), expected = (loss_and_gradient(barlow_twins_loss, z) for z in (wide, z_VBD))
    assert value.item() == pytest.approx(expected[0].item() + 2, rel=1e-6)
    torch.testing.assert_close(gradient[..., :3], expected[1])
    assert torch.equal(gradient[..., 3:], torch.zeros(2, 7, 2))


def test_a_dimension_constant_in_one_view_gets_no_gradient_there() -> None:
    z_VBD = related_views(7, 3, dtype=torch.float32)
    z_VBD[0, :, 1] = 100.1
    gradient = loss_and_gradient(barlow_twins_loss, z_VBD)[1]
    assert torch.equal(gradient[0, :, 1], torch.zeros(7))
    assert gradient.abs().max() < 1


@pytest.mark.parametrize(("loss", "rel"), [(barlow_twins_loss, 1e-4), (vicreg_loss, 1e-3)])
def test_a_large_mean_costs_no_digits_of_the_loss(loss: partial[Tensor], rel: float) -> None:
    far_VBD = (related_views(40, 8) + 1000).float()
    near, far = (loss_and_gradient(loss, z_VBD)[0].item() for z_VBD in (far_VBD.double(), far_VBD))
    assert far == pytest.approx(near, rel=rel)


def test_collapsed_embeddings_have_a_finite_gradient_of_vicreg() -> None:
    value, gradient = loss_and_gradient(vicreg_loss, torch.ones(2, 6, 4))
    assert value.item() == pytest.approx(25 * 0.99)
    assert gradient.isfinite().all()


def test_normality_is_the_statistic_of_epps_and_pulley_in_closed_form() -> None:
    """Its integral over all t has a closed form, a sum over pairs; from -3 to 3, all but a small part of it is left."""
    z_BD = 0.7 * related_views(40, 3)[0]
    found = sigreg_loss(z_BD, z_BD, normality_weight=1.0, num_projections=20).loss.item()
    x_BP = z_BD @ drawn_projections(20, 3, seed=0, step=0, device=z_BD.device).double().T
    pairs_P = torch.exp(-(x_BP[:, None] - x_BP).square() / 2).mean(dim=(0, 1))
    whole_P = math.sqrt(2) * pairs_P - 2 * torch.exp(-x_BP.square() / 4).mean(0) + math.sqrt(2 / 3)
    assert found == pytest.approx(40 * math.sqrt(math.pi) * whole_P.mean().item(), rel=0.02)


def test_normality_is_low_for_normal_embeddings_only() -> None:
    draw = torch.Generator().manual_seed(0)
    normal_BD = torch.randn(500, 4, generator=draw)
    of_normal, *others = (
        sigreg_loss(z_BD, z_BD, num_projections=64).metrics["normality"].item()
        for z_BD in (normal_BD, 2 * normal_BD, normal_BD + 1, normal_BD[:, :1].repeat(1, 4), 0 * normal_BD)
    )
    assert of_normal < 1
    assert min(others) > 20


def test_each_step_and_seed_has_projections_of_its_own() -> None:
    z_a, z_b = related_views(8, 6)
    losses = []
    for seed, step in ((0, 0), (0, 1), (1, 0)):
        pair = ViewPair(z_a, z_b, torch.arange(8), step=step)
        losses.append(SIGReg(SIGRegConfig(num_projections=5), seed=seed)(z_a, z_b, pair).loss.item())
        expected = sigreg_loss(z_a, z_b, num_projections=5, seed=seed, step=step).loss.item()
        assert losses[-1] == expected
    assert len(set(losses)) == 3
    projections_PD = drawn_projections(2_000, 3, seed=0, step=0, device=z_a.device)
    torch.testing.assert_close(projections_PD.norm(dim=1), torch.ones(2_000))
    torch.testing.assert_close(projections_PD.T @ projections_PD / 2_000, torch.eye(3) / 3, atol=0.03, rtol=0)
