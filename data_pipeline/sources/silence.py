"""Silence: records without sound and without a class, for datasets whose only content is the background."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from data_pipeline.audio.log_mel import AUDIOMNIST, FSDD, MelConfig
from data_pipeline.core.sample import Record
from data_pipeline.sources import LabelColumn

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
    description = "silence"
    labels: ClassVar[Mapping[str, LabelColumn]] = {}

    def __getitem__(self, number: int) -> Record:
        return Record(np.zeros(1, dtype=np.int16))
