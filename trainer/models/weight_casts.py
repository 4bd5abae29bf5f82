"""Cast the weights of many layers together under autocast, which casts each weight by a kernel of its own.

At the batch sizes of the papers, a GPU waits for the host that launches its kernels, so their number counts.

Guarantees: outputs and gradients are those of autocast to the last bit, because the same numbers are rounded in the
same way. If a network runs several times in a step, the gradients of the runs are added in float32, not in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainer.distributed.collectives import is_distributed

# Autocast casts the weight and the bias of these layers. A subclass may compute something else from them first.
_CAST_LAYERS: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def weights_of(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield every parameter inside `module` that autocast casts, as its layer and its name in the layer."""
    for layer in module.modules():
        if type(layer) in _CAST_LAYERS:
            yield from ((layer, name) for name in ("weight", "bias") if layer._parameters[name] is not None)


@contextmanager
def cast_together(weights: Iterable[tuple[nn.Module, str]], *, device: torch.device) -> Iterator[None]:
    """Inside the block, replace parameters of layers by copies in the type of autocast, all cast by one operation.

    One operation casts their gradients back, too. On several ranks each gradient is cast alone, so that the engine can
    send it while the backward pass goes on.

    Does nothing without autocast on `device`, and in code that is compiled. Leaves a parameter as it is if it is not
    float32, or if an engine changes its form before its layer runs (ZeRO 3, FSDP).
    """
    places = []
    if not torch.compiler.is_compiling() and _is_autocast(device):
        places = [(layer, name) for layer, name in weights if _is_plain(layer, name)]
    if not places:
        yield
        return
    parameters: list[Tensor] = [getattr(layer, name) for layer, name in places]
    _put(places, _copies(parameters, torch.get_autocast_dtype(device.type)))
    try:
        yield
    finally:
        _put(places, parameters)


def _is_plain(layer: nn.Module, name: str) -> bool:
    parameter: Tensor = getattr(layer, name)
    is_managed = type(layer._parameters) is not dict or is_traceable_wrapper_subclass(parameter)  # ZeRO 3; a `DTensor`
    return parameter.dtype == torch.float32 and not is_managed


def _is_autocast(device: torch.device) -> bool:
    return is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def _put(places: Sequence[tuple[nn.Module, str]], tensors: Sequence[Any]) -> None:
    for (layer, name), tensor in zip(places, tensors, strict=True):
        layer._parameters[name] = tensor  # a copy is no leaf, so it cannot be a `nn.Parameter`


def _copies(parameters: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the copies, in whose backward pass the parameters get their gradients."""
    copies = _cast(parameters, dtype)
    size = 1 if is_distributed() else len(copies)  # of a group, whose gradients are cast together
    return [
        copy
        for start in range(0, len(copies), size)
        for copy in _Copies.apply(*parameters[start : start + size], copies[start : start + size])  # type: ignore[no-untyped-call]
    ]


@torch.no_grad()
def _cast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


class _Copies(torch.autograd.Function):
    """Connects copies with the parameters, so that the gradient of a copy becomes that of its parameter."""

    @staticmethod
    def forward(ctx: Any, *parameters_and_copies: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(parameters_and_copies[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [gradient for gradient in gradients if gradient is not None]
        cast = iter(_cast(given, torch.float32))
        return *(None if gradient is None else next(cast) for gradient in gradients), None
