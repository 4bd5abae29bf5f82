"""The engine interface: one player's module made parallel, and its optimizer.

Every player has an engine of its own. In the simultaneous game one backward of the loss fills the gradients of both
players (the viewmaker's reversed), then each engine steps; in the alternating game one engine is frozen while the other
steps. So an engine separates backward from step, and can hold still.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn


class Engine(Protocol):
    """One player under parallel training.

    Attributes:
        module: the bare module, for saving and for use outside training.
    """

    module: nn.Module

    def __call__(self, *inputs: Any) -> Any:
        """Forward through the parallel module; gradients will be averaged over ranks by `backward`."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Backward of `loss`, the mean of which over ranks is the global loss. Fills the gradients of every player
        that the loss depends on and that is not frozen; call it once a loss, on any of their engines."""
        ...

    def step(self, *, learning_rate: float) -> None:
        """One optimizer step with the gradients at hand, which are then cleared."""
        ...

    def frozen(self) -> AbstractContextManager[None]:
        """While open, the module passes gradients through but collects none, and calls run without synchronisation."""
        ...

    def optimizer_state(self) -> dict[str, Any]: ...

    def load_optimizer_state(self, state: dict[str, Any]) -> None: ...
