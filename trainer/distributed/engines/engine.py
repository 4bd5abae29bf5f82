"""The interface of engines: an engine trains one module with its optimizer on all ranks.

Each trained module (encoder, viewmaker, objective) has its own engine. With simultaneous updates, one backward pass
computes the gradients of all modules, reversed for the viewmaker, and then each engine steps. With alternating updates,
one engine is frozen while the other steps. An engine therefore separates backward from step. Its state is whole and
named by parameter, so any kind of engine on any number of ranks can load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn


class Engine(Protocol):
    """A trained module with its optimizer on all ranks; `module` is the bare module, for use outside training."""

    module: nn.Module

    def __call__(self, *inputs: Any) -> Any:
        """Run a forward pass; `backward` will average its gradients over the ranks."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of `loss`, whose mean over the ranks is the global loss.

        Adds to the gradients of every module that the loss depends on and that is not frozen. Call it once for each
        loss, on any of the engines of these modules.
        """
        ...

    def accumulating(self) -> AbstractContextManager[None]:
        """Let forward and backward passes inside the block add to this rank's gradients without sending them.

        Run the last part of a batch after the block: its backward pass averages the sum of all parts over the ranks.
        """
        ...

    def gradient_norm(self) -> Tensor:
        """Return the Euclidean norm of the whole gradient after `backward`, a float32 scalar, equal on all ranks.

        It is inf or nan if any value of the gradient is, and inf if the norm overflows float32. Every rank must call
        this at the same time.
        """
        ...

    def step(self, *, learning_rate: float, skip: Tensor | None = None, gradient_scale: Tensor | None = None) -> None:
        """Take one optimizer step, then clear the gradients.

        Args:
            skip: a bool scalar, equal on all ranks. If it is true, parameters and optimizer state do not change.
            gradient_scale: a float32 scalar by which the gradients are divided first.
        """
        ...

    def frozen(self) -> AbstractContextManager[None]:
        """Inside the block, let the module pass gradients on without gradients of its own or synchronisation."""
        ...

    def module_state(self) -> dict[str, Tensor]:
        """Return the module's whole state_dict, perhaps without a copy. Every rank must call this at the same time."""
        ...

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the whole optimizer state by parameter: "momentum_buffer/trunk.conv1.weight", "step/...".

        The tensors may be in use, without a copy. Every rank must call this at the same time.
        """
        ...

    def load(self, module_state: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor]) -> None:
        """Load states from `module_state` and `optimizer_state` of any kind of engine.

        Raises `RuntimeError` if they belong to another module or optimizer.
        """
        ...
