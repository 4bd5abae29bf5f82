"""Signs of life: a block gives them forward and backward, and changes no number by it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from configs import resolve_recipe
from data_pipeline.core.counter_rng import DrawKeys
from trainer import liveness
from trainer.liveness import stage
from trainer.modules import build_modules
from trainer.views.viewmaker import Viewmaker


class Heard(liveness.Listener):
    """A listener that keeps what it hears: the stages at each sign."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.signs: list[str] = []

    def sign(self) -> None:
        self.signs.append("/".join(self.stages))

    def enter(self, stage: str) -> None:
        self.stages.append(stage)
        self.sign()

    def leave(self) -> None:
        self.stages.pop()
        self.sign()


@contextmanager
def listening() -> Iterator[Heard]:
    heard = Heard()
    liveness.listeners.append(heard)
    try:
        yield heard
    finally:
        liveness.listeners.remove(heard)


def gradients(network: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
    network.zero_grad()
    torch.autograd.backward(forward().square().sum())
    return [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]


def signs_of(network: nn.Module, forward: Callable[[], Tensor]) -> tuple[int, int]:
    """Return how many signs `network` gives forward and backward; fail if following it changes a gradient by a bit."""
    state = copy.deepcopy(network.state_dict())
    expected = gradients(network, forward)
    network.load_state_dict(state)
    liveness.follow(network)
    with listening() as heard:
        found = gradients(network, forward)
        in_all = len(heard.signs)
        network.load_state_dict(state)
        with torch.no_grad():
            forward()
    assert len(expected) == len(found) > 0
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    num_forward = len(heard.signs) - in_all
    return num_forward, in_all - num_forward


@pytest.mark.parametrize("checkpointing", ["none", "whole", 1])
def test_every_block_of_an_encoder_gives_a_sign_forward_and_backward(checkpointing: str | int) -> None:
    """A stem, four blocks and the head, for each of two views. A block that is computed again gives one more."""
    config = resolve_recipe("debug:image", [f"memory.encoder_checkpointing={checkpointing}"])
    encoder = build_modules(config).encoder
    views_BCHW = torch.rand(4, 3, 32, 32)
    num_forward, num_backward = signs_of(encoder, lambda: encoder(views_BCHW, 2))
    assert num_forward >= 2 * 6
    assert num_backward >= num_forward + (2 * 4 if checkpointing == "whole" else 0)


def test_every_block_of_a_viewmaker_gives_a_sign_forward_and_backward() -> None:
    config = resolve_recipe("debug:viewmaker", [])
    viewmaker = build_modules(config).viewmaker
    assert isinstance(viewmaker, Viewmaker)
    images_BCHW = torch.rand(2, 3, 32, 32)
    keys = DrawKeys(seed=0, epoch=0, index_B=torch.arange(2), view=0)
    num_blocks = 3 + 2 * len(viewmaker.blocks) + 2
    num_forward, num_backward = signs_of(viewmaker, lambda: viewmaker(images_BCHW, keys))
    assert (num_forward, num_backward) == (num_blocks, num_blocks)


def test_a_stage_gives_a_sign_when_it_begins_and_when_it_ends() -> None:
    with listening() as heard, stage("forward"), stage("communication"):
        pass
    assert heard.signs == ["forward", "forward/communication", "forward", ""]
