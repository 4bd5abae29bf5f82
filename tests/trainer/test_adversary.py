"""Compare gradient reversal with two explicit backward passes, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from tests.gloo import run_ranks
from tests.tiny_data import on_data, write_tiny_pair
from trainer.adversary import AdversaryConfig, reverse_gradient
from trainer.optim.optimizers import (
    AdamConfig,
    SGDConfig,
)
from trainer.run_dir import RunDir
from trainer.train import train


def players() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    viewmaker = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)).double()
    encoder = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return viewmaker, encoder, torch.randn(4, 6, dtype=torch.float64)


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_one_backward_equals_two(weight: float) -> None:
    viewmaker, encoder, x = players()
    encoder(reverse_gradient(viewmaker(x), weight)).logsumexp(dim=1).sum().backward()

    loss = encoder(viewmaker(x)).logsumexp(dim=1).sum()
    expected_encoder = torch.autograd.grad(loss, list(encoder.parameters()), retain_graph=True)
    expected_viewmaker = torch.autograd.grad(-weight * loss, list(viewmaker.parameters()))
    for player, expected in ((encoder, expected_encoder), (viewmaker, expected_viewmaker)):
        for parameter, gradient in zip(player.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-14, rtol=1e-14)


def test_going_forward_it_is_the_identity() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = reverse_gradient(x, 2.0)
    assert torch.equal(x, y)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.full((3, 4), -2.0))


def test_by_default_both_players_share_a_pass_with_the_published_weight_and_optimizer() -> None:
    """The published code takes turns (`alternating`): a pass for the encoder, then one for the viewmaker."""
    config = AdversaryConfig()
    assert config.update == "simultaneous"
    assert (config.weight, config.freeze_step, config.viewmaker_steps) == (1.0, None, 1)
    assert config.optimizer == AdamConfig(learning_rate=1e-3, betas=(0.9, 0.999), weight_decay=0.0)


def test_config_survives_json_and_refuses_a_negative_weight() -> None:
    config = AdversaryConfig(update="alternating", optimizer=SGDConfig(learning_rate=0.1))
    assert AdversaryConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValidationError):
        AdversaryConfig(weight=-1.0)


@pytest.mark.process
@pytest.mark.parametrize(
    ("more", "learns"),
    [
        ("adversary.freeze_step=2", [True, True, False, False]),
        ("views={kind: by_epoch, policies: [{kind: expert_image}, {kind: viewmaker, base_width: 4}]}", [0, 0, 1, 1]),
    ],
)
def test_the_logged_learning_rate_of_a_viewmaker_that_does_not_learn_is_0(
    more: str, learns: list[bool], tmp_path: Path
) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=32, num_test=16)
    given = on_data(data, "num_epochs=2", "global_batch_size=16", "log_every_steps=1", "adversary.optimizer.kind=sgd")
    run_dir = RunDir(tmp_path / "run")
    train(resolve_recipe("debug:viewmaker", [*given, more]), run_dir, device=torch.device("cpu"), command="test")
    metrics = run_dir.read_metrics()
    assert [line["optim/viewmaker_learning_rate"] > 0 for line in metrics] == learns
    assert ["train/viewmaker_loss" in line for line in metrics] == learns
    assert all(line["optim/encoder_learning_rate"] > 0 for line in metrics)


def train_with_a_viewmaker_that_diverges(data: Path, directory: Path, update: str) -> str:
    """Train, and return the error message."""
    settings = {
        "data.train_dir": data / "train",
        "data.test_dir": data / "test",
        "global_batch_size": 16,
        "max_skipped_in_a_row": 2,
        "tracking.wandb": "disabled",
        "adversary.update": update,
        "adversary.optimizer.learning_rate": "1e30",
    }
    config = resolve_recipe("debug:viewmaker", [f"{name}={value}" for name, value in settings.items()])
    with pytest.raises(UserError) as told:
        train(config, RunDir(directory), device=torch.device("cpu"), command="test")
    return str(told.value)


@pytest.mark.ranks
@pytest.mark.parametrize("update", ["simultaneous", "alternating"])
def test_a_viewmaker_that_diverges_ends_training_in_a_sentence(update: str, tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=160, num_test=20)
    (told,) = run_ranks(train_with_a_viewmaker_that_diverges, 1, data, tmp_path / "run", update)
    assert "not finite in 2 steps in a row" in told
    assert "lower the learning rate" in told
