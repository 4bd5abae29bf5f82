"""Silence: records without sound and without a class, for datasets whose only content is the background."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.sample import NO_LABEL, Record


@dataclass(frozen=True)
class SilenceSource:
    """A source of `num_records` records of one zero point each; a batch pads them with zeros."""

    num_records: int
    sample_rate: int
    description: str = field(default="silence", init=False)
    class_names: tuple[str, ...] = field(default=(), init=False)
    title: str = field(default="silence", init=False)

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.full(self.num_records, NO_LABEL, dtype=np.int64)

    def __getitem__(self, number: int) -> Record:
        return Record(np.zeros(1, dtype=np.int16), NO_LABEL)
