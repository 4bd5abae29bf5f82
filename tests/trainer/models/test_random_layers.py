from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.models import TimmConfig
from trainer.models.momentum import MomentumCopy
from trainer.models.random_layers import has_random_layers, seeded, switch_off_random_layers
from trainer.models.trunk import ConvolutionalTrunk


class DropHalf(nn.Module):
    """A layer of one's own that drops rows."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.rand(len(x), *[1] * (x.dim() - 1)) >= self.drop_prob
        return x * rows if self.training and self.drop_prob > 0 else x


def vit(**options: Any) -> nn.Module:
    return TimmConfig(name="test_vit", options={"img_size": 32, "patch_size": 8, **options}).build_trunk()


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout2d(0.1)), True),
        (nn.Dropout(0.0), False),
        (DropHalf(0.5), True),
        (DropHalf(0.0), False),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.MultiheadAttention(4, 2), False),
        (nn.LPPool2d(2, 2), False),  # whose power is called p in some libraries
    ],
)
def test_random_layers_are_found(module: nn.Module, expected: bool) -> None:
    assert has_random_layers(module) == expected
    switch_off_random_layers(module)
    assert not has_random_layers(module)


@pytest.mark.parametrize(
    "options",
    [
        {"drop_path_rate": 0.5},
        {"attn_drop_rate": 0.5},
        {"patch_drop_rate": 0.5},
    ],
)
def test_random_layers_of_timm_are_found_and_a_momentum_copy_draws_nothing(options: dict[str, float]) -> None:
    pytest.importorskip("timm")
    assert not has_random_layers(vit())
    online = vit(**options)
    assert has_random_layers(online)
    follower = MomentumCopy(online, momentum=0.9)
    pictures = torch.rand(4, 3, 32, 32)
    assert torch.equal(follower(pictures), follower(pictures))
    assert all(module.training for module in follower.modules())
    assert has_random_layers(online)


def test_inside_the_block_draws_are_a_function_of_the_seed_and_after_it_they_go_on() -> None:
    def drawn(seed: int) -> Tensor:
        with seeded(seed, torch.device("cpu")):
            return torch.rand(3)

    before = torch.get_rng_state()
    assert torch.equal(drawn(2**64 - 1), drawn(2**64 - 1))
    assert not torch.equal(drawn(1), drawn(2))
    assert torch.equal(torch.get_rng_state(), before)


def test_recomputed_blocks_of_a_convolutional_trunk_draw_the_same() -> None:
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(0.5)), DropHalf(0.5))
    trunk = ConvolutionalTrunk(OrderedDict(stem=nn.Conv2d(3, 3, 1), stage=stage), num_channels=3).double()
    pictures = torch.rand(8, 3, 4, 4, dtype=torch.float64)

    def gradients() -> list[Tensor]:
        with seeded(5, torch.device("cpu")):
            loss = trunk(pictures).square().sum()
        return list(torch.autograd.grad(loss, list(trunk.parameters())))

    expected = gradients()
    trunk.checkpointing = 1
    for found, gradient in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)
