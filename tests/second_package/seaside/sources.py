"""Pictures of beaches: sand below and the sea above, or the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import BASE, Record
from data_pipeline.sources import LabelColumn, SourceInputs


@dataclass(frozen=True)
class Beaches:
    seed: int
    split: str
    num_records: int
    description: str = "beaches"

    @classmethod
    def open(cls, given: SourceInputs) -> Self:
        return cls(given.seed, given.split, given.limit or 100)

    @property
    def labels(self) -> Mapping[str, LabelColumn]:
        return {BASE: LabelColumn("beach", ("flood", "ebb"), np.arange(self.num_records) % 2)}

    def __getitem__(self, number: int) -> Record:
        rng = generator(self.seed, f"beaches {self.split}", number)
        picture = rng.integers(0, 60, (32, 32, 3)).astype(np.uint8)
        picture[: 8 if number % 2 else 24, :, 2] += 150
        return Record(picture)
