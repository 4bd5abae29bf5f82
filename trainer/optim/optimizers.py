"""Configs of optimizers, their construction, and their learning rates.

A rate is a pure function of config, batch size and step, so no checkpoint needs it.
"""

from __future__ import annotations

import importlib
import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from data_pipeline.core.imports import check_installed
from data_pipeline.core.schema import BatchSize, Decay, Epsilon, LearningRate, PositiveFactor, Schema, ShareBelowOne

Decayed = Literal["all", "matrices"]


class ScheduleConfig(Schema):
    """A linear warm-up over the first share of training, then a rate of this kind.

    kind: "constant" is, without warm-up, the published pretraining on images and sounds of Tamkin et al. 2022. "cosine"
        falls along a half cosine to zero (Huang et al. 2023: no warm-up). It falls at every step; in the published code
        of Huang et al. it falls once an epoch. "linear" falls to zero along a line (Chen, Luo, Li 2021: no warm-up).
    """

    kind: Literal["constant", "cosine", "linear"] = "constant"
    warmup_fraction: ShareBelowOne = 0.0


class _Fields(Schema):
    """The settings of every optimizer.

    scaling: how the learning rate depends on the batch. "none" uses `learning_rate`; "linear" multiplies it with r, the
        global batch size / `reference_batch_size` (Goyal et al. 2017); "square_root" with the square root of r
        (Krizhevsky 2014).
    """

    schedule: ScheduleConfig = ScheduleConfig()
    scaling: Literal["none", "linear", "square_root"] = "none"
    reference_batch_size: BatchSize = 256


class SGDConfig(_Fields):
    """SGD with heavy-ball momentum.

    decay: the parameters with weight decay: "all", as published, or "matrices", the parameters with two or more
        dimensions, which leaves out biases and norms.
    """

    kind: Literal["sgd"] = "sgd"
    learning_rate: LearningRate = 0.03
    momentum: ShareBelowOne = 0.9
    weight_decay: Decay = 1e-4
    decay: Decayed = "all"


class AdamConfig(_Fields):
    """Adam (Kingma and Ba 2015) with L2 weight decay; `decay` has the meaning of `SGDConfig`."""

    kind: Literal["adam"] = "adam"
    learning_rate: LearningRate = 1e-3
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.999)
    epsilon: Epsilon = 1e-8
    weight_decay: Decay = 0.0
    decay: Decayed = "all"


class AdamWConfig(_Fields):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019): a step shrinks the weights by rate times decay."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: LearningRate = 1e-3
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.999)
    epsilon: Epsilon = 1e-8
    weight_decay: Decay = 0.01
    decay: Decayed = "matrices"


class LARSConfig(_Fields):
    """SGD with a rate for each parameter: times `trust` |w| / (|g| + weight_decay |w|) (You et al. 2017).

    Parameters without weight decay are not adapted either, as in SimCLR (Chen et al. 2020, with linear scaling: 0.3 for
    a batch of 256).

    The rate multiplies the momentum, as in torch's SGD. In the code of SimCLR it multiplies each gradient before the
    momentum adds it, which differs only where the rate changes: by a third in a warm-up.

    The optimizer is that of the package timm (Wightman 2019), which is an optional dependency.
    """

    kind: Literal["lars"] = "lars"
    learning_rate: LearningRate = 0.3
    momentum: ShareBelowOne = 0.9
    weight_decay: Decay = 1e-6
    trust: PositiveFactor = 1e-3
    decay: Decayed = "matrices"

    @field_validator("kind")
    @classmethod
    def _timm_is_installed(cls, kind: str) -> str:
        check_installed("timm", extra="timm", user="this optimizer")
        return kind


OptimizerConfig = Annotated[SGDConfig | AdamConfig | AdamWConfig | LARSConfig, Field(discriminator="kind")]


