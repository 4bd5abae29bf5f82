"""Signs of life from inside a training step: which stage it is in, and that it goes on.

`trainer.profiling.stage` reports every stage. `follow` makes a network report every block, forward and backward. Both
reach whoever listens: the watchdog, and through it the progress line. A sign is a few bytes written to memory. It makes
no system call, reads no tensor and never waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Linear)


class Listener(Protocol):
    """Hears the signs of life of this process. `stage` is the innermost stage; "" outside of all."""

    stage: str

    def sign(self) -> None:
        """Note that the step goes on."""
        ...

    def enter(self, stage: str, *, waits: bool) -> bool:
        """Note that `stage` begins, in which the rank `waits` for others or computes; return `waits` of before."""
        ...


_listeners: list[Listener] = []  # the one watchdog that is open, if one is


def listen(listener: Listener) -> None:
    """Tell `listener` of every sign from now on, until `stop_listening`."""
    _listeners.append(listener)


def stop_listening(listener: Listener) -> None:
    """Tell `listener` nothing more; does nothing if it does not listen."""
    if listener in _listeners:
        _listeners.remove(listener)


def sign() -> None:
    """Give a sign of life. Costs well below a microsecond."""
    for listener in _listeners:
        listener.sign()


@contextmanager
def inside(stage: str, *, waits: bool = False) -> Iterator[None]:
    """Report what happens inside as `stage`. `waits`: for other ranks or for the device, and not for this process."""
    if not _listeners:
        yield
        return
    listener = _listeners[-1]
    before = listener.stage
    waited = listener.enter(stage, waits=waits)
    try:
        yield
    finally:
        listener.enter(before, waits=waited)


def follow(network: nn.Module) -> None:
    """Let every block of `network` give a sign of life when it has run forward, and when its gradient arrives.

    A block is a module that holds convolutions or linear layers directly; such a layer outside a block counts as one.
    Changes no number. Do not call it for a network that torch.compile compiles: its graphs would break at every block.
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
