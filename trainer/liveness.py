"""Report signs of life from inside a training step: the stage, and that the step goes on.

`trainer.profiling.stage` reports every stage. `follow` makes a network report every block, forward and backward. The
watchdog listens to both, and the progress line shows them. A sign reads no tensor and never waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Linear)


class Listener(Protocol):
    """A receiver of the signs of life of this process."""

    def sign(self) -> None:
        """Note that the step goes on."""
        ...

    def enter(self, stage: str) -> None:
        """Note that `stage` begins, which may be inside of another one."""
        ...

    def leave(self) -> None:
        """Note that the innermost stage ends."""
        ...


_listeners: list[Listener] = []  # the open watchdog, if there is one


def listen(listener: Listener) -> None:
    """Send every sign to `listener` from now on, until `stop_listening`."""
    _listeners.append(listener)


def stop_listening(listener: Listener) -> None:
    """Send no more signs to `listener`; do nothing if it does not listen."""
    if listener in _listeners:
        _listeners.remove(listener)


def sign() -> None:
    """Give a sign of life. Takes about a microsecond."""
    for listener in _listeners:
        listener.sign()


@contextmanager
def inside(stage: str) -> Iterator[None]:
    """Report the block inside as `stage`."""
    if not _listeners:
        yield
        return
    listener = _listeners[-1]
    listener.enter(stage)
    try:
        yield
    finally:
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
        output.grad_fn.register_prehook(_gradient_arrived)


def _gradient_arrived(_gradients: Any) -> None:
    sign()
