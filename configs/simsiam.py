"""SimSiam with the settings of Huang et al. (2023) for their table of richer views.

`configs.base.huang` has the settings and the commands.
"""

from __future__ import annotations

from configs.base import huang
from trainer.config import RunConfig


def cifar10() -> RunConfig:
    """CIFAR-10. Published: 90.59 % by kNN."""
    return huang("simsiam", "cifar10")


def cifar100() -> RunConfig:
    """CIFAR-100. Published: 63.48 % by kNN."""
    return huang("simsiam", "cifar100")
