"""The scale of the loss, which keeps float16 gradients from vanishing."""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_SCALE = 2.0**16
_GOOD_STEPS_TO_GROW = 2000


class LossScale:
    """A factor by which the loss is multiplied, and by which the gradients are divided again.

    The scale halves after a step that overflowed and doubles after 2,000 in a row that did not (Micikevicius et al.
    2018). Without `enabled` it stays 1. Nothing here makes the host wait for a GPU.
    """

    def __init__(self, *, enabled: bool, device: torch.device) -> None:
        self._enabled = enabled
        self._scale = torch.full((), _FIRST_SCALE if enabled else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def scale(self) -> Tensor | None:
        """A float32 scalar; None if nothing is scaled."""
        return self._scale if self._enabled else None

    def update(self, skipped: Tensor) -> None:
        """Take note of a step; `skipped` is a bool scalar."""
        if self._enabled:
            good_steps = torch.where(skipped, 0, self._good_steps + 1)
            grows = good_steps == _GOOD_STEPS_TO_GROW
            self._scale = torch.where(skipped, self._scale / 2, torch.where(grows, self._scale * 2, self._scale))
            self._good_steps = torch.where(grows, 0, good_steps)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors in use, to be saved and to be written into; none if nothing is scaled."""
        return {"loss_scale": self._scale, "good_steps": self._good_steps} if self._enabled else {}
