"""Settings that many recipes share. Nothing here is a recipe."""

from __future__ import annotations

from typing import Literal

from trainer.config import DataConfig, RunConfig
from trainer.models.encoder import ResNetConfig
from trainer.models.heads import HeadConfig
from trainer.objectives import ObjectiveConfig
from trainer.optim.optimizers import AdamConfig, SGDConfig
from trainer.optim.schedules import CosineConfig
from trainer.views.expert_image import huang_views

CIFAR10_MEAN, CIFAR10_STD = (0.491, 0.482, 0.446), (0.247, 0.243, 0.261)  # as Tamkin et al. 2022 have them
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PUBLISHED_SGD = SGDConfig(learning_rate=0.03, momentum=0.9, weight_decay=1e-4)
PUBLISHED_ADAM = AdamConfig(learning_rate=1e-3)


def data(
    dataset: str,
    *,
    num_workers: int = 2,
    overlay: Literal["baked", "online", "online_per_view"] = "baked",
    sample_rate: int | None = None,
) -> DataConfig:
    """Shards where the README's build commands put them: data/DATASET/train and data/DATASET/test."""
    return DataConfig(
        train_dir=f"data/{dataset}/train",
        test_dir=f"data/{dataset}/test",
        num_workers=num_workers,
        overlay=overlay,
        sample_rate=sample_rate,
    )


def huang(
    name: str,
    dataset: str,
    *,
    objective: ObjectiveConfig,
    learning_rate: float,
    head: HeadConfig,
    embedding_size: int,
    batch_norm: Literal["synchronized", "split"] = "synchronized",
) -> RunConfig:
    """A row "abcde" of Huang et al. (2023), the table of richer views: 800 epochs with batches of 512.

    ResNet-18 in its small-image form, whose stem has no ReLU in the published code; pictures normalised as ImageNet's.
    The published accuracies are kNN's at the best epoch on the test set, means of the seeds 0, 1 and 2.
    """
    return RunConfig(
        name=f"{name}-{dataset}",
        data=data(dataset),
        views=huang_views("abcde"),
        encoder=ResNetConfig(
            kind="resnet18_small",
            stem_relu=False,
            head=head,
            embedding_size=embedding_size,
            batch_norm=batch_norm,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        ),
        objective=objective,
        optimizer=SGDConfig(learning_rate=learning_rate, momentum=0.9, weight_decay=5e-4, schedule=CosineConfig()),
        global_batch_size=512,
        num_epochs=800,
    )
