"""The viewmaker: the published network layer by layer, its budget, and noise that depends on the keys alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from data_pipeline.counter_rng import DrawKeys
from tests.trainer.views.viewmaker_as_written import AsWritten
from trainer.views.viewmaker import ConvNorm, Viewmaker, ViewmakerConfig, project


def keys(num: int, *, seed: int = 0, epoch: int = 0, view: int = 0) -> DrawKeys:
    return DrawKeys(seed=seed, epoch=epoch, index_B=torch.arange(num), view=view)


def pictures(num: int, *, channels: int = 3, size: int = 32) -> Tensor:
    return torch.rand(num, channels, size, size, generator=torch.Generator().manual_seed(0))


def make(*, channels: int = 3, **config: object) -> Viewmaker:
    torch.manual_seed(0)
    return Viewmaker(ViewmakerConfig.model_validate(config), image_channels=channels)


@pytest.mark.parametrize(
    ("channels", "num_res_blocks", "num_parameters"), [(3, 3, 1_120_131), (1, 3, 1_109_761), (3, 1, 504_315)]
)
def test_number_of_parameters_is_the_published_one(channels: int, num_res_blocks: int, num_parameters: int) -> None:
    viewmaker = make(channels=channels, num_res_blocks=num_res_blocks)
    assert sum(p.numel() for p in viewmaker.parameters()) == num_parameters


def test_every_stage_has_the_published_size() -> None:
    viewmaker, sizes = make(), []
    for module in viewmaker.modules():
        if isinstance(module, ConvNorm):
            module.register_forward_hook(lambda module, inputs, output: sizes.append(tuple(output.shape[1:])))
    viewmaker(pictures(2), keys(2))
    residual = [(channels, 8, 8) for channels in (129, 129, 130, 130, 131, 131)]
    assert sizes == [(32, 32, 32), (64, 16, 16), (128, 8, 8), *residual, (64, 16, 16), (32, 32, 32)]
    half = make(base_width=16)
    assert [p.shape[0] for name, p in half.stem.named_parameters() if name.endswith("conv.weight")] == [16, 32, 64]


@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 64)])
def test_views_and_gradients_are_those_of_the_network_as_written(channels: int, size: int) -> None:
    viewmaker = make(channels=channels, base_width=8, num_res_blocks=2).double()
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
    torch.testing.assert_close(views, expected_views, atol=1e-10, rtol=1e-10)
    # Both lists are in the order of the forward pass, with weight before bias.
    for (name, gradient), expected_gradient in zip(ours.items(), expected.values(), strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-9, rtol=1e-7, msg=name)


def test_every_parameter_gets_a_gradient() -> None:
    """The biases that a norm cancels get exactly 0, all others a gradient that is not 0."""
    viewmaker = make()
    viewmaker(pictures(4), keys(4)).square().sum().backward()
    for name, parameter in viewmaker.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        cancelled = name.endswith("conv.bias")
        assert bool(parameter.grad.abs().max() == 0) == cancelled, name


def test_projection_is_the_formula() -> None:
    r = torch.tensor([0.5, -1.0, 2.0, 0.0]).view(1, 1, 2, 2)
    tanh = [0.46211716, -0.76159416, 0.96402758, 0.0]
    mean = 0.54693472
    expected = [0.05 * value / (mean + 1e-4) for value in tanh]
    torch.testing.assert_close(project(r, budget=0.05).flatten(), torch.tensor(expected))


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
def test_every_perturbation_spends_the_budget_and_never_more(scale: float) -> None:
    """Each sample by itself, whatever the size of the network's output."""
    r = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * scale
    r[0, :, 3:] = 0  # one sample changes a few rows only, by more
    spent = project(r, budget=0.05).abs().mean(dim=(1, 2, 3))
    share = torch.tanh(r).abs().mean(dim=(1, 2, 3))
    torch.testing.assert_close(spent, 0.05 * share / (share + 1e-4))
    assert (spent <= 0.05 * (1 + 1e-6)).all()


@pytest.mark.parametrize("clamp", [True, False])
def test_the_budget_holds_on_every_view(clamp: bool) -> None:
    viewmaker, x = make(clamp=clamp, budget=0.1), pictures(32)
    with torch.no_grad():
        deltas, views = viewmaker.deltas(x, keys(32)), viewmaker(x, keys(32))
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
        views = make()(pictures(4), keys(4))
        deltas = make().deltas(pictures(4), keys(4))
    assert delta.dtype == views.dtype == deltas.dtype == torch.float32
    assert torch.equal(delta, project(r.float(), budget=0.05))
    assert (deltas.abs().mean(dim=(1, 2, 3)) <= 0.05 * (1 + 1e-6)).all()
    # The views themselves are near those of float32: the network, not the projection, is what bfloat16 rounds.
    torch.testing.assert_close(deltas, make().deltas(pictures(4), keys(4)), atol=0.02, rtol=0)


def test_a_view_does_not_depend_on_its_batch() -> None:
    viewmaker, x, all_keys = make(), pictures(8), keys(8)
    with torch.no_grad():
        whole = viewmaker(x, all_keys)
        for part in (slice(0, 4), slice(4, 8), slice(5, 6)):
            some = viewmaker(x[part], dataclasses.replace(all_keys, index_B=all_keys.index_B[part]))
            torch.testing.assert_close(some, whole[part], atol=1e-5, rtol=0)


def test_views_repeat_exactly_and_differ_between_keys() -> None:
    viewmaker, x = make(), pictures(4)
    with torch.no_grad():
        views = viewmaker(x, keys(4))
        torch.manual_seed(1)
        assert torch.equal(views, viewmaker.eval()(x, keys(4)))
        for other in (keys(4, view=1), keys(4, epoch=1), keys(4, seed=1)):
            assert ((viewmaker(x, other) - views).abs().mean(dim=(1, 2, 3)) > 1e-4).all()
        same = viewmaker(x[:1].expand(4, -1, -1, -1), keys(4))
        assert ((same[1:] - same[:1]).abs().mean(dim=(1, 2, 3)) > 1e-4).all()  # one picture, four indices


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [32, 64])
def test_channels_last_changes_nothing(channels: int, size: int) -> None:
    x = pictures(2, channels=channels, size=size)
    viewmaker = make(channels=channels, base_width=16)
    with torch.no_grad():
        expected = viewmaker(x, keys(2))
        viewmaker.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        last = viewmaker(x.contiguous(memory_format=torch.channels_last), keys(2))
    assert expected.shape == x.shape
    torch.testing.assert_close(last, expected, atol=1e-5, rtol=0)


def test_views_are_made_without_waiting_for_the_device() -> None:
    index = torch.arange(8, device="meta")
    viewmaker = make().to("meta")
    views = viewmaker(torch.empty(8, 3, 32, 32, device="meta"), DrawKeys(seed=0, epoch=0, index_B=index, view=0))
    assert views.shape == (8, 3, 32, 32)


def test_pictures_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 4, got 30 x 30"):
        make()(pictures(2, size=30), keys(2))


@pytest.mark.parametrize("wrong", [{"budget": 0}, {"base_width": 0}, {"num_res_blocks": 0}, {"bugdet": 0.1}])
def test_config_refuses_what_makes_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ViewmakerConfig.model_validate(wrong)
