"""Skip a step whose gradient is not finite: detect it, and undo the changes of the step.

A gradient also counts as not finite if its numbers are finite but its length overflows float32. The optimizers square
gradients in float32: such a step would leave inf in the moments of Adam, and the parameters would never change again.

Every flag is a bool scalar on the training device. Guarantees: the host never waits for a GPU here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor, nn


def any_not_finite(norms: Iterable[Tensor]) -> Tensor:
    """Return whether any of these scalars is inf or nan, as a bool scalar on their device."""
    return reduce(torch.maximum, norms) * 0 != 0  # 0 times inf or nan is nan, which equals nothing


class StateSnapshot:
    """A copy of the state that a forward pass changes: statistics of batch norm, queues, banks, momentum encoders.

    Parameters that are frozen after this object was made are not in it.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._untrained = [p for module in self._modules for p in module.parameters() if not p.requires_grad]
        self._copies: list[Tensor] = []

    def take(self) -> None:
        """Copy the present state; drop the previous copy."""
        self._copies = _copies_of(self._tensors())

    def restore(self, skip: Tensor) -> None:
        """Write the copy back if `skip` is true."""
        _restore(self._tensors(), self._copies, skip)

    def _tensors(self) -> list[Tensor]:
        """Return the tensors in a fixed order. Lists them at each call, because a module may replace a buffer."""
        buffers = [buffer for module in self._modules for buffer in module.buffers()]
        return [tensor.detach() for tensor in [*buffers, *self._untrained]]


def step_unless(
    optimizer: torch.optim.Optimizer,
    skip: Tensor | None,
    *,
    step: Callable[[], object] | None = None,
) -> None:
    """Take one step, unless `skip` is true; then parameters and optimizer state do not change.

    `step` replaces `optimizer.step`. A fused kernel reads the flag itself. Any other optimizer on a GPU takes the step
    and undoes it, which needs memory for a copy of parameters and state. If a part of the state is on the host, the
    host waits for the flag.
    """
    step = optimizer.step if step is None else step
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = None if skip is None else skip.float()  # type: ignore[attr-defined]
        skip = None
    if skip is None:
        step()
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors = [*parameters, *(value for each in parameters for value in optimizer.state.get(each, {}).values())]
    if skip.device.type == "cpu" or any(tensor.device != skip.device for tensor in tensors):
        if not skip:
            step()
    else:
        _step_and_undo(step, tensors, skip)


def _step_and_undo(step: Callable[[], object], tensors: Sequence[Tensor], skip: Tensor) -> None:
    """Call `step`, which changes only `tensors`, and undo it if `skip` is true."""
    copies = _copies_of(tensors)
    step()
    _restore(tensors, copies, skip)


def _copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the bits of the tensors, one after the other, in one row, or two if some take less than 32 each."""
    return [torch.cat(flat) for flat in _flat_bits(tensors)]


@torch.no_grad()
def _restore(tensors: Sequence[Tensor], copies: Sequence[Tensor], skip: Tensor) -> None:
    """Write the copies of `_copies_of` back if `skip` is true, in three kernels for each of them."""
    if skip.device.type != "cpu" or skip:  # only on the CPU can the flag be read without waiting
        for flat, copy in zip(_flat_bits(tensors), copies, strict=True):
            kept = torch.where(skip, copy, torch.cat(flat))
            torch._foreach_copy_(flat, torch.split(kept, [len(part) for part in flat]))


def _flat_bits(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the bits of each tensor in one row of int32, or uint8, that shares its memory: one list for each."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bits = torch.uint8 if tensor.dtype.itemsize < 4 else torch.int32
        by_dtype.setdefault(bits, []).append(_flat(tensor.detach()).view(bits))
    return list(by_dtype.values())


def _flat(tensor: Tensor) -> Tensor:
    """Return all values in one row, in the order of the memory, which may be channels_last."""
    strides, sizes = tensor.stride(), tensor.shape
    order = sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], -sizes[axis]))
    return tensor.permute(order).view(-1)
