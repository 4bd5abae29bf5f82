"""Pictures of views while the policy is trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from configs import debug
from data_pipeline.building.build import build_dataset
from trainer.modules import build_modules
from trainer.observability.step_pictures import NUM_MEASURED, step_pictures

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pictures") / "test"
    build_dataset("procedural_digits", out, split="test", limit=80)
    return out


def test_pictures_come_when_due_and_leave_training_as_it_was(data_dir: Path) -> None:
    recipe = debug.viewmaker()
    config = recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update={"test_dir": str(data_dir)}),
            "tracking": recipe.tracking.model_copy(update={"pictures_every_steps": 3}),
        }
    )
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


@pytest.mark.parametrize(
    "tracking", [{"pictures_every_steps": None}, {"wandb": "disabled"}], ids=["none wanted", "nobody to show them to"]
)
def test_without_wish_no_sample_is_read(tracking: dict[str, object]) -> None:
    recipe = debug.viewmaker()  # whose data are not there
    config = recipe.model_copy(update={"tracking": recipe.tracking.model_copy(update=tracking)})
    pictures = step_pictures(config.tracking, torch.nn.Identity(), data=config.data, seed=0, device=CPU)
    assert pictures(500) is None
