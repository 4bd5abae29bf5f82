"""Every objective keeps the promises of objectives, and those that its config makes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from trainer.models import ResNetConfig, build_encoder
from trainer.models.momentum import MomentumCopy
from trainer.objectives import (
    BaseObjectiveConfig,
    Objective,
    ObjectiveConfig,
    ObjectiveInputs,
    ViewPair,
)
from trainer.objectives.objective import OBJECTIVES

BATCH_SIZE, EMBEDDING_SIZE = 8, 16
ENCODER = ResNetConfig(
    kind="resnet10", width=4, embedding_size=EMBEDDING_SIZE, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)
)
SETTINGS: dict[str, dict[str, Any]] = {
    "moco": {"queue_size": 16},
    "instance_discrimination": {"num_negatives": 5},
    "dino": {"num_prototypes": 12},
    "nt_xent_decoder": {"decoder": {"hidden_sizes": [5], "batch_norm": True}},
}
CASES = [{"kind": kind} | SETTINGS.get(kind, {}) for kind in OBJECTIVES]
CASES.append({"kind": "moco", "queue_size": 16, "direction": "one_way"})


def built(values: dict[str, Any]) -> tuple[BaseObjectiveConfig, Objective]:
    torch.manual_seed(0)
    config = TypeAdapter(ObjectiveConfig).validate_python(values)
    given = ObjectiveInputs(build_encoder(ENCODER), EMBEDDING_SIZE, 20, seed=0, num_classes={"base": 3})
    return config, config.build(given)


def pair_of(*, updates_state: bool = True) -> ViewPair:
    views_a_BCHW, views_b_BCHW = torch.rand(2, BATCH_SIZE, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    labels = {"base": torch.arange(BATCH_SIZE) % 3}
    index_B = torch.arange(BATCH_SIZE)
    return ViewPair(views_a_BCHW, views_b_BCHW, index_B, 0, updates_state, epoch=0, labels=labels)


@pytest.mark.parametrize("values", CASES, ids=str)
def test_whether_it_has_trained_layers(values: dict[str, Any]) -> None:
    config, objective = built(values)
    assert config.has_trained_layers == any(parameter.requires_grad for parameter in objective.parameters())


@pytest.mark.parametrize("values", CASES, ids=str)
def test_whether_it_trains_the_second_view(values: dict[str, Any]) -> None:
    config, objective = built(values)
    z_a_BD, z_b_BD = torch.randn(2, BATCH_SIZE, EMBEDDING_SIZE).requires_grad_().unbind()
    loss = objective(z_a_BD, z_b_BD, pair_of()).loss
    first, second = torch.autograd.grad(loss, (z_a_BD, z_b_BD), allow_unused=True, materialize_grads=True)
    assert first.any()
    assert config.trains_second_view == bool(second.any())


@pytest.mark.parametrize("values", CASES, ids=str)
def test_a_call_that_may_not_update_the_state_leaves_every_bit(values: dict[str, Any]) -> None:
    _, objective = built(values)
    for copied in [module for module in objective.modules() if isinstance(module, MomentumCopy)]:
        for parameter in copied._online[0].parameters():
            parameter.data.add_(0.1)  # something to follow
    before = copy.deepcopy(objective.saved_state())
    z_VBD = torch.randn(2, BATCH_SIZE, EMBEDDING_SIZE).requires_grad_()

    def changed() -> set[str]:
        return {name for name, value in objective.saved_state().items() if not torch.equal(value, before[name])}

    losses = [objective(*z_VBD, pair_of(updates_state=False)).loss for _ in range(2)]
    assert torch.equal(*losses)
    assert not changed()
    output = objective(*z_VBD, pair_of())
    trained = {name for name, parameter in objective.named_parameters() if parameter.requires_grad}
    assert changed() == before.keys() - trained
    output.loss.backward()  # the state that it replaced is kept for this
    assert z_VBD.grad is not None


@pytest.mark.parametrize("values", CASES, ids=str)
def test_autocast_changes_nothing_and_low_precision_is_raised(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, objective = built(values)
    forward = torch.autocast("cpu", enabled=False)(MomentumCopy.forward)  # of an encoder, which autocast may change
    monkeypatch.setattr(MomentumCopy, "forward", forward)
    z_VBD, pair = torch.randn(2, BATCH_SIZE, EMBEDDING_SIZE).bfloat16(), pair_of(updates_state=False)
    expected = objective(*z_VBD.float(), pair).loss
    assert expected.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(objective(*z_VBD.float(), pair).loss, expected)
        assert torch.equal(objective(*z_VBD, pair).loss, expected)


@pytest.mark.parametrize("kind", ["nt_xent_cycle", "dino"])
def test_an_objective_that_changes_with_the_epoch_asks_for_it(kind: str) -> None:
    _, objective = built({"kind": kind} | SETTINGS.get(kind, {}))
    before = copy.deepcopy(objective.state_dict())
    z_BD, views_BCHW = torch.randn(BATCH_SIZE, EMBEDDING_SIZE), torch.rand(BATCH_SIZE, 3, 16, 16)
    with pytest.raises(ValueError, match="changes with the epoch; give ViewPair the number of the epoch"):
        objective(z_BD, z_BD, ViewPair(views_BCHW, views_BCHW, torch.arange(BATCH_SIZE), step=5))
    assert all(torch.equal(value, before[name]) for name, value in objective.state_dict().items())


@pytest.mark.parametrize("values", CASES, ids=str)
def test_an_objective_can_be_pickled(values: dict[str, Any]) -> None:
    _, objective = built(values)
    again = pickle.loads(pickle.dumps(objective))
    assert all(torch.equal(again.state_dict()[name], value) for name, value in objective.state_dict().items())
    for copied in again.modules():
        if isinstance(copied, MomentumCopy):
            copied.follow()
