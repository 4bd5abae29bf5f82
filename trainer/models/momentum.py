"""A frozen copy of a module that follows it by an exponential moving average (He et al. 2020, section 3.2)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import get_ema_multi_avg_fn


class MomentumCopy(nn.Module):
    """Called as the module it was copied from, without gradient and in training mode.

    Parameters follow those of `online`, which is not a submodule of this one. Buffers do not: batch norm's running
    statistics are those of the copy's own forwards, because they are statistics of what the copy's weights give, and
    in training mode a forward reads none of them. An average of the two modules' statistics would belong to neither.
    """

    def __init__(self, online: nn.Module, *, momentum: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(online).requires_grad_(False).train()
        self._online = (online,)  # in a tuple, where nn.Module does not look for submodules
        self._average = get_ema_multi_avg_fn(momentum)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Every parameter p becomes momentum * p + (1 - momentum) * online p; at momentum 0 it is the online one."""
        (online,) = self._online
        self._average(list(self.module.parameters()), list(online.parameters()), None)

    @torch.no_grad()
    def forward(self, *inputs: Any, updates_buffers: bool = True) -> Any:
        """The module's output; without `updates_buffers` its buffers stay as they are, and the output is the same."""
        if updates_buffers:
            return self.module(*inputs)
        scratch = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        return functional_call(self.module, scratch, inputs)