def scaled_learning_rate(config: OptimizerConfig, *, global_batch_size: int) -> float:
    """Return the highest rate of the schedule for this batch size.

    Examples:
        >>> scaled_learning_rate(SGDConfig(learning_rate=0.5, scaling="square_root"), global_batch_size=1024)
        1.0
    """
    share = global_batch_size / config.reference_batch_size
    match config.scaling:
        case "none":
            return config.learning_rate
        case "linear":
            return config.learning_rate * share
        case "square_root":
            return config.learning_rate * math.sqrt(share)


def learning_rate_at(config: OptimizerConfig, *, step: int, num_steps: int, global_batch_size: int) -> float:
    """Return the learning rate of a step, from 0, in a run of `num_steps`.

    Examples:
        >>> config = SGDConfig(learning_rate=0.5, schedule=ScheduleConfig(kind="cosine"))
        >>> learning_rate_at(config, step=50, num_steps=100, global_batch_size=256)
        0.25
    """
    highest = scaled_learning_rate(config, global_batch_size=global_batch_size)
    num_warmup_steps = round(config.schedule.warmup_fraction * num_steps)
    if step < num_warmup_steps:
        return highest * (step + 1) / num_warmup_steps
    progress = (step - num_warmup_steps) / (num_steps - num_warmup_steps)
    match config.schedule.kind:
        case "constant":
            return highest
        case "cosine":
            return highest * 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            return highest * (1 - progress)


def build_optimizer(config: OptimizerConfig, module: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of a module's trained parameters, with its state already made.

    A skipped first step, or a checkpoint before the first step, is therefore not a special case. The state consists of
    tensors for each parameter: "momentum_buffer", "step", "exp_avg", "exp_avg_sq".

    On a GPU, SGD, Adam and AdamW have fused kernels, which can skip a step by a flag that the host need not read. LARS
    has none; see `trainer.optim.skipping.step_unless`. Every other step computes with lists of tensors, and gives the
    bits of a loop over the parameters.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    fused = parameters[0].device.type == "cuda"
    groups = _groups(config, parameters)
    match config:
        case SGDConfig():
            optimizer: torch.optim.Optimizer = torch.optim.SGD(
                groups, lr=config.learning_rate, momentum=config.momentum, fused=fused, foreach=not fused
            )
        case AdamConfig() | AdamWConfig():
            adam = torch.optim.Adam if isinstance(config, AdamConfig) else torch.optim.AdamW
            optimizer = adam(
                groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon, fused=fused, foreach=not fused
            )
        case LARSConfig():
            optimizer = importlib.import_module("timm.optim").Lars(
                groups, lr=config.learning_rate, momentum=config.momentum, trust_coeff=config.trust
            )
    for parameter in parameters:
        optimizer.state[parameter] = _first_state(config, parameter, fused=fused)
    return optimizer


def _groups(config: OptimizerConfig, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the group of parameters with weight decay and the group without, but no empty group."""
    groups: list[dict[str, Any]] = []
    for has_decay in (True, False):
        chosen = [each for each in parameters if (config.decay == "all" or each.ndim > 1) == has_decay]
        groups.append({"params": chosen, "weight_decay": config.weight_decay if has_decay else 0.0})
        if isinstance(config, LARSConfig):
            groups[-1]["always_adapt"] = has_decay  # otherwise timm does not adapt if the decay is zero
    return [group for group in groups if group["params"]]


def _first_state(config: OptimizerConfig, parameter: nn.Parameter, *, fused: bool) -> dict[str, Tensor]:
    """Return the optimizer state of `parameter` before the first step."""

    def zeros() -> Tensor:
        return torch.zeros_like(parameter, requires_grad=False, memory_format=torch.preserve_format)

    match config:
        case SGDConfig() | LARSConfig():
            return {"momentum_buffer": zeros()} if config.momentum else {}
        case AdamConfig() | AdamWConfig():
            step = torch.zeros((), device=parameter.device if fused else None)
            return {"step": step, "exp_avg": zeros(), "exp_avg_sq": zeros()}
