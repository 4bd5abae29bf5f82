"""Barlow Twins: its column of the table of richer views of Huang et al. (2023).

All five transforms (a crop, e flip, d jitter, c grayscale, b blur); other rows and the colour strengths by
`trainer.views.expert_image.huang_views`. Build the shards first, for example

    for split in train test; do
      python -m data_pipeline build cifar10 --root DIR --split $split --out data/cifar10/$split
    done
    torchrun --standalone --nproc-per-node 8 launch/train.py --config barlow_twins:cifar10
"""

from __future__ import annotations

from configs.base import huang
from trainer.config import RunConfig
from trainer.models.heads import HeadConfig
from trainer.objectives import BarlowTwinsConfig


def cifar10() -> RunConfig:
    """CIFAR-10. Published: 86.91 % by kNN."""
    return _published("cifar10")


def cifar100() -> RunConfig:
    """CIFAR-100. Published: 57.99 % by kNN."""
    return _published("cifar100")


def _published(dataset: str) -> RunConfig:
    return huang(
        "barlow_twins",
        dataset,
        objective=BarlowTwinsConfig(),
        learning_rate=0.11,
        head=HeadConfig(hidden_sizes=(2048, 2048), batch_norm=True, output_batch_norm=True),
        embedding_size=2048,
    )
