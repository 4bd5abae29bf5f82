"""Schedules as functions of the step, against torch's own scheduler."""

from __future__ import annotations

import itertools

import pytest
import torch

from trainer.optim import AdamConfig, CosineConfig, SGDConfig, build_optimizer, learning_rate_at


def test_a_constant_rate_stays() -> None:
    config = SGDConfig(learning_rate=0.03)
    assert {learning_rate_at(config, step=step, num_steps=10) for step in range(10)} == {0.03}


def test_cosine_equals_torchs() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.06)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=97)
    config = SGDConfig(learning_rate=0.06, schedule=CosineConfig())
    for step in range(97):
        assert learning_rate_at(config, step=step, num_steps=97) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        scheduler.step()


def test_warm_up_rises_to_the_rate_and_the_cosine_ends_near_zero() -> None:
    config = AdamConfig(learning_rate=1.0, schedule=CosineConfig(warmup_fraction=0.1))
    rates = [learning_rate_at(config, step=step, num_steps=100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[10] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert rates[-1] < 1e-3


def test_the_published_settings_reach_the_optimizer() -> None:
    module = torch.nn.Linear(1, 1)
    sgd = build_optimizer(SGDConfig(), module).defaults
    assert (sgd["lr"], sgd["momentum"], sgd["weight_decay"]) == (0.03, 0.9, 1e-4)
    adam = build_optimizer(AdamConfig(), module).defaults
    assert (adam["lr"], adam["betas"], adam["weight_decay"]) == (1e-3, (0.9, 0.999), 0.0)
