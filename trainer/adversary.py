"""The second player: how the viewmaker is trained against the encoder.

Simultaneous: one forward and one backward serve both players. The views pass through `reverse_gradient`, so the encoder
receives the gradient of the loss and the viewmaker that of minus `weight` times the loss, both at the same parameters.
Alternating, as the original did: the viewmaker's step comes after the encoder's, on new views, with a forward and a
backward of its own. The two are different algorithms.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from data_pipeline.schema import Schema
from trainer.optim import AdamConfig, OptimizerConfig


class AdversaryConfig(Schema):
    """`weight` multiplies the viewmaker's share of the loss (Tamkin et al. 2021 call it the adversarial weight: 1)."""

    update: Literal["simultaneous", "alternating"] = "simultaneous"
    weight: PositiveFloat = 1.0
    optimizer: OptimizerConfig = AdamConfig()


def reverse_gradient(x: Tensor, weight: float) -> Tensor:
    """`x` itself; going backward, its gradient is multiplied by `-weight` (Ganin & Lempitsky 2015)."""
    reversed_x: Tensor = _ReverseGradient.apply(x, weight)  # type: ignore[no-untyped-call]
    return reversed_x


class _ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.weight * gradient, None
