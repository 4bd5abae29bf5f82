"""Views and objectives of the user's own that draw from a global random generator are named in the log."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from configs import resolve_recipe
from data_pipeline.core.counter_rng import DrawKeys, uniform
from tests.trainer.test_recorded_step import CPU, batch_of
from trainer.build import build_training
from trainer.views import BaseViewsConfig, ViewsInputs

SAID = "draws from a global random generator"


class OwnViewsConfig(BaseViewsConfig):
    """The config of views that are lightened by a number, which `draw` returns."""

    kind: Literal["draws_views"] = "draws_views"
    draw: ClassVar[Callable[[DrawKeys], object]]

    def build(self, given: ViewsInputs) -> nn.Module:
        return OwnViews()


class OwnViews(nn.Module):
    def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        OwnViewsConfig.draw(keys)
        return images_BCHW


def said_in_two_steps(caplog: pytest.LogCaptureFixture, *overrides: str) -> list[str]:
    training = build_training(resolve_recipe("debug:image", list(overrides)), num_samples=64, device=CPU)
    for step in range(2):
        training.step(batch_of(step), learning_rates=dict.fromkeys(training.engines, 0.0))
    return [record.getMessage() for record in caplog.records if SAID in record.getMessage()]


@pytest.mark.parametrize(
    "draw",
    [lambda _: torch.rand(1), lambda _: np.random.rand(), lambda _: random.random()],  # noqa: NPY002
    ids=["torch", "numpy", "python"],
)
def test_own_views_that_draw_from_a_global_generator_are_named_once(
    draw: Callable[[DrawKeys], object], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnViewsConfig, "draw", draw, raising=False)
    (said,) = said_in_two_steps(caplog, "views.kind=draws_views")
    assert said.startswith(f"the code of views.kind=draws_views {SAID}")
    assert said.endswith("draw from the keys that the policy gets, by the functions of data_pipeline.core.counter_rng")


def test_own_views_that_draw_from_keys_are_not_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnViewsConfig, "draw", lambda keys: uniform(keys, 1, purpose=0), raising=False)
    assert said_in_two_steps(caplog, "views.kind=draws_views") == []
