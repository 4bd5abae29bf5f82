"""Keep a frozen copy of a module as an exponential moving average of its weights (He et al. 2020, section 3.2)."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainer.models.activation_checkpointing import buffers_untouched
from trainer.models.random_layers import switch_off_random_layers


class MomentumCopy(nn.Module):
    """A copy that is called like its original, without gradient and in training mode.

    Its dropout layers drop nothing, nor do its layers that drop paths.

    Its parameters follow the parameters of `online`, which is not a submodule of the copy. Its buffers do not follow:
    running statistics of batch norm come from the copy's own forward passes, because they describe activations with the
    copy's weights. In training mode, no forward pass reads them.
    """

    def __init__(self, online: nn.Module, *, momentum: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(online).requires_grad_(False).train()
        switch_off_random_layers(self.module)
        self._online = (online,)  # in a tuple, where nn.Module does not look for submodules
        self._momentum = momentum

    def follow(self) -> None:
        """Set every parameter p to momentum * p + (1 - momentum) * p of the online module.

        Every rank must call this at the same time, because an engine may have cut the online module into pieces. They
        are gathered one after the other.
        """
        (online,) = self._online
        # Not kept in an attribute, because it is a function inside a function, which cannot be pickled.
        average = get_ema_multi_avg_fn(self._momentum)  # type: ignore[no-untyped-call]
        pairs = list(zip(self.module.parameters(), online.parameters(), strict=True))
        whole = [(copied, original) for copied, original in pairs if not _is_cut(original)]
        if whole:
            copies, originals = zip(*whole, strict=True)
            average(list(copies), list(originals), None)
        for copied, original in pairs:
            if _is_cut(original):
                average([copied], [original.detach().full_tensor()], None)  # type: ignore[attr-defined]

    @torch.no_grad()
    def forward(self, *inputs: Any, updates_buffers: bool = True) -> Any:
        """Return the output of the copy. With `updates_buffers=False`, its buffers do not change."""
        with nullcontext() if updates_buffers else buffers_untouched(self.module):
            return self.module(*inputs)


def _is_cut(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a DTensor, without an import of its class, which takes most of a second."""
    return hasattr(parameter, "full_tensor")
