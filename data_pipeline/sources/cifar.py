"""CIFAR-10 in its original, lossless form, as torchvision unpacks it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torchvision.datasets import CIFAR10

from data_pipeline.errors import UserError
from data_pipeline.sample import Record


class Cifar10:
    """The 50,000 training or 10,000 test pictures of CIFAR-10 (Krizhevsky 2009), 32x32.

    Raises `UserError` where `root` lacks the data or torchvision finds it damaged by its checksums.
    """

    description = "torchvision"

    def __init__(self, root: Path, *, split: str) -> None:
        try:
            dataset = CIFAR10(root, train=split == "train", download=False)
        except RuntimeError:
            raise UserError(
                f"{root} does not hold torchvision's cifar-10-batches-py, or it is damaged; download it with "
                f"`python -c \"import torchvision; torchvision.datasets.CIFAR10('{root}', download=True)\"`"
            ) from None
        self.class_names = tuple(dataset.classes)
        self.labels = np.array(dataset.targets, dtype=np.int64)
        self._images = dataset.data

    def __getitem__(self, number: int) -> Record:
        return Record(self._images[number], int(self.labels[number]))
