"""Silence: records without sound and without a class, for datasets whose only content is the background."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.audio.log_mel import AUDIOMNIST, FSDD, MelConfig
from data_pipeline.core.sample import NO_LABEL, Record

# The sounds of which silence stands in the place: their spectrogram, and how many records each split has.
SPEECH: Final[Mapping[str, tuple[MelConfig, Mapping[str, int]]]] = {
    "audiomnist": (AUDIOMNIST, {"train": 24_000, "test": 6_000}),
    "fsdd": (FSDD, {"train": 2_500, "test": 500}),
    "procedural": (FSDD, {"train": 5_000, "test": 1_000}),
}


@dataclass(frozen=True)
class SilenceSource:
    """A source of `num_records` records of one zero point each; a batch pads them to `num_points` with zeros."""

    num_records: int
    sample_rate: int
    num_points: int
    description: str = field(default="silence", init=False)
    class_names: tuple[str, ...] = field(default=(), init=False)
    title: str = field(default="silence", init=False)

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.full(self.num_records, NO_LABEL, dtype=np.int64)

    def __getitem__(self, number: int) -> Record:
        return Record(np.zeros(1, dtype=np.int16), NO_LABEL)
