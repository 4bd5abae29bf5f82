"""The feature sieve: its loss against a loop, the weights that each part trains, and what an early head leaves alone.

That ranks, chunks, micro batches, recomputed activations and pieces of an encoder change nothing is in test_exactness.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from tests.trainer.objectives import loops
from tests.trainer.objectives.pair_losses import assert_near, loss_and_gradient, related_views
from trainer.models import build_encoder
from trainer.models.encoder import Encoder, ResNetConfig
from trainer.objectives import nt_xent_loss, sieve_loss
from trainer.objectives.sieve import distance_from_uniform

D = 16
BLOCKS = ("trunk.conv1", "trunk.bn1", "trunk.layer1", "trunk.layer2")  # up to the block of the early head


def encoder_of(**settings: Any) -> Encoder:
    torch.manual_seed(0)
    normalised = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    config = {"kind": "resnet10", "width": 4, "embedding_size": D, **normalised, **settings}
    return build_encoder(ResNetConfig.model_validate(config))


def views() -> Tensor:
    return torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def sieve_in_a_loop(z_a_BX: Tensor, z_b_BX: Tensor) -> Tensor:
    (a, early_a, forget_a), (b, early_b, forget_b) = (z_BX.chunk(3, dim=1) for z_BX in (z_a_BX, z_b_BX))
    rows = loops.unit_rows(torch.cat([forget_a, forget_b]))
    distances = []
    for i, anchor in enumerate(rows):
        logits = torch.stack([anchor @ other / 0.3 for j, other in enumerate(rows) if j != i])
        uniform = torch.full_like(logits, 1 / len(logits))
        distances.append((uniform * (uniform.log() - logits.log_softmax(0))).sum())
    of_views = loops.nt_xent(a, b, temperature=0.3) + loops.nt_xent(early_a, early_b, temperature=0.3)
    return of_views + 0.7 * torch.stack(distances).mean()


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_loss_and_gradient_equal_a_loop_in_float64(chunk_size: int | None) -> None:
    z_VBX = related_views(7, 15)
    loss = partial(sieve_loss, temperature=0.3, forgetting_weight=0.7, chunk_size=chunk_size)
    assert_near(loss_and_gradient(loss, z_VBX), loss_and_gradient(sieve_in_a_loop, z_VBX), rtol=1e-12)


def test_equal_similarities_are_uniform() -> None:
    z_BD = torch.eye(4)
    assert distance_from_uniform(z_BD, z_BD.flip(0) * 0 + 1, temperature=0.5).item() > 0.1
    assert distance_from_uniform(z_BD * 0 + 1, z_BD * 0 + 1, temperature=0.5).item() == pytest.approx(0, abs=1e-6)


def trained_by(part: int, loss: Callable[..., Tensor], encoder: Encoder) -> set[str]:
    """The weights with a gradient of a loss of one part of the columns: 0 the embedding, 1 learning, 2 forgetting."""
    names, parameters = zip(*encoder.named_parameters(), strict=True)
    of_part = encoder(views(), 2).chunk(3, dim=1)[part]
    gradients = torch.autograd.grad(loss(*of_part.chunk(2), temperature=0.5), parameters, allow_unused=True)
    return {name for name, grad in zip(names, gradients, strict=True) if grad is not None and grad.any()}


def contrast(*z_BD: Tensor, temperature: float) -> Tensor:
    return nt_xent_loss(*z_BD, temperature=temperature).loss


@pytest.mark.parametrize("checkpointing", ["none", "whole", 2])
def test_each_part_of_the_loss_trains_its_weights_alone(checkpointing: Any) -> None:
    encoder = encoder_of(early_head=2)
    encoder.trunk.checkpointing = checkpointing
    every = {name for name, _ in encoder.named_parameters()}
    early = {name for name in every if name.startswith("early_head.")}
    assert trained_by(0, contrast, encoder) == every - early
    assert trained_by(1, contrast, encoder) == early
    assert trained_by(2, distance_from_uniform, encoder) == {name for name in every if name.startswith(BLOCKS)}
    _, learning, forgetting = encoder(views(), 2).chunk(3, dim=1)
    assert torch.equal(learning, forgetting)


def test_the_early_head_reads_the_mean_of_its_block_and_changes_nothing_else() -> None:
    encoder, plain = encoder_of(early_head=2), encoder_of()
    plain.load_state_dict({name: value for name, value in encoder.state_dict().items() if "early" not in name})
    found, expected = encoder(views(), 2), plain(views(), 2)
    assert torch.equal(found[:, :D], expected)
    assert torch.equal(encoder.eval()(views()), plain.eval()(views()))
    assert torch.equal(encoder.features(views()), plain.features(views()))
    plain.train()
    trunk: Any = plain.trunk
    head: Any = encoder.early_head
    with torch.no_grad():
        layers = list(trunk)[:5]
        maps = [functools.reduce(lambda x, layer: layer(x), layers, plain.normalise(view)) for view in views().chunk(2)]
        pooled = [map_BCHW.mean((2, 3)) for map_BCHW in maps]
        first, _, last = head.layers
        hidden = F.relu(F.linear(torch.cat(pooled), first.weight, first.bias))
        torch.testing.assert_close(found[:, D : 2 * D], F.linear(hidden, last.weight, last.bias))


def test_what_has_no_early_head_or_no_use_for_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"early_head is block 9, but this encoder has 4 blocks"):
        encoder_of(early_head=9)
    for settings in (["objective.kind=sieve"], ["encoder.early_head=1"]):
        with pytest.raises(UserError, match="early"):
            resolve_recipe("debug:image", settings)
