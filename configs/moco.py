"""MoCo with a queue of 4,096 keys, symmetric: its column of the table of richer views of Huang et al. (2023).

All five transforms (a crop, e flip, d jitter, c grayscale, b blur); other rows and the colour strengths by
`trainer.views.expert_image.huang_views`. Build the shards first, for example

    for split in train test; do
      python -m data_pipeline build cifar10 --root DIR --split $split --out data/cifar10/$split
    done
    torchrun --standalone --nproc-per-node 8 launch/train.py --config moco:cifar10
"""

from __future__ import annotations

from configs.base import huang
from trainer.config import RunConfig
from trainer.models.heads import HeadConfig
from trainer.objectives import MoCoConfig


def cifar10() -> RunConfig:
    """CIFAR-10. Published: 90.12 % by kNN."""
    return _published("cifar10")


def cifar100() -> RunConfig:
    """CIFAR-100. Published: 64.19 % by kNN."""
    return _published("cifar100")


def _published(dataset: str) -> RunConfig:
    return huang(
        "moco",
        dataset,
        objective=MoCoConfig(),
        learning_rate=0.08,
        head=HeadConfig(hidden_sizes=(512,)),
        embedding_size=128,
        batch_norm="split",
    )
