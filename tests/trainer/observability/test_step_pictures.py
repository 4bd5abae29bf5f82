"""Pictures of views while the policy is trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from configs import resolve_recipe
from data_pipeline.building.build import build_dataset
from trainer.modules import build_modules
from trainer.observability.step_pictures import NUM_MEASURED, step_pictures

CPU = torch.device("cpu")


def test_pictures_come_when_due_and_leave_training_as_it_was(tmp_path: Path) -> None:
    build_dataset("procedural_digits", tmp_path / "test", split="test", limit=80)
    settings = [f"data.test_dir={tmp_path / 'test'}", "tracking.pictures_every_steps=3"]
    config = resolve_recipe("debug:viewmaker", settings)
    policy = build_modules(config).view_policy
    policy.train()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    state = torch.get_rng_state()
    make = step_pictures(config.tracking, policy, data=config.data, seed=config.seed, device=CPU)
    assert make(2) is None
    made, again = make(3), make(6)
    assert made is not None
    assert again is not None
    assert policy.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in policy.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    grid_HWC, change_N = made.images["views/grid"], made.histograms["views/change"]
    assert grid_HWC.dtype == np.uint8
    assert grid_HWC.shape[2] == 3
    assert change_N.shape == (NUM_MEASURED,)
    assert 0 < change_N.max() <= 0.05 + 1e-6  # the budget, less what the clamp takes
    np.testing.assert_array_equal(grid_HWC, again.images["views/grid"])  # the same samples and draws
