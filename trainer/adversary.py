"""The second player: how the viewmaker is trained against the encoder.

Simultaneous (the default): one forward and one backward serve both players. The views pass through `reverse_gradient`,
so the encoder gets the gradient of the loss, and the viewmaker gets the gradient of minus `weight` times the loss.
Alternating (the published order): the viewmaker steps after the encoder, on new views, with a forward and a backward of
its own. The two are different algorithms.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from data_pipeline.core.schema import Count, PositiveFactor, Schema
from trainer.optim.optimizers import AdamConfig, OptimizerConfig


class AdversaryConfig(Schema):
    """How the viewmaker is trained.

    weight: of the loss for the viewmaker; the adversarial weight of Tamkin et al. 2021, who take 1.
    freeze_step: from this step on the viewmaker stays as it is.
    viewmaker_steps: steps of the viewmaker for one of the encoder, each on new views; in the alternating game only.
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
                f"viewmaker_steps is {self.viewmaker_steps}, but in the simultaneous game both players take one step; "
                "set update=alternating"
            )
        return self


def reverse_gradient(x: Tensor, weight: float) -> Tensor:
    """Return `x`; in backward, multiply its gradient by `-weight` (Ganin & Lempitsky 2015)."""
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
