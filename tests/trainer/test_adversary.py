"""Compare gradient reversal with two explicit backward passes, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from configs import resolve_recipe
from tests.tiny_data import on_data, write_tiny_pair
from trainer.adversary import reverse_gradient
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
