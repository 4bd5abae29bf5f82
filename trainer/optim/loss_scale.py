"""Steps whose gradient is not finite: they are skipped, on all ranks alike, as if they had never been.

A gradient counts as not finite, too, if its numbers are finite but its length overflows float32. The optimizers square
gradients in float32: such a step would leave inf in the moments of Adam, which then hold parameters still for good.

Nothing here makes the host wait for a GPU: what is decided there stays there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

_FIRST_SCALE = 2.0**16
_GOOD_STEPS_TO_GROW = 2000


class LossScale:
    """Keeps float16 gradients from vanishing: the loss is multiplied by `scale`, the gradients divided by it again.

    The scale halves after a step that overflowed and doubles after 2,000 in a row that did not (Micikevicius et al.
    2018). Without `enabled` it is 1 and stays so.
    """

    def __init__(self, *, enabled: bool, device: torch.device) -> None:
        self._enabled = enabled
        self._scale = torch.full((), _FIRST_SCALE if enabled else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def scale(self) -> Tensor | None:
        """A float32 scalar; None where there is nothing to scale."""
        return self._scale if self._enabled else None

    def update(self, skipped: Tensor) -> None:
        """After a step, skipped or not (a bool scalar)."""
        if self._enabled:
            good_steps = torch.where(skipped, 0, self._good_steps + 1)
            grows = good_steps == _GOOD_STEPS_TO_GROW
            self._scale = torch.where(skipped, self._scale / 2, torch.where(grows, self._scale * 2, self._scale))
            self._good_steps = torch.where(grows, 0, good_steps)

    def state(self) -> dict[str, Tensor]:
        """The tensors in use, to be saved and to be written into; none where there is nothing to scale."""
        return {"loss_scale": self._scale, "good_steps": self._good_steps} if self._enabled else {}


class HeldState:
    """What a forward changes without a gradient, held so that a skipped step can be undone: batch norm's statistics,
    queues, banks, momentum encoders.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """What takes no gradient now is held; who is frozen later, for a player's turn, is no part of it."""
        self._modules = list(modules)
        self._untrained = [p for module in self._modules for p in module.parameters() if not p.requires_grad]
        self._held: list[Tensor] = []

    def hold(self) -> None:
        """Remember the state as it is now."""
        self._held = [tensor.clone() for tensor in self._tensors()]

    def roll_back(self, skip: Tensor) -> None:
        """Back to what is held, where `skip`, a bool scalar, is true."""
        roll_back(self._tensors(), self._held, skip)

    def _tensors(self) -> list[Tensor]:
        """In a fixed order; buffers are asked for anew, since a module may put a new tensor in an old one's place."""
        buffers = [buffer for module in self._modules for buffer in module.buffers()]
        return [tensor.detach() for tensor in [*buffers, *self._untrained]]


@torch.no_grad()
def roll_back(tensors: Sequence[Tensor], held: Sequence[Tensor], skip: Tensor) -> None:
    """Each tensor is again what is held of it, where `skip`, a bool scalar, is true."""
    if skip.device.type != "cpu" or skip:  # which on the CPU is known for nothing
        for tensor, before in zip(tensors, held, strict=True):
            tensor.copy_(torch.where(skip, before, tensor))


def any_not_finite(norms: Iterable[Tensor]) -> Tensor:
    """Whether one of these scalars is inf or nan: a bool scalar on their device."""
    return ~torch.stack(list(norms)).isfinite().all()
