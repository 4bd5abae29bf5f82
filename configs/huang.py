"""Four methods with the settings of Huang et al. (2023) for richer views, on CIFAR-10.

The study `richness` has the whole table, with CIFAR-100.

Training takes 800 epochs with batches of 512. The encoder is a ResNet-18 for small images, without a ReLU in its stem,
as in the published code. Pictures are normalised with the mean and deviation of ImageNet. The published accuracies are
from kNN on the test set at the best epoch, averaged over the seeds 0, 1 and 2.

A recipe has all five transforms: a crop, e flip, d jitter, c grayscale, b blur. For other rows and colour strengths see
`trainer.views.expert_image.huang_views`. Build the shards first:

    python -m data_pipeline papers --root DIR --out data
    torchrun --standalone --nproc-per-node 8 launch/train.py --config huang:moco
"""

from __future__ import annotations

from configs.base import data
from trainer.config import RunConfig
from trainer.models.encoder import ResNetConfig
from trainer.models.heads import HeadConfig
from trainer.objectives import BarlowTwinsConfig, MoCoConfig, NTXentConfig, ObjectiveConfig, SimSiamConfig
from trainer.optim.optimizers import ScheduleConfig, SGDConfig
from trainer.views.expert_image import huang_views

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SMALL_HEAD = HeadConfig(hidden_sizes=(512,))


def simclr(dataset: str = "cifar10") -> RunConfig:
    """SimCLR. Published, by kNN: 89.76 % on CIFAR-10, 57.74 % on CIFAR-100."""
    return _richer("simclr-huang", dataset, NTXentConfig(temperature=0.5), 0.06, _SMALL_HEAD)


def barlow_twins(dataset: str = "cifar10") -> RunConfig:
    """Barlow Twins. Published, by kNN: 86.91 % on CIFAR-10, 57.99 % on CIFAR-100."""
    head = HeadConfig(hidden_sizes=(2048, 2048), batch_norm=True, output_batch_norm=True)
    return _richer("barlow_twins", dataset, BarlowTwinsConfig(unbiased=True), 0.11, head, embedding_size=2048)


def moco(dataset: str = "cifar10") -> RunConfig:
    """MoCo, symmetric, with 4,096 keys in its queue. Published, by kNN: 90.12 % on CIFAR-10, 64.19 % on CIFAR-100."""
    return _richer("moco", dataset, MoCoConfig(), 0.08, _SMALL_HEAD)


def simsiam(dataset: str = "cifar10") -> RunConfig:
    """SimSiam. Published, by kNN: 90.59 % on CIFAR-10, 63.48 % on CIFAR-100."""
    head = HeadConfig(hidden_sizes=(2048,), batch_norm=True, output_batch_norm=True)
    return _richer("simsiam", dataset, SimSiamConfig(), 0.05, head, embedding_size=2048)


def _richer(
    method: str,
    dataset: str,
    objective: ObjectiveConfig,
    learning_rate: float,
    head: HeadConfig,
    *,
    embedding_size: int = 128,
) -> RunConfig:
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
