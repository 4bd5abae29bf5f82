"""Settings that many recipes share. Nothing here is a recipe."""

from __future__ import annotations

from typing import Literal

from trainer.config import DataConfig
from trainer.optim import AdamConfig, SGDConfig

PUBLISHED_SGD = SGDConfig(learning_rate=0.03, momentum=0.9, weight_decay=1e-4)
PUBLISHED_ADAM = AdamConfig(learning_rate=1e-3)


def data(
    dataset: str, *, num_workers: int = 2, overlay: Literal["baked", "online", "online_per_view"] = "baked"
) -> DataConfig:
    """Shards where the README's build commands put them: data/DATASET/train and data/DATASET/test."""
    return DataConfig(
        train_dir=f"data/{dataset}/train", test_dir=f"data/{dataset}/test", num_workers=num_workers, overlay=overlay
    )
