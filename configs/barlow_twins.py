"""Barlow Twins with the settings of Huang et al. (2023) for their table of richer views.

`configs.base.huang` has the settings and the commands.
"""

from __future__ import annotations

from configs.base import huang
from trainer.config import RunConfig


def cifar10() -> RunConfig:
    """CIFAR-10. Published: 86.91 % by kNN."""
    return huang("barlow_twins", "cifar10")


def cifar100() -> RunConfig:
    """CIFAR-100. Published: 57.99 % by kNN."""
    return huang("barlow_twins", "cifar100")
