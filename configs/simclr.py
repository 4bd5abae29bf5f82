"""SimCLR with expert views: the "Expert" columns of Table 1 (Tamkin et al. 2022), one function for each row.

Loss, temperature and the constant learning rate are taken from the published code. The encoder is a ResNet-18 for small
images, trained for 200 epochs. As published, another overlay is drawn each time a picture is read (`--overlay online`).
Build the shards first, by the first command or only one of them by the second:

    python -m data_pipeline papers --root DIR --out data
    python -m data_pipeline build cifar10_digits --overlay online --root DIR --split both --out data/cifar10_digits
    torchrun --standalone --nproc-per-node 8 launch/train.py --config simclr:digits
"""

from __future__ import annotations

from configs.base import CIFAR10_MEAN, CIFAR10_STD, NAME_OF_DATA, PUBLISHED_SGD, changed, data, named
from trainer.config import RunConfig
from trainer.memory import MemoryConfig
from trainer.models.encoder import ResNetConfig
from trainer.objectives import PublishedNTXentConfig
from trainer.optim.optimizers import LARSConfig, ScheduleConfig
from trainer.probes.linear import ProbeConfig
from trainer.views.expert_image import ExpertImageConfig


def cifar10() -> RunConfig:
    """CIFAR-10 alone. Published: 86.2 % on CIFAR-10."""
    return _published("cifar10")


def shapes() -> RunConfig:
    """C+Shapes. Published: 76.0 % on CIFAR-10, 100.0 % on the shape."""
    return _published("cifar10_shapes")


def digits() -> RunConfig:
    """C+Digits. Published: 58.8 % on CIFAR-10, 86.7 % on the digit."""
    return _published("cifar10_digits")


def letters() -> RunConfig:
    """C+Letters. Published: 74.8 % on CIFAR-10, 94.1 % on the letter."""
    return _published("cifar10_letters")


def digits_1024() -> RunConfig:
    """C+Digits in batches of 1,024, for one GPU or several. There is no published number."""
    return _large(1024)


def digits_4096() -> RunConfig:
    """C+Digits in batches of 4,096, for one GPU or many. There is no published number.

    The optimizer (LARS), its rate and decay, 10 epochs of warm-up and the cosine follow Chen et al. 2020. They have two
    rules for the rate. This is the second: 0.075 times the square root of the batch (appendix B.1: better for small
    batches and few epochs). At 4,096 both give 4.8. Batch norm sees the whole batch. `memory.micro_batches` fits the
    step into a smaller GPU: negatives stay exact, but batch norm then sees a part.
    """
    return _large(4096)


def digits_small() -> RunConfig:
    """C+Digits for a CPU: ResNet-10 of width 16 on 10,000 pictures. Too small for the published numbers.

    Takes 5 minutes on one core. Measured with seed 0, JPEG pictures and `encoder.init=torchvision`: 47.4 % on CIFAR-10,
    17.4 % on the digit.

    python -m data_pipeline build cifar10_digits --overlay online --root DIR --limit 10000 \
           --out data/cifar10_digits_small/train
    python -m data_pipeline build cifar10_digits --overlay online --root DIR --split test \
           --out data/cifar10_digits_small/test
    """
    return RunConfig(
        name="simclr-digits-small",
        data=data("cifar10_digits_small", num_workers=0, overlay="online"),
        views=ExpertImageConfig(),
        encoder=ResNetConfig(kind="resnet10", width=16, mean=CIFAR10_MEAN, std=CIFAR10_STD),
        objective=PublishedNTXentConfig(),
        optimizer=PUBLISHED_SGD,
        global_batch_size=128,
        num_epochs=10,
        probe=ProbeConfig(num_epochs=10),
    )


def folder() -> RunConfig:
    """Your own pictures of any size: --set data.train_dir=DIR --set data.test_dir=DIR. For a GPU.

    The settings are those of Table 1, where they do not depend on CIFAR-10. Below 64 pixels the encoder is ResNet-18 in
    its small-image form, from there on torchvision's. It normalises by the numbers of your train set. The blur reaches
    a tenth of the picture (Chen et al. 2020). The run is named after the folder of the data. docs/own-pictures.md has
    all steps.
    """
    return RunConfig(
        name=f"simclr-{NAME_OF_DATA}",
        data=data("folder", overlay="online"),
        views=ExpertImageConfig(blur="simclr"),
        encoder=ResNetConfig(kind="resnet18_by_size"),
        objective=PublishedNTXentConfig(),
        optimizer=PUBLISHED_SGD,
        global_batch_size=128,
        num_epochs=200,
    )


def folder_small() -> RunConfig:
    """Your own pictures for a CPU: ResNet-10 of width 16, small batches and fewer epochs; best with 32 to 64 pixels."""
    return changed(
        folder(),
        name=f"simclr-{NAME_OF_DATA}-small",
        data=data("folder", num_workers=0, overlay="online"),
        encoder=ResNetConfig(kind="resnet10", width=16),
        global_batch_size=64,
        num_epochs=20,
        probe=ProbeConfig(views="none", num_epochs=30),
    )


def _published(dataset: str) -> RunConfig:
    return RunConfig(
        name=f"simclr-{dataset}",
        seed=0,
        data=data(dataset, overlay="online"),
        views=ExpertImageConfig(),
        encoder=ResNetConfig(kind="resnet18_small", mean=CIFAR10_MEAN, std=CIFAR10_STD),
        objective=PublishedNTXentConfig(),
        optimizer=PUBLISHED_SGD,
        global_batch_size=256,
        num_epochs=200,
    )


def _large(batch_size: int) -> RunConfig:
    """Return C+Digits in large batches. The activations of each block are computed again, which changes no number."""
    schedule = ScheduleConfig(kind="cosine", warmup_fraction=0.05)
    return named(
        digits(),
        str(batch_size),
        optimizer=LARSConfig(learning_rate=1.2, scaling="square_root", reference_batch_size=256, schedule=schedule),
        global_batch_size=batch_size,
        memory=MemoryConfig(encoder_checkpointing=1),
    )
