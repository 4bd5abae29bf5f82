"""An encoder with dropped paths and dropout: a step is a function of the config, the step, its rank and its parts."""

from __future__ import annotations

import functools
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs import resolve_recipe
from tests.trainer.test_recorded_step import CPU, batch_of
from trainer.build import Training, build_training
from trainer.config import RunConfig
from trainer.models.encoder import BaseEncoderConfig
from trainer.models.trunk import Trunk

pytest.importorskip("timm")

ENCODER = (
    "encoder={kind: timm, name: vit_tiny_patch16_224, embedding_size: 16, "
    "mean: [0.5, 0.5, 0.5], std: [0.25, 0.25, 0.25], options: {img_size: 16, patch_size: 8, depth: 2, embed_dim: 16, "
    "num_heads: 2, drop_path_rate: 0.5, attn_drop_rate: 0.2, proj_drop_rate: 0.2}}"
)


def configure(*overrides: str, recipe: str = "debug:image") -> RunConfig:
    every = ["precision=float64", "global_batch_size=8", "tracking.wandb=disabled", "watchdog.enabled=false"]
    return resolve_recipe(recipe, [ENCODER, *every, *overrides])


def build(config: RunConfig) -> Training:
    return build_training(config, num_samples=64, device=CPU)


def embeddings_of(config: RunConfig, *, step: int = 3, state: int = 0) -> list[Tensor]:
    """Return what each pass of the encoder returns in a step, with torch's generator in some state."""
    training, found = build(config), []

    def note(_: nn.Module, __: object, z_BD: Tensor) -> None:
        found.append(z_BD.detach())

    training.modules.encoder.register_forward_hook(note)
    torch.manual_seed(state)
    training.step(batch_of(step), learning_rates=dict.fromkeys(training.engines, 0.0))
    return found


def loss_and_gradients(training: Training) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a step that changes nothing, and the gradient of each parameter of the encoder."""
    found: dict[str, Tensor] = {}
    encoder = training.modules.encoder

    def note_gradients(**_: object) -> None:
        found.update({name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None})
        encoder.zero_grad()

    training.engines["encoder"].step = functools.partial(note_gradients)  # type: ignore[method-assign]
    output = training.step(batch_of(3), learning_rates=dict.fromkeys(training.engines, 0.0))
    return output.metrics["train/loss"], found


@pytest.mark.parametrize(
    "overrides",
    [
        ["memory.micro_batches=1"],
        ["memory.micro_batches=2"],
        ["memory.micro_batches=2", "memory.encoder_checkpointing=whole"],
    ],
    ids=",".join,
)
def test_the_gradient_is_that_of_the_loss(overrides: list[str]) -> None:
    """The change of the loss along the gradient, as a central difference in float64."""
    training = build(configure(*overrides))
    _, gradients = loss_and_gradients(training)
    parameters = dict(training.modules.encoder.named_parameters())
    expected = sum(gradient.square().sum() for gradient in gradients.values())
    length = 1e-5 / torch.as_tensor(expected).sqrt()
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, gradient in gradients.items():
                parameters[name].add_(sign * length * gradient)
        losses.append(loss_and_gradients(training)[0])
        with torch.no_grad():
            for name, gradient in gradients.items():
                parameters[name].sub_(sign * length * gradient)
    torch.testing.assert_close((losses[0] - losses[1]) / (2 * length), expected, rtol=1e-5, atol=0)


class WithFunctionConfig(BaseEncoderConfig):
    """The config of an encoder of another package, which drops values without a layer for it."""

    kind: Literal["with_function"] = "with_function"

    def build_trunk(self) -> WithFunction:
        return WithFunction()


class WithFunction(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.num_channels = 4
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        map_BCHW: Tensor = F.dropout(self.layer(x_BCHW), 0.5, self.training)
        return map_BCHW


OWN = "encoder={kind: with_function, embedding_size: 16, mean: [0.5, 0.5, 0.5], std: [1, 1, 1]}"


@pytest.mark.parametrize("encoder", [ENCODER, OWN])
def test_both_passes_of_a_part_draw_the_same(encoder: str) -> None:
    first, second, first_again, second_again = embeddings_of(configure("memory.micro_batches=2", encoder))
    assert torch.equal(first, first_again)
    assert torch.equal(second, second_again)


@pytest.mark.parametrize(("recipe", "encoder"), [("debug:image", OWN), ("debug:viewmaker", ENCODER)])
def test_a_step_does_not_read_the_state_of_torchs_generator_nor_change_it(recipe: str, encoder: str) -> None:
    alternating = ["adversary.update=alternating"] if recipe == "debug:viewmaker" else []
    config = configure(*alternating, encoder, recipe=recipe)
    found = embeddings_of(config, state=1)
    expected_state = torch.Generator().manual_seed(1).get_state()
    assert torch.equal(torch.get_rng_state(), expected_state)
    assert all(torch.equal(*pair) for pair in zip(found, embeddings_of(config, state=2), strict=True))


def test_each_step_update_part_and_seed_draws_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds of the generator, which are equal in both passes of a part only."""
    seeds: list[int] = []
    manual_seed = torch.manual_seed

    def note(seed: int) -> Any:
        seeds.append(seed)
        return manual_seed(seed)

    seeds_of = {}
    for name, overrides, step in [
        ("step 3", ["memory.micro_batches=2"], 3),
        ("step 4", ["memory.micro_batches=2"], 4),
        ("seed 1", ["memory.micro_batches=2", "seed=1"], 3),
    ]:
        training = build(configure("adversary.update=alternating", *overrides, recipe="debug:viewmaker"))
        seeds.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "manual_seed", note)
            training.step(batch_of(step), learning_rates=dict.fromkeys(training.engines, 0.0))
        seeds_of[name] = list(seeds)
        assert len(seeds) == 8  # two updates of two parts, each of which is encoded twice
        assert all(seeds.count(seed) == 2 for seed in seeds)
    assert len({seed for found in seeds_of.values() for seed in found}) == 3 * 4
