"""The engine interface: one player's module made parallel, and its optimizer.

Every player has an engine of its own. In the simultaneous game one backward of the loss fills the gradients of both
players (the viewmaker's reversed), then each engine steps; in the alternating game one engine is frozen while the other
steps. So an engine separates backward from step, and can hold still. Its state goes in and out by the names of the
parameters, the same for every kind of engine and any number of ranks: what one kind saved, another takes up.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn


class Engine(Protocol):
    """One player under parallel training.

    Attributes:
        module: the bare module, for use outside training.
    """

    module: nn.Module

    def __call__(self, *inputs: Any) -> Any:
        """Forward through the parallel module; gradients will be averaged over ranks by `backward`."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Backward of `loss`, the mean of which over ranks is the global loss. Adds to the gradients of every player
        that the loss depends on and that is not frozen; call it once a loss, on any of their engines."""
        ...

    def accumulating(self) -> AbstractContextManager[None]:
        """While open, forward and backward add to this rank's gradients and send nothing; the last part of a batch goes
        outside, and there the sum of all parts is averaged over the ranks."""
        ...

    def gradient_norm(self) -> Tensor:
        """Return the length of the whole gradient after backward, a float32 scalar, equal on all ranks.

        It is inf or nan if any number of the gradient is, and inf if the length overflows float32. Every rank calls
        this at the same time.
        """
        ...

    def step(self, *, learning_rate: float, skip: Tensor | None = None, gradient_scale: Tensor | None = None) -> None:
        """One optimizer step with the gradients at hand, which are then cleared.

        `skip`: a bool scalar, equal on all ranks: where it is true, parameters and optimizer stay as they are.
        `gradient_scale`: a float32 scalar that the gradients are to be divided by first.
        """
        ...

    def frozen(self) -> AbstractContextManager[None]:
        """While open, the module passes gradients through but collects none, and calls run without synchronisation."""
        ...

    def module_state(self) -> dict[str, Tensor]:
        """The module's state_dict, whole; tensors may be those in use. Every rank calls this at the same time."""
        ...

    def optimizer_state(self) -> dict[str, Tensor]:
        """Of each parameter, whole, what the optimizer keeps: "momentum_buffer/trunk.conv1.weight", "step/...".

        Tensors may be those in use. Every rank calls this at the same time.
        """
        ...

    def load(self, module_state: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor]) -> None:
        """Take up what `module_state` and `optimizer_state` of any kind of engine gave.

        Raises `RuntimeError` where they are of another module or optimizer.
        """
        ...
