"""Configs of learning-rate schedules."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from data_pipeline.core.schema import Schema, ShareBelowOne


class ConstantConfig(Schema):
    """A linear warm-up over the first share of training, then a constant rate.

    Without warm-up, this is the published pretraining on images and sounds of Tamkin et al. 2022.
    """

    kind: Literal["constant"] = "constant"
    warmup_fraction: ShareBelowOne = 0.0


class CosineConfig(Schema):
    """A linear warm-up over the first share of training, then a half cosine to zero (Huang et al. 2023: no warm-up).

    The rate falls at every step; in the published code of Huang et al. it falls once an epoch.
    """

    kind: Literal["cosine"] = "cosine"
    warmup_fraction: ShareBelowOne = 0.0


class LinearConfig(Schema):
    """A linear warm-up over the first share of training, then a linear fall to 0 (Chen, Luo, Li 2021: no warm-up)."""

    kind: Literal["linear"] = "linear"
    warmup_fraction: ShareBelowOne = 0.0


ScheduleConfig = Annotated[ConstantConfig | CosineConfig | LinearConfig, Field(discriminator="kind")]
