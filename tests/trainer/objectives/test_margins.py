"""The losses of the margin (DCL, MACL, IFM) and NT-Xent in cycles: against loops in float64, and against lightly."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.trainer.objectives.pair_losses import (
    Loss,
    assert_near,
    assert_ranks_equal_one_process,
    loss_and_gradient,
    related_views,
    unit_rows,
)
from trainer.objectives import (
    DCLConfig,
    IFMConfig,
    MACLConfig,
    NTXentCycleConfig,
    ViewPair,
    dcl_loss,
    ifm_loss,
    macl_loss,
    nt_xent_loss,
)
from trainer.objectives.dcl import DCL
from trainer.objectives.ifm import IFM
from trainer.objectives.macl import MACL
from trainer.objectives.nt_xent_cycle import NTXentCycle, cycled_temperature

CHUNK_SIZES = [None, 1, 4, 1000]


def similarities(z_a_BD: Tensor, z_b_BD: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each of 2 B anchors: the cosine with its positive, and the cosines with its negatives."""
    views = [*unit_rows(z_a_BD), *unit_rows(z_b_BD)]
    num_samples = len(z_a_BD)
    found = []
    for i, anchor in enumerate(views):
        positive = anchor @ views[(i + num_samples) % len(views)]
        negatives = [anchor @ other for j, other in enumerate(views) if (i - j) % num_samples]
        found.append((positive, torch.stack(negatives)))
    return found


def dcl_by_loop(z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float) -> Tensor:
    losses = [
        -(positive / temperature) + (negative_N / temperature).exp().sum().log()
        for positive, negative_N in similarities(z_a_BD, z_b_BD)
    ]
    return torch.stack(losses).mean()


def ifm_by_loop(z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float, epsilon: float, weight: float) -> Tensor:
    losses = []
    for positive, negative_N in similarities(z_a_BD, z_b_BD):
        terms = []
        for change in (0.0, epsilon):
            own = ((positive - change) / temperature).exp()
            terms.append(-(own / (own + ((negative_N + change) / temperature).exp().sum())).log())
        losses.append((terms[0] + weight * terms[1]) / (1 + weight))
    return torch.stack(losses).mean()


def macl_by_loop(z_a_BD: Tensor, z_b_BD: Tensor, *, temperature: float, sensitivity: float, neutral: float) -> Tensor:
    found = similarities(z_a_BD, z_b_BD)
    alignment = torch.stack([positive for positive, _ in found]).mean().detach()
    now = temperature * (1 + sensitivity * (alignment - neutral))
    losses = []
    for positive, negative_N in found:
        own = (positive / now).exp()
        probability = own / (own + (negative_N / now).exp().sum())
        losses.append(-probability.log() / (1 - probability.detach()))
    return torch.stack(losses).mean()


CASES: dict[str, tuple[Any, Loss]] = {
    "dcl": (partial(dcl_loss, temperature=0.3), partial(dcl_by_loop, temperature=0.3)),
    "dcl_low": (partial(dcl_loss, temperature=0.03), partial(dcl_by_loop, temperature=0.03)),
    "ifm": (
        partial(ifm_loss, temperature=0.3, epsilon=0.1, perturbed_weight=2.0),
        partial(ifm_by_loop, temperature=0.3, epsilon=0.1, weight=2.0),
    ),
    "macl": (
        partial(macl_loss, temperature=0.3, sensitivity=0.6, neutral_alignment=0.2),
        partial(macl_by_loop, temperature=0.3, sensitivity=0.6, neutral=0.2),
    ),
}


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_a_loop_in_float64(name: str, chunk_size: int | None) -> None:
    loss, by_loop = CASES[name]
    chunked = partial(loss, chunk_size=chunk_size)
    z_VBD = related_views(6, 5)
    expected = loss_and_gradient(by_loop, z_VBD)
    assert_near(loss_and_gradient(chunked, z_VBD), expected, rtol=1e-12)
    assert_near(loss_and_gradient(chunked, z_VBD.float()), expected, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.07, 0.5])
