from __future__ import annotations

import copy

import pytest
import torch
from lightly.models.utils import update_momentum
from torch import Tensor, nn

from configs import resolve_recipe
from data_pipeline.core.batch import Batch
from trainer.build import build_training
from trainer.models.momentum import MomentumCopy


def toy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).double()


def pictures() -> Tensor:
    return torch.rand(6, 3, 8, 8, dtype=torch.float64)


def change(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_parameters_follow_and_stay_frozen() -> None:
    online = toy()
    follower = MomentumCopy(online, momentum=0.9)
    theirs = copy.deepcopy(online)
    for _ in range(3):
        change(online)
        follower.follow()
        update_momentum(online, theirs, m=0.9)
        for ours, expected in zip(follower.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    assert not any(parameter.requires_grad for parameter in follower.parameters())
    assert all(parameter.requires_grad for parameter in online.parameters())
    assert not follower(pictures()).requires_grad


def test_the_online_module_is_no_part_of_it() -> None:
    online = toy()
    follower = MomentumCopy(online, momentum=0.9)
    assert online not in list(follower.modules())
    assert follower.state_dict().keys() == {f"module.{name}" for name in online.state_dict()}
    before = copy.deepcopy(online.state_dict())
    follower.follow()
    follower(pictures())
    assert all(torch.equal(value, before[name]) for name, value in online.state_dict().items())


def test_buffers_are_those_of_its_own_forwards() -> None:
    online = toy()
    follower = MomentumCopy(online, momentum=0.5)
    reference = copy.deepcopy(online)
    views, others = pictures(), pictures()
    online(others)
    follower.follow()
    follower(views)
    reference(views)
    for (name, ours), expected in zip(follower.module.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, msg=name)


def test_a_forward_that_updates_no_buffers_gives_the_same() -> None:
    follower = MomentumCopy(toy(), momentum=0.9)
    views = pictures()
    before = copy.deepcopy(follower.state_dict())
    without = follower(views, updates_buffers=False)
    assert all(torch.equal(value, before[name]) for name, value in follower.state_dict().items())
    assert torch.equal(follower(views), without)
    assert not all(torch.equal(value, before[name]) for name, value in follower.state_dict().items())


@pytest.mark.parametrize("objective", [["objective.kind=byol"], ["objective.kind=dino", "objective.num_prototypes=12"]])
def test_batch_norm_of_a_teacher_sees_the_views_as_that_of_the_encoder(objective: list[str]) -> None:
    config = resolve_recipe("debug:image", [*objective, "precision=float64"])
    training = build_training(config, num_samples=6, device=torch.device("cpu"))
    seen: dict[str, list[Tensor]] = {"encoder": [], "teacher": []}
    teacher = training.objective.teacher
    assert isinstance(teacher, MomentumCopy)
    for name, encoder in (("encoder", training.modules.encoder), ("teacher", teacher.module)):
        first = next(layer for layer in encoder.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm))
        first.register_forward_pre_hook(lambda _, inputs, name=name: seen[name].append(inputs[0].detach()))
    pictures = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    batch = Batch(0, 0, torch.arange(6), pictures, pictures, None, None, {})
    training.step(batch, learning_rates=dict.fromkeys(training.engines, 0.0))
    assert [len(rows) for rows in seen["teacher"]] == [6, 6]
    # Teacher and encoder have the same weights in the first step, and so the same activations.
    assert all(torch.equal(found, expected) for found, expected in zip(seen["teacher"], seen["encoder"], strict=True))
