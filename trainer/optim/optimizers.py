"""Configs of optimizers, and their construction."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import BatchSize, Decay, Epsilon, LearningRate, PositiveFactor, Schema, ShareBelowOne
from trainer.optim.schedules import ScheduleConfig

Decayed = Literal["all", "matrices"]


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


class _FromTimm(_Fields):
    """An optimizer of the package timm (Wightman 2019), which is an optional dependency."""

    @field_validator("kind", check_fields=False)
    @classmethod
    def _timm_is_installed(cls, kind: str) -> str:
        if importlib.util.find_spec("timm") is None:
            raise UserError("this optimizer needs the package timm; install it with pip install -e '.[timm]'")
        return kind


class LARSConfig(_FromTimm):
    """SGD with a rate for each parameter: times `trust` |w| / (|g| + weight_decay |w|) (You et al. 2017).

    The rate multiplies the momentum, as in torch's SGD, and not the gradient before the momentum. At a constant rate
    the two are equal. Parameters without weight decay are not adapted either, as in SimCLR (Chen et al. 2020, with
    linear scaling: 0.3 for a batch of 256).
    """

    kind: Literal["lars"] = "lars"
    learning_rate: LearningRate = 0.3
    momentum: ShareBelowOne = 0.9
    weight_decay: Decay = 1e-6
    trust: PositiveFactor = 1e-3
    decay: Decayed = "matrices"


class LAMBConfig(_FromTimm):
    """Adam with its step u, including weight decay, scaled to the norm of each parameter: times |w| / |u|.

    See You et al. 2020, with square-root scaling of the rate. Parameters without weight decay are not adapted. A
    gradient with a larger norm than `max_gradient_norm` is first scaled down to it.
    """

    kind: Literal["lamb"] = "lamb"
    learning_rate: LearningRate = 1e-3
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.999)
    epsilon: Epsilon = 1e-6
    weight_decay: Decay = 0.01
    max_gradient_norm: PositiveFactor | None = None
    decay: Decayed = "matrices"


OptimizerConfig = Annotated[SGDConfig | AdamConfig | AdamWConfig | LARSConfig | LAMBConfig, Field(discriminator="kind")]


def build_optimizer(config: OptimizerConfig, module: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of a module's trained parameters, with its state already made.

    A skipped first step, or a checkpoint before the first step, is therefore not a special case. The state consists of
    tensors for each parameter: "momentum_buffer", "step", "exp_avg", "exp_avg_sq".

    On a GPU, SGD, Adam and AdamW have fused kernels, which can skip a step by a flag that the host need not read. LARS
    and LAMB do not; see `trainer.optim.skipping.step_unless`. Every other step computes with lists of
    tensors, and gives the bits of a loop over the parameters.
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
        case LAMBConfig():
            optimizer = importlib.import_module("timm.optim").Lamb(
                groups,
                lr=config.learning_rate,
                betas=config.betas,
                eps=config.epsilon,
                max_grad_norm=config.max_gradient_norm,
            )
            _count_steps_by_parameter(optimizer)
    for parameter in parameters:
        optimizer.state[parameter] = _first_state(config, parameter, fused=fused)
    return optimizer


def _groups(config: OptimizerConfig, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the group of parameters with weight decay and the group without, but no empty group."""
    decayed = [parameter for parameter in parameters if config.decay == "all" or parameter.ndim > 1]
    left_out = [parameter for parameter in parameters if not (config.decay == "all" or parameter.ndim > 1)]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": left_out, "weight_decay": 0.0},
    ]
    if isinstance(config, LARSConfig | LAMBConfig):
        for group, adapted in zip(groups, (True, False), strict=True):
            group["always_adapt"] = adapted  # otherwise timm does not adapt if the decay is zero
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
        case LAMBConfig():
            return {"step": torch.zeros(()), "exp_avg": zeros(), "exp_avg_sq": zeros()}


def _count_steps_by_parameter(optimizer: torch.optim.Optimizer) -> None:
    """Keep the step count of an optimizer in the state of its parameters, like torch's optimizers, not in its groups.

    A checkpoint holds only the state of the parameters. Without the count in it, a restarted run would correct the bias
    of the first moments a second time.
    """

    def write_groups(*_: object) -> None:
        for group in optimizer.param_groups:
            group["step"] = optimizer.state[group["params"][0]]["step"].clone()

    def read_groups(*_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["step"].fill_(group["step"])

    optimizer.register_step_pre_hook(write_groups)
    optimizer.register_step_post_hook(read_groups)
