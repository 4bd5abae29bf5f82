"""Settings that several recipes share. No function here is a recipe."""

from __future__ import annotations

from typing import Any, Literal

from trainer.config import RunConfig
from trainer.data import DataConfig
from trainer.models.encoder import ResNetConfig
from trainer.models.heads import HeadConfig
from trainer.objectives import BarlowTwinsConfig, MoCoConfig, NTXentConfig, ObjectiveConfig, SimSiamConfig
from trainer.optim.optimizers import AdamConfig, ScheduleConfig, SGDConfig
from trainer.views.expert_image import huang_views

CIFAR10_MEAN, CIFAR10_STD = (0.491, 0.482, 0.446), (0.247, 0.243, 0.261)  # the values of Tamkin et al. 2022
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NAME_OF_DATA = "+DATA+"  # `configs.resolve` puts the name of the data in its place, in the name of a recipe
PUBLISHED_SGD = SGDConfig(learning_rate=0.03, momentum=0.9, weight_decay=1e-4)
PUBLISHED_ADAM = AdamConfig(learning_rate=1e-3)


def data(
    dataset: str,
    *,
    num_workers: int = 2,
    overlay: Literal["baked", "online", "online_per_view"] = "baked",
    sample_rate: int | None = None,
) -> DataConfig:
    """Return the config of the shards that the documented build commands write to data/DATASET/train and .../test."""
    return DataConfig(
        train_dir=f"data/{dataset}/train",
        test_dir=f"data/{dataset}/test",
        num_workers=num_workers,
        overlay=overlay,
        sample_rate=sample_rate,
    )


def changed(recipe: RunConfig, **settings: Any) -> RunConfig:
    """Return the recipe with other settings."""
    return RunConfig.model_validate(recipe.model_dump() | settings)


def named(recipe: RunConfig, ending: str, **settings: Any) -> RunConfig:
    """Return the recipe with other settings and an ending of its name that says so."""
    return changed(recipe, name=f"{recipe.name}-{ending}", **settings)


HuangMethod = Literal["simclr-huang", "barlow_twins", "moco", "simsiam"]


def huang(method: HuangMethod, dataset: str) -> RunConfig:
    """Return row "abcde" of a method in the table of richer views of Huang et al. (2023).

    Training takes 800 epochs with batches of 512. The encoder is a ResNet-18 for small images, without a ReLU in its
    stem, as in the published code. Pictures are normalised with the mean and deviation of ImageNet. The published
    accuracies are from kNN on the test set at the best epoch, averaged over the seeds 0, 1 and 2.

    The row uses all five transforms: a crop, e flip, d jitter, c grayscale, b blur. For other rows and colour strengths
    see `trainer.views.expert_image.huang_views`. Build the shards first, for example

        for split in train test; do
          python -m data_pipeline build cifar10 --root DIR --split $split --out data/cifar10/$split
        done
        torchrun --standalone --nproc-per-node 8 launch/train.py --config moco:cifar10
    """
    objective, learning_rate, embedding_size, head = _huang_methods()[method]
    return RunConfig(
        name=f"{method}-{dataset}",
        data=data(dataset),
        views=huang_views("abcde"),
        encoder=ResNetConfig(
            kind="resnet18_small",
            stem_relu=False,
            head=head,
            embedding_size=embedding_size,
            batch_norm="split" if method == "moco" else "synchronized",
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        ),
        objective=objective,
        optimizer=SGDConfig(
            learning_rate=learning_rate, momentum=0.9, weight_decay=5e-4, schedule=ScheduleConfig(kind="cosine")
        ),
        global_batch_size=512,
        num_epochs=800,
    )


def _huang_methods() -> dict[HuangMethod, tuple[ObjectiveConfig, float, int, HeadConfig]]:
    """Return the objective, learning rate, embedding size and head of each method."""
    one_layer = HeadConfig(hidden_sizes=(512,))
    normed, deep = (
        HeadConfig(hidden_sizes=sizes, batch_norm=True, output_batch_norm=True) for sizes in ((2048,), (2048, 2048))
    )
    return {
        "simclr-huang": (NTXentConfig(temperature=0.5), 0.06, 128, one_layer),
        "barlow_twins": (BarlowTwinsConfig(unbiased=True), 0.11, 2048, deep),
        "moco": (MoCoConfig(), 0.08, 128, one_layer),
        "simsiam": (SimSiamConfig(), 0.05, 2048, normed),
    }
