"""CIFAR-10 and CIFAR-100, lossless, from the files that torchvision downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BASE, Record
from data_pipeline.sources import LabelColumn, SourceInputs


class Cifar:
    """The 50,000 training or 10,000 test pictures of 32x32 (Krizhevsky 2009), in 10 classes or in the 100 fine classes.

    Raises `UserError` if `root` lacks the files or if their checksums are wrong.
    """

    description = "torchvision"

    @classmethod
    def open(cls, given: SourceInputs) -> Self:
        return cls(given.required_root(), num_classes=10 if given.base == "cifar10" else 100, split=given.split)

    def __init__(self, root: Path, *, num_classes: Literal[10, 100], split: str) -> None:
        from torchvision.datasets import CIFAR10, CIFAR100  # takes a second to import

        reader = CIFAR10 if num_classes == 10 else CIFAR100
        try:
            dataset = reader(root, train=split == "train", download=False)
        except RuntimeError:
            raise UserError(
                f"{root} does not hold torchvision's {reader.base_folder}, or it is damaged; download it with "
                f"`python -c \"import torchvision; torchvision.datasets.{reader.__name__}('{root}', download=True)\"`"
            ) from None
        self.labels = {BASE: LabelColumn("picture", tuple(dataset.classes), np.array(dataset.targets, dtype=np.int64))}
        self.num_records = len(dataset.targets)
        self._pictures: NDArray[np.uint8] = dataset.data

    def __getitem__(self, number: int) -> Record:
        return Record(self._pictures[number])
