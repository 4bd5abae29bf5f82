"""The first step refuses a wrong result of the user's own code, in one sentence that names the class."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from configs import resolve_recipe
from data_pipeline.core.counter_rng import DrawKeys, uniform
from data_pipeline.core.errors import UserError
from tests.tiny_data import on_data, write_tiny_pair
from tests.trainer.test_recorded_step import CPU, batch_of
from trainer.build import build_training
from trainer.first_step import check_first_step
from trainer.models.encoder import BaseEncoderConfig
from trainer.models.trunk import Trunk
from trainer.objectives import BaseObjectiveConfig, Objective, ObjectiveInputs, ObjectiveOutput, ViewPair
from trainer.run_dir import RunDir
from trainer.train import train
from trainer.views import BaseViewsConfig, ViewsInputs

SAID = "draws from a global random generator"


class OwnViewsConfig(BaseViewsConfig):
    """The config of views that `change` makes of the pictures."""

    kind: Literal["own_views"] = "own_views"
    change: ClassVar[Callable[[Tensor, DrawKeys], Any]]

    def build(self, given: ViewsInputs) -> nn.Module:
        return OwnViews()


class OwnViews(nn.Module):
    def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Any:
        return OwnViewsConfig.change(images_BCHW, keys)


class OwnEncoderConfig(BaseEncoderConfig):
    """The config of a trunk whose map `change` changes."""

    kind: Literal["own_encoder"] = "own_encoder"
    change: ClassVar[Callable[[Tensor], Any]]

    def build_trunk(self) -> Trunk:
        return OwnTrunk()


class OwnTrunk(Trunk):
    num_channels = 8

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, stride=8)
        self.last = nn.Conv2d(8, 8, 1)

    def forward(self, images_BCHW: Tensor) -> Any:
        return OwnEncoderConfig.change(self.last(self.patches(images_BCHW)))


class OwnObjectiveConfig(BaseObjectiveConfig):
    """The config of an objective that returns the result of `change` for its loss."""

    kind: Literal["own_objective"] = "own_objective"
    change: ClassVar[Callable[[Tensor], Any]]

    def build(self, given: ObjectiveInputs) -> Objective:
        return OwnObjective()


class OwnObjective(Objective):
    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair) -> Any:
        return OwnObjectiveConfig.change((z_a_BD - z_b_BD).square().mean())


CONFIGS: dict[str, Any] = {"views": OwnViewsConfig, "encoder": OwnEncoderConfig, "objective": OwnObjectiveConfig}


def take_two_steps(section: str, change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
    monkeypatch.setattr(CONFIGS[section], "change", staticmethod(change), raising=False)
    words = [f"{section}.kind=own_{section}", "encoder.mean=[0, 0, 0]", "encoder.std=[1, 1, 1]", *overrides]
    training = build_training(resolve_recipe("debug:image", words), num_samples=64, device=CPU)
    check_first_step(training.modules, training.objective, device=CPU)
    for step in range(2):
        training.step(batch_of(step), learning_rates=dict.fromkeys(training.engines, 0.0))


def alone(loss: Tensor) -> ObjectiveOutput:
    return ObjectiveOutput(loss, {})


@pytest.mark.parametrize(
    ("section", "change", "said"),
    [
        ("views", lambda images, _: 50 * images, "values from 0 to"),
        ("views", lambda images, _: images - images.mean(), "values from -"),
        ("views", lambda images, _: images[:3], "one view for each input"),
        ("views", lambda images, _: images.byte(), "uint8 of shape"),
        ("views", lambda images, _: images.log(), "inf or nan"),
        ("views", lambda images, _: (images, images), "returned tuple"),
        ("encoder", lambda maps: maps[:3], r"float32 of shape \(3, 8, 2, 2\)"),
        ("encoder", lambda maps: maps[:, :4], "num_channels"),
        ("encoder", lambda maps: maps.detach(), "4 of 6 parameters"),
    ],
)
def test_a_wrong_result_is_one_sentence(
    section: str, change: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=said) as raised:
        take_two_steps(section, change, monkeypatch, "memory.micro_batches=2")
    assert f"{__name__}:Own" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_layer_that_gets_no_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnTrunk, "forward", lambda self, images_BCHW: self.last(self.patches(images_BCHW).detach()))
    with pytest.raises(UserError, match=r"2 of 6 parameters of .*OwnTrunk.*patches.weight"):
        take_two_steps("encoder", lambda maps: maps, monkeypatch)


def test_a_training_checks_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=16, num_test=8)
    monkeypatch.setattr(OwnViewsConfig, "change", staticmethod(lambda images, _: 2 * images), raising=False)
    config = resolve_recipe("debug:image", on_data(data, "views.kind=own_views", "global_batch_size=8"))
    with pytest.raises(UserError, match=r"OwnViews.* returned values"):
        train(config, RunDir(tmp_path / "run"), device=CPU, command="test")


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("views", lambda images, keys: (uniform(keys, 1, purpose=0), images * (1 + 1e-6))[1]),
        ("encoder", lambda maps: maps),
        ("encoder", lambda maps: maps.mean((2, 3))),  # a trunk may return rows in place of a map
        ("objective", alone),
    ],
)
def test_right_code_trains_and_is_not_named(
    section: str, change: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_two_steps(section, change, monkeypatch)
    assert SAID not in caplog.text


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(1), lambda: np.random.rand(), lambda: random.random()],  # noqa: NPY002
    ids=["torch", "numpy", "python"],
)
def test_own_views_that_draw_from_a_global_generator_are_named_once(
    draw: Callable[[], object], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_two_steps("views", lambda images, _: (draw(), images)[1], monkeypatch)
    (said,) = [record.getMessage() for record in caplog.records if SAID in record.getMessage()]
    assert "OwnViews (views.kind=own_views)" in said
