"""The engine interface: one trained module made parallel, with its optimizer.

Each trained module (encoder, viewmaker, objective) has its own engine. In the simultaneous game one backward fills the
gradients of all of them, the viewmaker's reversed, and then each engine steps. In the alternating game one engine is
frozen while the other steps. So an engine separates backward from step. Its state is whole and named by parameter, so
a state that one kind of engine saved can be loaded by another kind and on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn


class Engine(Protocol):
    """One trained module under parallel training; `module` is the bare module, for use outside training."""

    module: nn.Module

    def __call__(self, *inputs: Any) -> Any:
        """Run forward through the parallel module; `backward` will average its gradients over the ranks."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Run backward of `loss`, whose mean over the ranks is the global loss.

        Adds to the gradients of every module that the loss depends on and that is not frozen. Call it once for each
        loss, on any of their engines.
        """
        ...

    def accumulating(self) -> AbstractContextManager[None]:
        """Let forward and backward inside add to this rank's gradients without sending them.

        Run the last part of a batch outside: there the sum of all parts is averaged over the ranks.
        """
        ...

    def gradient_norm(self) -> Tensor:
        """Return the length of the whole gradient after backward, a float32 scalar, equal on all ranks.

        It is inf or nan if any value of the gradient is, and inf if the length overflows float32. Every rank calls this
        at the same time.
        """
        ...

    def step(self, *, learning_rate: float, skip: Tensor | None = None, gradient_scale: Tensor | None = None) -> None:
        """Take one optimizer step, then clear the gradients.

        Args:
            skip: a bool scalar, equal on all ranks. If it is true, parameters and optimizer stay as they are.
            gradient_scale: a float32 scalar by which the gradients are divided first.
        """
        ...

    def frozen(self) -> AbstractContextManager[None]:
        """Let the module inside pass gradients on without collecting any, and run without synchronisation."""
        ...

    def module_state(self) -> dict[str, Tensor]:
        """Return the module's whole state_dict; tensors may be those in use. Every rank calls this at the same time."""
        ...

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the whole optimizer state by parameter: "momentum_buffer/trunk.conv1.weight", "step/...".

        Tensors may be those in use. Every rank calls this at the same time.
        """
        ...

    def load(self, module_state: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor]) -> None:
        """Load states that `module_state` and `optimizer_state` of any kind of engine returned.

        Raises `RuntimeError` if they are of another module or optimizer.
        """
        ...
