"""Configs of learning-rate schedules."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from data_pipeline.core.schema import Schema, ShareBelowOne


class ConstantConfig(Schema):
    """Linear warm-up over the first share of training, then a constant rate.

    Without warm-up, this is the published image and audio pretraining of Tamkin et al. 2022.
    """

    kind: Literal["constant"] = "constant"
    warmup_fraction: ShareBelowOne = 0.0


class CosineConfig(Schema):
    """Linear warm-up over the first share of training, then a half cosine to zero (Huang et al. 2023: no warm-up).

    The rate falls with every step, where the published code of Huang et al. lowers it once an epoch.
    """

    kind: Literal["cosine"] = "cosine"
    warmup_fraction: ShareBelowOne = 0.0


ScheduleConfig = Annotated[ConstantConfig | CosineConfig, Field(discriminator="kind")]
