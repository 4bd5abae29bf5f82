"""Optimizers and learning-rate schedules: the rate is a pure function of (config, step), not state to be saved."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from data_pipeline.schema import Schema

Momentum = Annotated[float, Field(ge=0, lt=1)]


class ConstantConfig(Schema):
    """The rate never changes (the published image and audio pretraining of Tamkin et al. 2022)."""

    kind: Literal["constant"] = "constant"


class CosineConfig(Schema):
    """Linear warm-up over the first share of training, then a half cosine to zero (Huang et al. 2023: no warm-up)."""

    kind: Literal["cosine"] = "cosine"
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0


ScheduleConfig = Annotated[ConstantConfig | CosineConfig, Field(discriminator="kind")]


class SGDConfig(Schema):
    """SGD with heavy-ball momentum; weight decay acts on every parameter, as published."""

    kind: Literal["sgd"] = "sgd"
    learning_rate: PositiveFloat = 0.03
    momentum: Momentum = 0.9
    weight_decay: NonNegativeFloat = 1e-4
    schedule: ScheduleConfig = ConstantConfig()


class AdamConfig(Schema):
    """Adam (Kingma & Ba 2015) with L2 weight decay."""

    kind: Literal["adam"] = "adam"
    learning_rate: PositiveFloat = 1e-3
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    schedule: ScheduleConfig = ConstantConfig()


OptimizerConfig = Annotated[SGDConfig | AdamConfig, Field(discriminator="kind")]


def build_optimizer(config: OptimizerConfig, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a module's trained parameters, its state there from the start: a first step that is skipped, or
    a checkpoint before it, need no case of their own. On a GPU the kernels are fused.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    fused = parameters[0].device.type == "cuda"
    match config:
        case SGDConfig():
            optimizer: torch.optim.Optimizer = torch.optim.SGD(
                parameters,
                lr=config.learning_rate,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                fused=fused,
            )
        case AdamConfig():
            optimizer = torch.optim.Adam(
                parameters,
                lr=config.learning_rate,
                betas=config.betas,
                eps=config.epsilon,
                weight_decay=config.weight_decay,
                fused=fused,
            )
    for parameter in parameters:
        optimizer.state[parameter] = _first_state(config, parameter, fused=fused)
    return optimizer


def _first_state(config: OptimizerConfig, parameter: nn.Parameter, *, fused: bool) -> dict[str, Tensor]:
    """What a step that changes nothing would leave."""

    def zeros() -> Tensor:
        return torch.zeros_like(parameter, requires_grad=False, memory_format=torch.preserve_format)

    match config:
        case SGDConfig():
            return {"momentum_buffer": zeros()} if config.momentum else {}
        case AdamConfig():
            step = torch.zeros((), device=parameter.device if fused else None)
            return {"step": step, "exp_avg": zeros(), "exp_avg_sq": zeros()}


def learning_rate_at(config: OptimizerConfig, *, step: int, num_steps: int) -> float:
    """The rate of step `step` (from 0) of `num_steps`.

    Examples:
        >>> learning_rate_at(SGDConfig(learning_rate=0.5, schedule=CosineConfig()), step=50, num_steps=100)
        0.25
    """
    match config.schedule:
        case ConstantConfig():
            return config.learning_rate
        case CosineConfig(warmup_fraction=warmup_fraction):
            num_warmup_steps = round(warmup_fraction * num_steps)
            if step < num_warmup_steps:
                return config.learning_rate * (step + 1) / num_warmup_steps
            progress = (step - num_warmup_steps) / (num_steps - num_warmup_steps)
            return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
