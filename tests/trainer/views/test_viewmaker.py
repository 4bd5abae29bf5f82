"""The viewmaker: the published network layer by layer, its budget, and noise that depends on the keys alone."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE
from tests.data_pipeline.building.draws import keys_of as keys
from tests.trainer.views.viewmaker_as_written import AsWritten
from trainer.views.viewmaker import (
    Pairing,
    Viewmaker,
    ViewmakerConfig,
    attacked_views,
    draw_noise,
    project,
)


def pictures(num: int, *, channels: int = 3, size: int = 32) -> Tensor:
    return torch.rand(num, channels, size, size, generator=torch.Generator().manual_seed(0))


def make(*, channels: int = 3, **config: Any) -> Viewmaker:
    torch.manual_seed(0)
    return Viewmaker(ViewmakerConfig.model_validate(config), image_channels=channels)


@pytest.mark.parametrize(
    ("channels", "num_res_blocks", "num_parameters"), [(3, 3, 1_120_131), (1, 3, 1_109_761), (3, 1, 504_315)]
)
def test_number_of_parameters_is_the_published_one(channels: int, num_res_blocks: int, num_parameters: int) -> None:
    viewmaker = make(channels=channels, num_res_blocks=num_res_blocks)
    assert sum(p.numel() for p in viewmaker.parameters()) == num_parameters


OPTIONS: dict[str, dict[str, Any]] = {
    "published": {},
    "downsampled": {"downsample_to": 16, "clamp": False},
}


@pytest.mark.parametrize(("channels", "size", "option"), [(3, 32, "published"), (1, 64, "downsampled")])
def test_views_and_gradients_are_those_of_the_network_as_written(channels: int, size: int, option: str) -> None:
    viewmaker = make(channels=channels, base_width=8, num_res_blocks=2, **OPTIONS[option]).double()
    with torch.no_grad():
        for parameter in viewmaker.parameters():  # scales and shifts start at 1 and 0, where a mistake would not show
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    as_written = AsWritten(viewmaker)
    x, target = pictures(3, channels=channels, size=size).double(), torch.rand(3, channels, size, size).double()
    gradients = []
    for network in (viewmaker, as_written):
        views = network(x, keys(3))
        (views - target).square().sum().backward()
        gradients.append((views.detach(), {name: p.grad for name, p in network.named_parameters()}))
    (views, ours), (expected_views, expected) = gradients
    torch.testing.assert_close(views, expected_views, atol=1e-13, rtol=1e-12)
    # Both lists are in the order of the forward pass, with weight before bias.
    for (name, gradient), expected_gradient in zip(ours.items(), expected.values(), strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-11, rtol=1e-9, msg=name)


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
def test_every_perturbation_spends_the_budget_and_never_more(scale: float) -> None:
    """Each sample by itself, whatever the size of the network's output."""
    r = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * scale
    r[0, :, 3:] = 0  # one sample changes a few rows only, by more
    spent = project(r, budget=0.05).abs().mean(dim=(1, 2, 3))
    share = torch.tanh(r).abs().mean(dim=(1, 2, 3))
    torch.testing.assert_close(spent, 0.05 * share / (share + 1e-4))
    assert (spent <= 0.05 * (1 + 1e-6)).all()


@pytest.mark.slow
@pytest.mark.parametrize("clamp", [True, False])
def test_the_budget_holds_on_every_view(clamp: bool) -> None:
    viewmaker, x = make(clamp=clamp, budget=0.1, base_width=8), pictures(16)
    with torch.no_grad():
        deltas, views = viewmaker.deltas(x, keys(16)), viewmaker(x, keys(16))
    spent = deltas.abs().mean(dim=(1, 2, 3))
    assert (spent <= 0.1 * (1 + 1e-6)).all()
    assert (spent > 0.1 * 0.99).all()
    assert ((views - x).abs().mean(dim=(1, 2, 3)) <= 0.1 * (1 + 1e-6)).all()
    assert torch.equal(views, (x + deltas).clamp(0, 1) if clamp else x + deltas)
    assert clamp == bool(views.min() >= 0 and views.max() <= 1)


def test_under_autocast_the_projection_stays_in_float32() -> None:
    r = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        delta = project(r, budget=0.05)
        views = make(base_width=8)(pictures(4), keys(4))
        deltas = make(base_width=8).deltas(pictures(4), keys(4))
    assert delta.dtype == views.dtype == deltas.dtype == torch.float32
    assert torch.equal(delta, project(r.float(), budget=0.05))
    assert (deltas.abs().mean(dim=(1, 2, 3)) <= 0.05 * (1 + 1e-6)).all()
    # The views are close to float32, because bfloat16 rounds only the network and not the projection.
    torch.testing.assert_close(deltas, make(base_width=8).deltas(pictures(4), keys(4)), atol=0.02, rtol=0)


