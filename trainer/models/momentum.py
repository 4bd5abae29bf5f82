"""A frozen copy of a module that follows it by an exponential moving average (He et al. 2020, section 3.2)."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainer.models.activation_checkpointing import buffers_untouched


class MomentumCopy(nn.Module):
    """A copy that is called like its original, without gradient and in training mode.

    The parameters follow the parameters of `online`, which is not a submodule of the copy. The buffers do not: running
    statistics of batch norm come from the copy's own forwards, because they describe activations under the copy's
    weights. In training mode no forward reads them. An average of two modules' statistics would fit neither.
    """

    def __init__(self, online: nn.Module, *, momentum: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(online).requires_grad_(False).train()
        self._online = (online,)  # in a tuple, where nn.Module does not look for submodules
        self._average = get_ema_multi_avg_fn(momentum)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Set every parameter p to momentum * p + (1 - momentum) * online p; with momentum 0 to the online one."""
        (online,) = self._online
        self._average(list(self.module.parameters()), list(online.parameters()), None)

    @torch.no_grad()
    def forward(self, *inputs: Any, updates_buffers: bool = True) -> Any:
        """Return the module's output. With `updates_buffers=False` its buffers keep their values."""
        with nullcontext() if updates_buffers else buffers_untouched(self.module):
            return self.module(*inputs)
