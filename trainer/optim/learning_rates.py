"""Compute learning rates as a pure function of config, batch size and step, so that no checkpoint needs them."""

from __future__ import annotations

import math

from trainer.optim.optimizers import OptimizerConfig


def scaled_learning_rate(config: OptimizerConfig, *, global_batch_size: int) -> float:
    """Return the highest rate of the schedule for this batch size.

    Examples:
        >>> from trainer.optim.optimizers import SGDConfig
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
        >>> from trainer.optim.optimizers import SGDConfig
        >>> from trainer.optim.schedules import ScheduleConfig
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
