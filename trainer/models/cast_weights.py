"""Cast the weights of all convolutions of a network at once: one launch each way, where autocast takes one for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.distributed.collectives import is_distributed


@contextmanager
def cast_weights(network: nn.Module, device_type: str) -> Iterator[None]:
    """Inside the block and under autocast, let convolutions have their weights in the dtype of autocast.

    The weights and their gradients are those of autocast, to the last bit. Does nothing over ranks, whose gradients are
    sent during the backward pass, but here come at its end; and in `torch.compile`, which joins casts by itself.
    """
    layers: list[nn.Module] = []
    is_cast = device_type != "meta" and torch.is_autocast_enabled(device_type)  # "meta" knows no autocast
    if is_cast and not (torch.compiler.is_compiling() or is_distributed()):
        # Others may use their weight in another way, and ZeRO's third stage gathers a weight in its layer.
        convolutions = (each for each in network.modules() if type(each) is nn.Conv2d)
        layers = [each for each in convolutions if each.weight.requires_grad and each.weight.dim() == 4]
    if layers:
        dtype = torch.get_autocast_dtype(device_type)
        weights = _Cast.apply(*(layer.weight for layer in layers), dtype)  # type: ignore[no-untyped-call]
        for layer, weight in zip(layers, weights, strict=True):
            vars(layer)["weight"] = weight  # is found before the parameter
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("weight", None)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights_and_dtype: Any) -> tuple[Tensor, ...]:
        *weights, dtype = weights_and_dtype
        ctx.dtype = weights[0].dtype
        return _cast(weights, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_cast(gradients, ctx.dtype), None


def _cast(tensors: tuple[Tensor, ...] | list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    cast = tuple(torch.empty_like(tensor, dtype=dtype) for tensor in tensors)
    torch._foreach_copy_(cast, tensors)
    return cast
