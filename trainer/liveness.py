"""Tell listeners which stage of a training step this process is in, and that the step goes on.

Code enters a `stage` around its work. `follow` makes a network give a sign at every block, forward and backward. The
clock of `trainer.profiling` and the watchdog listen. A sign reads no tensor and never waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

# The parts of a step that are timed; see `trainer.profiling`.
Stage = Literal[
    "read",
    "decode",
    "overlay",
    "transfer",
    "views",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "replay",
    "other",
]
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Linear)


class Listener:
    """A receiver of the stages and signs of life of this process. By default it does nothing with them."""

    def sign(self) -> None:
        """Note that the step goes on."""

    def enter(self, stage: str) -> None:
        """Note that `stage` begins, which may be inside of another one."""

    def leave(self) -> None:
        """Note that the innermost stage ends."""


listeners: list[Listener] = []  # the running clock and the open watchdog, if there are any


def sign() -> None:
    """Give a sign of life. Takes about a microsecond."""
    for listener in listeners:
        listener.sign()


@contextmanager
def stage(name: Stage | Literal["waiting for GPU", "checkpoint"]) -> Iterator[None]:
    """Tell all listeners that the code inside is the stage `name`."""
    told = tuple(listeners)
    for listener in told:
        listener.enter(name)
    try:
        yield
    finally:
        for listener in told:
            listener.leave()


def follow(network: nn.Module) -> None:
    """Let every block of `network` give a sign of life when it has run forward, and when its gradient arrives.

    A block is a module that directly contains convolutions or linear layers; such a layer outside a block is a block
    too. Changes no result. Do not call it for a network that torch.compile compiles, because its graphs would break at
    every block.
    """
    for module in network.children():
        holds_layers = any(isinstance(child, _LAYERS) for child in module.children())
        if isinstance(module, _LAYERS) or (holds_layers and not isinstance(module, nn.Sequential)):
            module.register_forward_hook(_block_done)
        else:
            follow(module)


def _block_done(_module: nn.Module, _inputs: Any, output: Any) -> None:
    sign()
    if isinstance(output, Tensor) and output.grad_fn is not None:
        output.grad_fn.register_prehook(lambda _: sign())