def test_a_downsampled_viewmaker_changes_pictures_smoothly_and_within_the_budget() -> None:
    """Stretched by a whole number every small pixel weighs the same, so the mean change cannot grow."""
    viewmaker, x = make(downsample_to=8, base_width=8), pictures(8)
    with torch.no_grad():
        deltas = viewmaker.deltas(x, keys(8))
    spent = deltas.abs().mean(dim=(1, 2, 3))
    assert (spent <= 0.05 * (1 + 1e-6)).all()
    assert (spent > 0.02).all()
    steps = deltas.diff(dim=3)[..., 2:6]  # between the centres of two small pixels it goes in a straight line
    torch.testing.assert_close(steps[..., 1:3], steps[..., :2], atol=1e-6, rtol=0)


def masks(num: int) -> Tensor:
    """A box with an object in it, somewhere else in each picture; nothing in the last one."""
    masks_BHW = torch.full((num, 32, 32), MASK_OUTSIDE, dtype=torch.uint8)
    for number in range(num - 1):
        masks_BHW[number, 4 + number : 16 + number, 6:20] = MASK_BOX
        masks_BHW[number, 6 + number : 12 + number, 8:16] = MASK_OBJECT
    return masks_BHW


@pytest.mark.parametrize(
    ("mask", "level", "option"), [("box", MASK_BOX, "published"), ("object", MASK_OBJECT, "downsampled")]
)
def test_a_masked_viewmaker_leaves_the_object_alone(mask: str, level: int, option: str) -> None:
    """Outside it does what it would do without the mask, which is where it differs from a re-projected one."""
    config, x, masks_BHW = {"base_width": 8} | OPTIONS[option], pictures(6), masks(6)
    with torch.no_grad():
        free = make(**config)(x, keys(6))
        views = make(**config, mask=mask)(x, keys(6), masks_BHW)
    protected = (masks_BHW >= level)[:, None].expand_as(x)
    assert protected.any()
    assert torch.equal(views[protected], x[protected])
    assert torch.equal(views[~protected], free[~protected])
    assert torch.equal(views[-1], free[-1])


def test_a_picture_masked_everywhere_stays_as_it_is() -> None:
    x, everywhere = pictures(2), torch.full((2, 32, 32), MASK_OBJECT, dtype=torch.uint8)
    viewmaker = make(base_width=8, mask="object")
    views = viewmaker(x, keys(2), everywhere)
    assert torch.equal(views, x)
    views.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in viewmaker.parameters())


def test_masks_of_another_type_or_shape_are_refused() -> None:
    viewmaker, x = make(base_width=8, mask="box"), pictures(4)
    for wrong in (masks(4).bool(), masks(4).long(), masks(1), masks(4)[:, :16, :16], masks(4)[:, None]):
        with pytest.raises(ValueError, match=r"masks must be uint8 of shape \(4, 32, 32\) .* 255 on the object, got "):
            viewmaker(x, keys(4), wrong)


RATES = (0.02, 0.1, 0.25, 0.5, 0.9)


@pytest.mark.slow
@pytest.mark.parametrize(("view", "pairing"), [(3, "independent"), (0, "exclusive"), (3, "exclusive")])
def test_a_view_is_attacked_with_the_probability_of_the_rate(view: int, pairing: Pairing) -> None:
    """Over samples of one epoch, and over epochs of one sample; four standard deviations of the binomial law."""
    num = 20_000
    of_samples = keys(num, view=view)
    for rate in RATES[:-1]:
        bound = 4 * math.sqrt(rate * (1 - rate) / num)
        assert attacked_views(of_samples, rate=rate, pairing=pairing).double().mean() == pytest.approx(rate, abs=bound)
    of_epochs = [attacked_views(keys(1, epoch=epoch, view=view), rate=0.3, pairing=pairing) for epoch in range(500)]
    assert torch.cat(of_epochs).double().mean() == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / 500))


def test_a_higher_rate_attacks_the_same_views_and_more() -> None:
    attacked = [attacked_views(keys(1_000), rate=rate) for rate in RATES]
    assert all((low <= high).all() and not torch.equal(low, high) for low, high in pairwise(attacked))
    assert attacked_views(keys(1_000), rate=1.0).all()


@pytest.mark.parametrize(("rate", "first"), [(0.1, 0), (0.5, 2)])
def test_of_a_pair_both_views_are_attacked_by_chance_or_never(rate: float, first: int) -> None:
    num = 20_000
    both: dict[Pairing, float] = {"independent": rate**2, "exclusive": 0.0}
    for pairing, expected in both.items():
        a, b = (attacked_views(keys(num, view=view), rate=rate, pairing=pairing) for view in (first, first + 1))
        bound = 4 * math.sqrt(expected * (1 - expected) / num)
        assert (a & b).double().mean() == pytest.approx(expected, abs=bound)
        either = 2 * rate - expected
        assert (a | b).double().mean() == pytest.approx(either, abs=4 * math.sqrt(either * (1 - either) / num) + 1e-9)