@pytest.mark.parametrize("name", ["dcl", "macl"])
def test_loss_and_gradient_equal_lightlys(name: str, temperature: float) -> None:
    from lightly.loss import DCLLoss  # here, because every rank imports this file
    from lightly.loss.macl_loss import MACLLoss

    z_VBD = related_views(43, 16)
    if name == "dcl":
        ours, theirs = partial(dcl_loss, temperature=temperature), DCLLoss(temperature=temperature)
    else:
        ours = partial(macl_loss, temperature=temperature, sensitivity=0.5, neutral_alignment=0.3)
        theirs = MACLLoss(temperature=temperature, alpha=0.5, A_0=0.3)
    # Theirs adds 1e-8 to 1 - p.
    assert_near(loss_and_gradient(ours, z_VBD), loss_and_gradient(theirs, z_VBD), rtol=1e-6)


def test_without_a_perturbation_or_a_reaction_they_are_losses_that_are_known() -> None:
    z_VBD = related_views(9, 5)
    nt_xent = partial(nt_xent_loss, temperature=0.2)
    assert_near(
        loss_and_gradient(partial(ifm_loss, temperature=0.2, epsilon=0.0), z_VBD),
        loss_and_gradient(nt_xent, z_VBD),
        rtol=1e-12,
    )
    # Minus log p over 1 - p has the gradient of minus the margin: 1 - p cancels.
    macl_gradient = loss_and_gradient(partial(macl_loss, temperature=0.2, sensitivity=0.0), z_VBD)[1]
    dcl_gradient = loss_and_gradient(partial(dcl_loss, temperature=0.2), z_VBD)[1]
    torch.testing.assert_close(macl_gradient, dcl_gradient, rtol=1e-10, atol=1e-14)


def test_a_temperature_with_gradient_gets_the_gradient_of_the_loop() -> None:
    z_VBD = related_views(6, 5)
    found = []
    for loss in (dcl_loss, dcl_by_loop):
        temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        found.append(torch.autograd.grad(loss(*z_VBD, temperature=temperature), temperature)[0])  # type: ignore[arg-type]
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("temperature", [1e-4, 1e4])
@pytest.mark.parametrize("name", ["dcl", "ifm", "macl"])
def test_extreme_temperatures_give_finite_losses_and_gradients(name: str, temperature: float) -> None:
    losses: dict[str, Any] = {"dcl": dcl_loss, "ifm": partial(ifm_loss, epsilon=0.1), "macl": macl_loss}
    e = torch.eye(8)
    for z_a, z_b in ((e, e), (e, -e), (e[:1].repeat(8, 1), e[:1].repeat(8, 1))):
        value, gradient = loss_and_gradient(partial(losses[name], temperature=temperature), torch.stack([z_a, z_b]))
        assert value.isfinite()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("name", ["dcl", "ifm", "macl"])
