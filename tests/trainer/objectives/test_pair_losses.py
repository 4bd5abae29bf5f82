"""Every pure loss of two views' embeddings: against a loop in float64, against peers, on ranks, in low precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from tests.trainer.objectives import loops
from tests.trainer.objectives.pair_losses import (
    Loss,
    assert_near,
    loss_and_gradient,
    related_views,
)
from trainer.models import ResNetConfig, build_encoder
from trainer.objectives import (
    BarlowTwinsConfig,
    BaseObjectiveConfig,
    DCLConfig,
    IFMConfig,
    InfoNCEConfig,
    LinearLossConfig,
    MACLConfig,
    NTXentConfig,
    NTXentCycleConfig,
    ObjectiveInputs,
    PublishedNTXentConfig,
    SIGRegConfig,
    SplitLossConfig,
    SymmetricInfoNCEConfig,
    VICRegConfig,
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

HOT: dict[str, Any] = {"temperature": 0.3}
IFM: dict[str, Any] = {"temperature": 0.3, "epsilon": 0.2, "perturbed_weight": 2.0}
MACL: dict[str, Any] = {"temperature": 0.3, "sensitivity": 0.6, "neutral_alignment": 0.2}
SPLIT: dict[str, Any] = {"temperature": 0.3, "divergence_weight": 0.7}
VICREG: dict[str, Any] = {
    "invariance_weight": 3.0,
    "variance_weight": 2.0,
    "covariance_weight": 0.7,
    "epsilon": 1e-3,
}
SIGREG: dict[str, Any] = {"normality_weight": 0.3, "num_projections": 6}
TWINS: dict[str, Any] = {"off_diagonal_weight": 0.5}
# Loss, loop, config and settings of each.
CASES: dict[str, tuple[Loss, Loss, type[BaseObjectiveConfig], dict[str, Any]]] = {
    "nt_xent": (nt_xent_loss, loops.nt_xent, NTXentConfig, HOT),
    "nt_xent_published": (published_nt_xent_loss, loops.published_nt_xent, PublishedNTXentConfig, HOT),
    "dcl": (dcl_loss, loops.dcl, DCLConfig, HOT),
    "dcl, cold": (dcl_loss, loops.dcl, DCLConfig, {"temperature": 0.03}),
    "ifm": (ifm_loss, loops.ifm, IFMConfig, IFM),
    "macl": (macl_loss, loops.macl, MACLConfig, MACL),
    "symmetric_info_nce": (symmetric_info_nce_loss, loops.symmetric_info_nce, SymmetricInfoNCEConfig, HOT),
    "split": (split_loss, loops.split, SplitLossConfig, SPLIT),
    "linear": (linear_loss, loops.linear, LinearLossConfig, {"divergence_weight": 5.0}),
    "info_nce": (info_nce_loss, loops.info_nce, InfoNCEConfig, {}),
    "barlow_twins": (barlow_twins_loss, loops.barlow_twins, BarlowTwinsConfig, TWINS),
    "barlow_twins, unbiased": (barlow_twins_loss, loops.barlow_twins, BarlowTwinsConfig, TWINS | {"unbiased": True}),
    "vicreg": (vicreg_loss, loops.vicreg, VICRegConfig, VICREG),
    "sigreg": (sigreg_loss, loops.sigreg, SIGRegConfig, SIGREG),
}
CHUNKED = [name for name, (*_, config, _) in CASES.items() if "chunk_size" in config.model_fields]
WITH_CHUNKS = [(name, chunk_size) for name in CASES for chunk_size in ([None, 4, 1000] if name in CHUNKED else [None])]
every_loss = pytest.mark.parametrize("name", CASES)


def loss_of(name: str, chunk_size: int | None = None) -> Loss:
    loss, _, _, settings = CASES[name]
    return partial(loss, **settings) if chunk_size is None else partial(loss, **settings, chunk_size=chunk_size)


@pytest.mark.parametrize(("name", "chunk_size"), WITH_CHUNKS)
def test_loss_and_gradient_equal_a_loop_in_float64(name: str, chunk_size: int | None) -> None:
    _, loop, _, settings = CASES[name]
    loss, z_VBD = loss_of(name, chunk_size), related_views(7, 5)
    expected = loss_and_gradient(partial(loop, **settings), z_VBD)
    assert_near(loss_and_gradient(loss, z_VBD), expected, rtol=1e-12)
    assert_near(loss_and_gradient(loss, z_VBD.float()), expected, rtol=2e-5)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_nt_xent_against_samples_equals_a_loop_in_float64(chunk_size: int | None) -> None:
    z_VBD = torch.cat([related_views(7, 5), related_views(7, 5, seed=1)[:1]])
    config = NTXentConfig(negatives="samples", chunk_size=chunk_size, **HOT)
    views_BCHW, index_B = torch.rand(7, 3, 4, 4), torch.arange(7)

    def loss(z_a_BD: Tensor, z_b_BD: Tensor, *samples_BD: Tensor) -> Any:
        return built(config)(z_a_BD, z_b_BD, ViewPair(views_BCHW, views_BCHW, index_B, step=0), *samples_BD)

    expected = loss_and_gradient(partial(loops.nt_xent_against_samples, **HOT), z_VBD)
    assert_near(loss_and_gradient(loss, z_VBD), expected, rtol=1e-12)
    with pytest.raises(TypeError, match="z_BD"):  # never the views in their place
        loss(*z_VBD[:2])


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("name", ["nt_xent", "nt_xent_published", "dcl"])
def test_a_temperature_gets_the_gradient_of_the_loop(name: str, chunk_size: int | None) -> None:
    loss, loop, _, _ = CASES[name]
    found = []
    for each in (partial(loss, chunk_size=chunk_size), loop):
        temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        output = each(*related_views(6, 5), temperature=temperature)
        value = output if isinstance(output, Tensor) else output.loss
        found.append(torch.autograd.grad(value, temperature)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=0)


def as_published(z_a_BD: Tensor, z_b_BD: Tensor) -> Tensor:
    """The lines of the notebook of Chen, Luo and Li: normalise, one matrix, cross-entropy of it and its transpose."""
    logits_BB = F.normalize(z_a_BD, dim=1) @ F.normalize(z_b_BD, dim=1).T / 0.07
    labels_B = torch.arange(len(logits_BB))
    return F.cross_entropy(logits_BB, labels_B) + F.cross_entropy(logits_BB.T, labels_B)


@pytest.mark.parametrize("name", ["nt_xent", "dcl", "macl", "barlow_twins", "vicreg", "vicreg, small", "symmetric"])
def test_loss_and_gradient_equal_a_peers(name: str) -> None:
    from lightly import loss as peers  # here, because every rank imports this file
    from lightly.loss.macl_loss import MACLLoss

    macl = partial(macl_loss, temperature=0.07, sensitivity=0.5, neutral_alignment=0.3)
    peer: dict[str, tuple[Loss, Loss, float, float]] = {
        "nt_xent": (partial(nt_xent_loss, temperature=0.07), peers.NTXentLoss(temperature=0.07), 1, 1e-6),
        "dcl": (partial(dcl_loss, temperature=0.07), peers.DCLLoss(temperature=0.07), 1, 1e-6),
        # Theirs adds 1e-8 to 1 - p.
        "macl": (macl, MACLLoss(temperature=0.07, alpha=0.5, A_0=0.3), 1, 1e-6),
        "barlow_twins": (barlow_twins_loss, peers.BarlowTwinsLoss(), 0.1, 1e-12),
        "vicreg": (vicreg_loss, peers.VICRegLoss(), 1, 1e-12),
        "vicreg, small": (vicreg_loss, peers.VICRegLoss(), 0.1, 1e-12),  # with deviations below 1
        "symmetric": (partial(symmetric_info_nce_loss, temperature=0.07), as_published, 1, 1e-12),
    }
    ours, theirs, scale, rtol = peer[name]
    z_VBD = scale * related_views(43, 16)
    assert_near(loss_and_gradient(ours, z_VBD), loss_and_gradient(theirs, z_VBD), rtol=rtol)


@pytest.mark.parametrize(("name", "chunk_size"), [case for case in WITH_CHUNKS if case[1] in (None, 4)])
def test_autocast_changes_nothing_and_low_precision_is_raised(name: str, chunk_size: int | None) -> None:
    loss, z_VBD = loss_of(name, chunk_size), related_views(20, 16, dtype=torch.float32)
    expected = loss_and_gradient(loss, z_VBD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # torch wants backward outside autocast, but a user's mistake there must not cost precision in the chunks.
        found = loss_and_gradient(loss, z_VBD)
        low = loss(*z_VBD.bfloat16())
    if chunk_size is not None:
        assert_near(found, expected, rtol=1e-6)
    assert torch.equal(found[0], expected[0])
    assert not isinstance(low, Tensor)
    assert low.loss.dtype == torch.float32
    assert torch.equal(low.loss.detach(), loss_and_gradient(loss, z_VBD.bfloat16().float())[0])


def built(config: BaseObjectiveConfig) -> Any:
    encoder = build_encoder(ResNetConfig(kind="resnet10", width=1, mean=(0.5,) * 3, std=(0.25,) * 3))
    return config.build(ObjectiveInputs(encoder, 16, 20, seed=0))


@every_loss
def test_an_objective_is_its_function_with_the_settings_of_its_config(name: str) -> None:
    _, _, config, settings = CASES[name]
    z_a, z_b = related_views(8, 16)
    objective = built(config.model_validate({"kind": config.model_fields["kind"].default} | settings))
    output = objective(z_a.requires_grad_(), z_b, ViewPair(z_a, z_b, torch.arange(8), step=0))
    assert torch.equal(output.loss.detach(), loss_and_gradient(loss_of(name), torch.stack([z_a, z_b]))[0])
    assert output.loss.requires_grad
    assert not any(value.requires_grad for value in output.metrics.values())
    assert output.metrics["alignment"].item() == pytest.approx(torch.cosine_similarity(z_a, z_b).mean().item())
    assert 0 < output.metrics.get("positive_probability", torch.tensor(0.5)) < 1
    assert objective.saved_state() == {}


@every_loss
def test_wrong_shapes_and_a_single_sample_are_refused(name: str) -> None:
    loss, z_BD = loss_of(name), torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"\(4, 3\) and \(3, 3\)"):
        loss(z_BD, z_BD[:3])
    with pytest.raises(ValueError, match=r"an empty batch has no loss: .* are \(0, 3\)"):
        loss(z_BD[:0], z_BD[:0])
    with pytest.raises(ValueError, match=r"must be \(B, D\)"):
        loss(z_BD[0], z_BD[0])
    if not name.startswith(("nt_xent", "sigreg")):
        with pytest.raises(ValueError, match=r"1 sample|at least 2"):
            loss(z_BD[:1], z_BD[:1])


@pytest.mark.parametrize("name", CHUNKED)
def test_temperatures_out_of_range_are_refused(name: str) -> None:
    loss, _, _, settings = CASES[name]
    z_BD = torch.randn(4, 3)
    for wrong in (0.0, -1.0):
        with pytest.raises(ValueError, match="temperature"):
            loss(z_BD, z_BD, **settings | {"temperature": wrong})


def test_a_temperature_that_would_fall_to_zero_and_a_range_that_descends_are_refused() -> None:
    with pytest.raises(ValidationError, match="sensitivity"):
        MACLConfig(sensitivity=1.0)
    with pytest.raises(ValidationError, match="exchange the two"):
        NTXentCycleConfig(lowest=0.5, highest=0.1)