def test_what_is_attacked_is_drawn_apart_from_the_noise() -> None:
    """No number of any layer's noise is the number that decides."""
    noise = draw_noise(keys(1_000), 8, 8, layers=range(1))[0].flatten(1)
    attacked = attacked_views(keys(1_000), rate=0.5)
    agreement = ((noise < 0.5) == attacked[:, None]).double().mean(0)
    assert ((agreement > 0.4) & (agreement < 0.6)).all()


@pytest.mark.parametrize(
    "option",
    [*OPTIONS.values(), {"mask": "box"}, {"dropout_pairing": "exclusive"}],
)
def test_views_that_are_not_attacked_are_the_pictures_and_the_others_what_they_would_be(option: dict[str, Any]) -> None:
    num, config = 24, {"base_width": 4, "num_res_blocks": 1} | option
    x = pictures(num)
    boxes = torch.full((num, 32, 32), MASK_OUTSIDE, dtype=torch.uint8)
    boxes[:, 6:12, 8:16] = MASK_BOX
    with torch.no_grad():
        every = make(**config | {"dropout_pairing": "independent"})(x, keys(num), boxes)
        views = make(**config, dropout_rate=0.4)(x, keys(num), boxes)
        assert torch.equal(
            make(**config | {"dropout_pairing": "independent"}, dropout_rate=1)(x, keys(num), boxes), every
        )
    attacked = attacked_views(keys(num), rate=0.4, pairing=option.get("dropout_pairing", "independent"))
    assert 4 < attacked.sum() < num - 4
    assert torch.equal(views[~attacked], x[~attacked])
    assert torch.equal(views[attacked], every[attacked])
    assert (every != x).flatten(1).any(dim=1).all()


@pytest.mark.slow
def test_the_gradient_comes_from_attacked_views_alone() -> None:
    """The gradient of the whole batch equals that of its attacked rows; it is 0, not missing, if no row is attacked."""
    num = 12
    x, target = pictures(num).double(), torch.rand(num, 3, 32, 32).double()
    attacked = attacked_views(keys(num), rate=0.4)
    assert 2 < attacked.sum() < num - 2

    def gradients(rows: Tensor, **config: Any) -> dict[str, Tensor | None]:
        viewmaker = make(base_width=4, num_res_blocks=1, **config).double()
        some = dataclasses.replace(keys(num), index_B=keys(num).index_B[rows])
        (viewmaker(x[rows], some) - target[rows]).square().sum().backward()
        return {name: parameter.grad for name, parameter in viewmaker.named_parameters()}

    everywhere, nowhere = torch.ones(num, dtype=torch.bool), ~attacked
    expected = gradients(attacked)
    for name, gradient in gradients(everywhere, dropout_rate=0.4).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-12, rtol=1e-8, msg=name)
    assert all(
        gradient is not None and (gradient == 0).all() for gradient in gradients(nowhere, dropout_rate=0.4).values()
    )


@pytest.mark.parametrize(
    ("config", "height", "width", "message"),
    [
        ({}, 30, 30, "multiples of 4, at least 8, got 30 x 30"),
        ({}, 32, 31, "multiples of 4, at least 8, got 32 x 31"),
        ({}, 4, 4, "multiples of 4, at least 8, got 4 x 4"),
        ({"downsample_to": 24}, 32, 32, "downsample_to=24 needs .* multiples of it, got 32 x 32"),
        ({"downsample_to": 16}, 8, 8, "downsample_to=16 needs .* multiples of it, got 8 x 8"),
    ],
)
def test_pictures_that_do_not_divide_are_refused(config: dict[str, Any], height: int, width: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ViewmakerConfig.model_validate(config).check_image_size(height=height, width=width)
    with pytest.raises(ValueError, match=message):
        make(base_width=4, **config)(torch.rand(2, 3, height, width), keys(2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"downsample_to": 18}, "downsample_to is 18; it must be a multiple of 4, at least 8"),
        ({"downsample_to": 4}, "downsample_to is 4; it must be a multiple of 4, at least 8"),
        ({"dropout_pairing": "exclusive"}, "needs a dropout_rate up to 0.5, got None"),
        ({"dropout_pairing": "exclusive", "dropout_rate": 0.6}, "needs a dropout_rate up to 0.5, got 0.6"),
    ],
)
def test_config_refuses_what_makes_no_sense(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ViewmakerConfig.model_validate(wrong)
