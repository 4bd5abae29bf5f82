"""Pictures of beaches: sand below and the sea above, or the other way round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import Record
from data_pipeline.sources import SourceInputs


@dataclass(frozen=True)
class Beaches:
    seed: int
    split: str
    num_records: int
    description: str = "beaches"
    class_names: tuple[str, ...] = ("flood", "ebb")
    title: str = "beach"

    @classmethod
    def open(cls, given: SourceInputs) -> Self:
        return cls(given.seed, given.split, given.limit or 100)

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.arange(self.num_records) % 2

    def __getitem__(self, number: int) -> Record:
        rng = generator(self.seed, f"beaches {self.split}", number)
        picture = rng.integers(0, 60, (32, 32, 3)).astype(np.uint8)
        picture[: 8 if number % 2 else 24, :, 2] += 150
        return Record(picture, number % 2)
