"""Train the viewmaker against the encoder, in one of two ways, which are different algorithms.

Simultaneous (the default): encoder and viewmaker share one forward and one backward pass. The views pass through
`reverse_gradient`, so the encoder gets the gradient of the loss, and the viewmaker gets the gradient of minus `weight`
times the loss. Alternating (the published order): the viewmaker steps after the encoder, on new views, with its own
forward and backward pass.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from data_pipeline.core.schema import Count, PositiveFactor, Schema
from trainer.optim.optimizers import AdamConfig, OptimizerConfig


class AdversaryConfig(Schema):
    """The settings for training the viewmaker.

    weight: the weight of the loss for the viewmaker: the adversarial weight of Tamkin et al. 2021, 1 in their paper. It
        multiplies the gradient, so it changes the steps of SGD. The steps of Adam, AdamW and LARS hardly change.
    freeze_step: the step from which on the viewmaker does not change.
    viewmaker_steps: the number of steps of the viewmaker for each step of the encoder, on new views each; only with
        alternating updates.
    """

    update: Literal["simultaneous", "alternating"] = "simultaneous"
    weight: PositiveFactor = 1.0
    freeze_step: Count | None = None
    viewmaker_steps: Count = 1
    optimizer: OptimizerConfig = AdamConfig()

    @model_validator(mode="after")
    def _only_alternating_takes_several(self) -> Self:
        if self.update == "simultaneous" and self.viewmaker_steps > 1:
            raise ValueError(
                f"viewmaker_steps is {self.viewmaker_steps}, but with simultaneous updates encoder and viewmaker take "
                "one step each; set update=alternating"
            )
        return self


def reverse_gradient(x: Tensor, weight: float) -> Tensor:
    """Return `x`; the backward pass multiplies its gradient by `-weight` (Ganin and Lempitsky 2015)."""
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
