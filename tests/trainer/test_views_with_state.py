"""Learned views with buffers, such as batch norm: a skipped step undoes them, and each view changes them once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import trainer.build
import trainer.step
from tests.trainer.test_recorded_step import CPU, batch_of, configure, rates_of
from trainer.build import Training, assemble
from trainer.modules import build_modules, build_run_objective
from trainer.recorded_step import RecordedStep


class ViewsWithState(nn.Module):
    """Views by a convolution and batch norm, with a count of the forward passes, which each of them replaces."""

    num_passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))
        self.register_buffer("num_passes", torch.zeros((), dtype=torch.int64))

    def forward(self, images_BCHW: Tensor, keys: object, masks_BHW: Tensor | None = None) -> Tensor:
        self.num_passes = self.num_passes + 1
        views_BCHW: Tensor = images_BCHW + 0.1 * self.layers(images_BCHW)
        return views_BCHW


def build(*overrides: str) -> tuple[Training, ViewsWithState]:
    config = configure("debug:viewmaker", list(overrides))
    torch.manual_seed(0)
    policy = ViewsWithState()
    modules = dataclasses.replace(build_modules(config), view_policy=policy).to(CPU, config.parameter_dtype)
    objective = build_run_objective(config, modules.encoder, num_samples=64, device=CPU)
    return assemble(config, modules, objective), policy


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("update", ["simultaneous", "alternating"])
def test_a_skipped_step_changes_no_buffer_of_the_views(
    update: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def any_not_finite(norms: Iterable[Tensor]) -> Tensor:
        return torch.tensor(True)

    monkeypatch.setattr(trainer.step, "any_not_finite", any_not_finite)
    training, policy = build(f"adversary.update={update}", f"memory.micro_batches={micro_batches}")
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    training.step(batch_of(0), learning_rates=rates_of(training, 0))
    for name, value in policy.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("overrides", "num_passes"),
    [
        (["adversary.update=simultaneous"], 1),
        (["adversary.update=simultaneous", "memory.micro_batches=2"], 2),
        (["adversary.update=simultaneous", "memory.micro_batches=2", "adversary.freeze_step=3"], 2),
        (["adversary.update=alternating"], 2),
        (["adversary.update=alternating", "memory.micro_batches=2"], 4),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else "",
)
def test_each_view_changes_the_buffers_once(overrides: list[str], num_passes: int) -> None:
    training, policy = build(*overrides)
    training.step(batch_of(3), learning_rates=rates_of(training, 3))
    assert int(policy.num_passes) == num_passes
    assert int(policy.state_dict()["layers.1.num_batches_tracked"]) == num_passes


def test_a_recorded_step_writes_the_buffers_of_the_views_to_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorder:
        def warm_up(self, run: object) -> object:
            assert callable(run)
            return run()

    monkeypatch.setattr(trainer.build, "why_not_recorded", lambda *_, **__: None)
    monkeypatch.setattr(trainer.build, "CudaGraphs", Recorder)
    training, policy = build("compile=step")
    assert isinstance(training.step, RecordedStep)
    place = policy.num_passes
    training.step(batch_of(0), learning_rates=rates_of(training, 0))
    assert policy.num_passes is place
    assert int(place) == 1
