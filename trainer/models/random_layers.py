"""Find the layers of an encoder that draw random numbers in training: dropout, and layers that drop paths.

They draw from torch's generators, whose state is in no checkpoint. So a training step seeds the generators itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

_RATES = ("drop_prob", "drop_rate", "dropout")  # of timm's layers, and of attention and recurrent layers of torch
_RATES_OF_DROPOUT = ("drop", "p", "prob")  # names that mean something else in other layers


def has_random_layers(module: nn.Module) -> bool:
    """Return whether a layer of the module drops values or paths in training."""
    return any(_rates(layer) for layer in module.modules())


def switch_off_random_layers(module: nn.Module) -> None:
    """Set the rate of every layer that drops values or paths to 0, so that it draws nothing."""
    for layer in module.modules():
        for name in _rates(layer):
            setattr(layer, name, 0.0)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside the block, let torch's generators of the CPU and of `device` start from `seed`. Restore them after it."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _rates(layer: nn.Module) -> list[str]:
    """Return the names of the attributes of a layer that are rates above 0."""
    kind = type(layer).__name__
    names = _RATES + _RATES_OF_DROPOUT if "Drop" in kind or kind == "StochasticDepth" else _RATES
    return [name for name in names if type(rate := vars(layer).get(name, 0)) in (int, float) and rate > 0]
