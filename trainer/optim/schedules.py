"""The config of learning-rate schedules."""

from __future__ import annotations

from typing import Literal

from data_pipeline.core.schema import Schema, ShareBelowOne


class ScheduleConfig(Schema):
    """A linear warm-up over the first share of training, then a rate of this kind.

    kind: "constant" is, without warm-up, the published pretraining on images and sounds of Tamkin et al. 2022. "cosine"
        falls along a half cosine to zero (Huang et al. 2023: no warm-up). It falls at every step; in the published code
        of Huang et al. it falls once an epoch. "linear" falls to zero along a line (Chen, Luo, Li 2021: no warm-up).
    """

    kind: Literal["constant", "cosine", "linear"] = "constant"
    warmup_fraction: ShareBelowOne = 0.0
