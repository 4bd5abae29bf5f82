"""MoCo, symmetric and with a queue of 4,096 keys, with the settings of Huang et al. (2023) for richer views.

`configs.base.huang` has the settings and the commands.
"""

from __future__ import annotations

from configs.base import huang
from trainer.config import RunConfig


def cifar10() -> RunConfig:
    """CIFAR-10. Published: 90.12 % by kNN."""
    return huang("moco", "cifar10")


def cifar100() -> RunConfig:
    """CIFAR-100. Published: 64.19 % by kNN."""
    return huang("moco", "cifar100")
