"""Weights that are cast together, against autocast, which casts each weight by itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data_pipeline.core.counter_rng import DrawKeys
from tests.trainer.models.test_encoder import CIFAR10
from trainer.models import ConvNetConfig, Encoder, EncoderConfig, ResNetConfig, build_encoder, encoder, weight_casts
from trainer.models.activation_checkpointing import Checkpointing
from trainer.models.trunk import Trunk
from trainer.models.weight_casts import cast_together, weights_of
from trainer.views import viewmaker
from trainer.views.viewmaker import Viewmaker, ViewmakerConfig

CPU = torch.device("cpu")
RESNET = ResNetConfig(kind="resnet10", width=4)


def without_cast(weights: object, *, device: torch.device) -> AbstractContextManager[None]:
    return nullcontext()


def results(module: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    """Return the output under autocast, and the gradient of each parameter."""
    module.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run()
    out.square().mean().backward()  # type: ignore[no-untyped-call]
    return [out, *(parameter.grad for parameter in module.parameters() if parameter.grad is not None)]


def assert_equal_to_autocast(
    monkeypatch: pytest.MonkeyPatch, room: Any, module: nn.Module, run: Callable[[], Tensor]
) -> None:
    found = results(module, run)
    monkeypatch.setattr(room, "cast_together", without_cast)
    expected = results(module, run)
    assert len(found) == len(expected) == 1 + len(list(module.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("checkpointing", ["none", 2])
@pytest.mark.parametrize(
    "config", [RESNET, ConvNetConfig(channels=(8, 8), image_size=(16, 16))], ids=["resnet", "convnet"]
)
def test_an_encoder_has_the_bits_of_autocast(
    config: EncoderConfig, checkpointing: Checkpointing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two views pass one after the other, so each weight has two gradients, which are added in bfloat16."""
    module = build_encoder(config, normalization=CIFAR10)
    module.trunk.checkpointing = checkpointing
    views_BCHW = torch.rand(8, 3, 16, 16)
    assert_equal_to_autocast(monkeypatch, encoder, module, lambda: module(views_BCHW, 2))


def test_a_viewmaker_has_the_bits_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Viewmaker(ViewmakerConfig(base_width=4, num_res_blocks=2), image_channels=3)
    images_BCHW, keys = torch.rand(4, 3, 16, 16), DrawKeys(seed=0, epoch=0, index_B=torch.arange(4), view=0)
    assert_equal_to_autocast(monkeypatch, viewmaker, module, lambda: module(images_BCHW, keys))


@pytest.mark.parametrize(("is_distributed", "num_functions"), [(False, 1), (True, 3)])
def test_each_rank_of_several_casts_each_gradient_alone(
    is_distributed: bool, num_functions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_casts, "is_distributed", lambda: is_distributed)
    module = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Linear(4, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16), cast_together(weights_of(module), device=CPU):
        copies: list[Tensor] = [getattr(layer, name) for layer, name in weights_of(module)]
        assert [copy.dtype for copy in copies] == [torch.bfloat16] * 3
    assert len({copy.grad_fn for copy in copies}) == num_functions
    torch.autograd.backward([copy.float().sum() for copy in copies])
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.ones_like(parameter))


class PooledByALayer(Trunk):
    num_channels = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 3)
        self.last = nn.Linear(2, 2)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        map_BCHW: Tensor = self.layer(x_BCHW)
        return map_BCHW

    def pool(self, map_BCHW: Tensor) -> Tensor:
        pooled_BC: Tensor = self.last(map_BCHW.mean((2, 3)))
        return pooled_BC


def test_a_layer_that_pools_stays_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Encoder(PooledByALayer(), nn.Linear(2, 2), in_channels=3, normalization=CIFAR10)
    views_BCHW = torch.rand(4, 3, 8, 8)
    assert_equal_to_autocast(monkeypatch, encoder, module, lambda: module(views_BCHW, 2))


def test_parameters_are_in_place_again_after_the_block() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = list(module.parameters())

    def fail() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16), cast_together(weights_of(module), device=CPU):
            assert [parameter.dtype for parameter in module.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
            raise RuntimeError("a layer failed")

    with pytest.raises(RuntimeError, match="a layer failed"):
        fail()
    assert all(one is other for one, other in zip(module.parameters(), before, strict=True))


class Halved(nn.Linear):
    """A layer that computes its weight, so that a cast before that would round twice."""


class Managed(dict[str, Any]):
    """The parameters of a layer as ZeRO 3 keeps them."""


def test_other_layers_and_parameters_are_left_to_autocast() -> None:
    layers = [Halved(2, 2), nn.BatchNorm2d(2), nn.Linear(2, 2).double(), nn.Linear(2, 2)]
    layers[-1]._parameters = Managed(layers[-1]._parameters)
    with torch.autocast("cpu", dtype=torch.bfloat16), cast_together(weights_of(nn.Sequential(*layers)), device=CPU):
        assert {layer.weight.dtype for layer in layers} == {torch.float32, torch.float64}
