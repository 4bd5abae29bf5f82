"""Scale the loss, so that float16 gradients do not vanish."""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_SCALE = 2.0**16
_LEAST_SCALE = 1.0  # below which small gradients would become 0, without a word
_GOOD_STEPS_TO_GROW = 2000


class LossScale:
    """A factor by which the loss is multiplied, and by which the gradients are divided again.

    The factor halves after a skipped step until it is 1, and doubles after 2,000 steps in a row that were not skipped
    (Micikevicius et al. 2018). It is always 1 if `enabled` is False. Nothing here makes the host wait for a GPU.
    """

    def __init__(self, *, enabled: bool, device: torch.device) -> None:
        self._enabled = enabled
        self._scale = torch.full((), _FIRST_SCALE if enabled else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def scale(self) -> Tensor | None:
        """Return the factor, a float32 scalar; None if nothing is scaled."""
        return self._scale if self._enabled else None

    def update(self, skipped: Tensor) -> None:
        """Update the factor after a step; `skipped` is a bool scalar."""
        if self._enabled:
            good_steps = torch.where(skipped, 0, self._good_steps + 1)
            grows = good_steps == _GOOD_STEPS_TO_GROW
            lower = (self._scale / 2).clamp(min=_LEAST_SCALE)
            # In place, because a recorded step writes to the same memory at every replay.
            self._scale.copy_(torch.where(skipped, lower, torch.where(grows, self._scale * 2, self._scale)))
            self._good_steps.copy_(torch.where(grows, 0, good_steps))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the state, without a copy, to save them or to write into them; empty if not enabled."""
        return {"loss_scale": self._scale, "good_steps": self._good_steps} if self._enabled else {}
