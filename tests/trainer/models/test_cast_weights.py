"""Weights that are cast at once, against those that autocast casts one after the other."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.models import trunk
from trainer.models.activation_checkpointing import Checkpointing
from trainer.models.resnet import BasicBlock, resnet_trunk


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def passed(checkpointing: Checkpointing, num_frozen: int, dtype: torch.dtype) -> tuple[list[Tensor], Counter[str]]:
    """Return the map and all gradients of a ResNet under autocast, and how often each operation ran."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = resnet_trunk(BasicBlock, (1, 1), form="small", width=8)
        views_BCHW = torch.rand(4, 3, 8, 8)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    network.checkpointing = checkpointing
    if num_frozen:
        network.freeze(num_frozen)
    with Operations() as operations:
        with torch.autocast("cpu", dtype=dtype):
            map_BCHW = network(views_BCHW)
        torch.autograd.backward(map_BCHW.float().square().sum())
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    return [map_BCHW.detach(), *gradients], operations.counts


@pytest.mark.parametrize(("checkpointing", "num_frozen"), [("none", 0), (1, 0), ("none", 1)])
def test_numbers_are_those_of_autocast_with_one_cast_each_way(checkpointing: Checkpointing, num_frozen: int) -> None:
    found, counts = passed(checkpointing, num_frozen, torch.bfloat16)
    with mock.patch.object(trunk, "cast_weights", return_value=contextlib.nullcontext()):
        expected, one_by_one = passed(checkpointing, num_frozen, torch.bfloat16)
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)
    assert counts["_foreach_copy_"] == 2
    if checkpointing == "none":  # a recomputation casts one by one
        assert one_by_one["_to_copy"] - counts["_to_copy"] == (12 if num_frozen == 0 else 6)


def test_the_network_has_its_own_weights_behind_a_pass_that_fails() -> None:
    network = resnet_trunk(BasicBlock, (1, 1), form="small", width=8)
    weight = network.get_submodule("conv1").weight
    with pytest.raises(RuntimeError), torch.autocast("cpu", dtype=torch.bfloat16):
        network(torch.rand(4, 5, 8, 8))
    assert network.get_submodule("conv1").weight is weight