def test_autocast_changes_nothing_and_low_precision_is_raised(name: str, chunk_size: int | None) -> None:
    loss = partial(CASES[name][0], chunk_size=chunk_size)
    z_VBD = related_views(7, 6, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(*z_VBD)
    assert torch.equal(value, loss(*z_VBD))
    low = loss(*z_VBD.bfloat16())
    assert low.dtype == torch.float32
    assert torch.equal(low, loss(*z_VBD.bfloat16().float()))


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_equal_one_process(num_ranks: int) -> None:
    losses = {
        f"{name} {chunk_size}": partial(loss, chunk_size=chunk_size)
        for name, (loss, _) in CASES.items()
        for chunk_size in (None, 2)
    }
    assert_ranks_equal_one_process(losses, num_ranks, per_rank=3)


def test_the_classes_are_the_functions_and_log_what_they_see() -> None:
    z_a, z_b = related_views(8, 6)
    pair = ViewPair(z_a, z_b, torch.arange(8), step=0)
    outputs = {
        "dcl": (DCL(DCLConfig(temperature=0.2))(z_a, z_b, pair), dcl_loss(z_a, z_b, temperature=0.2)),
        "ifm": (IFM(IFMConfig(temperature=0.2))(z_a, z_b, pair), ifm_loss(z_a, z_b, temperature=0.2, epsilon=0.1)),
        "macl": (MACL(MACLConfig(temperature=0.2))(z_a, z_b, pair), macl_loss(z_a, z_b, temperature=0.2)),
    }
    alignment = torch.cosine_similarity(z_a, z_b).mean()
    plain = torch.stack([-nt_xent_loss(z_a, z_b, temperature=0.2)]).exp()
    for name, (output, loss) in outputs.items():
        assert torch.equal(output.loss, loss), name
        assert output.metrics["alignment"].item() == pytest.approx(alignment.item(), rel=1e-5)
        assert 0 < output.metrics["positive_probability"] < 1
    # By the inequality of Jensen, the mean of probabilities is above exp of the mean log-probability.
    assert outputs["dcl"][0].metrics["positive_probability"] > plain
    assert outputs["macl"][0].metrics["temperature"].item() == pytest.approx(0.2 * (1 + 0.5 * alignment.item()))


def test_the_temperature_of_a_cycle_is_the_papers() -> None:
    temperature = partial(cycled_temperature, lowest=0.1, highest=1.0, period_epochs=200)
    assert [temperature(epoch) for epoch in (0, 50, 100, 150, 200, 300)] == pytest.approx([1, 0.55, 0.1, 0.55, 1, 0.1])
    assert temperature(2 * 10**8 + 50) == pytest.approx(0.55)  # far out, without a loss of digits
    assert cycled_temperature(7, lowest=0.3, highest=0.3, period_epochs=5) == pytest.approx(0.3)
    assert cycled_temperature(7, lowest=0.3, highest=0.9, period_epochs=1) == pytest.approx(0.9)


def test_nt_xent_in_cycles_is_nt_xent_at_the_temperature_of_the_epoch() -> None:
    z_a, z_b = related_views(8, 6)
    objective = NTXentCycle(NTXentCycleConfig(period_epochs=4, chunk_size=3))
    for epoch, temperature in enumerate([1, 0.55, 0.1, 0.55, 1]):
        output = objective(z_a, z_b, ViewPair(z_a, z_b, torch.arange(8), step=9, epoch=epoch))
        torch.testing.assert_close(output.loss, nt_xent_loss(z_a, z_b, temperature=temperature))
        assert output.metrics["temperature"].item() == pytest.approx(temperature)


@pytest.mark.parametrize("loss", [dcl_loss, partial(ifm_loss, epsilon=0.1), macl_loss])
def test_wrong_input_is_refused(loss: Any) -> None:
    z_BD = torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"chunk_size is 0; it must be positive"):
        loss(z_BD, z_BD, temperature=0.5, chunk_size=0)
    with pytest.raises(ValueError, match=r"\(4, 3\) and \(3, 3\)"):
        loss(z_BD, z_BD[:3], temperature=0.5)
    with pytest.raises(ValueError, match="a global batch of 1 sample has no negatives"):
        loss(z_BD[:1], z_BD[:1], temperature=0.5)


def test_temperatures_and_settings_out_of_range_are_refused() -> None:
    z_BD = torch.randn(4, 3)
    for loss in (dcl_loss, partial(ifm_loss, epsilon=0.1), macl_loss):
        with pytest.raises(ValueError, match=r"temperature is 0\.0; it must be positive"):
            loss(z_BD, z_BD, temperature=0.0)
    with pytest.raises(ValueError, match=r"set sensitivity below 0\.5"):
        macl_loss(z_BD, z_BD, temperature=0.5, sensitivity=0.5, neutral_alignment=1.0)
    with pytest.raises(ValidationError, match="let the temperature fall to 0"):
        MACLConfig(sensitivity=1.0)
    with pytest.raises(ValidationError, match=r"lowest is 0\.5, above highest 0\.1; exchange the two"):
        NTXentCycleConfig(lowest=0.5, highest=0.1)
    with pytest.raises(ValidationError, match=r"with a chunk_size it must be at least 0\.02"):
        NTXentCycleConfig(lowest=0.01, chunk_size=8)
    for config, settings in (
        (IFMConfig, {"epsilon": -0.1}),
        (IFMConfig, {"epsilon": 1.5}),
        (DCLConfig, {"temperature": 0}),
    ):
        with pytest.raises(ValidationError):
            config.model_validate(settings)
