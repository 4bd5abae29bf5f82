"""NT-Xent with a temperature that rises and falls in cycles (Kukleva et al. 2023, "Temperature schedules").

A low temperature tells single samples apart, and a high temperature brings groups of samples together. The cycle lets
an encoder learn from both.

Shapes: B samples of this rank, D dimensions.
"""

from __future__ import annotations

import math
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from data_pipeline.core.schema import BatchSize, Count, Temperature
from trainer.objectives.nt_xent import nt_xent_loss
from trainer.objectives.objective import BaseObjectiveConfig, Objective, ObjectiveInputs, ObjectiveOutput, ViewPair


class NTXentCycleConfig(BaseObjectiveConfig):
    """The config of NT-Xent with a cycle of temperatures; the defaults are those of the published code.

    highest, lowest: the temperature at the start and in the middle of a cycle.
    period_epochs: the epochs of a cycle. The published code takes the cosine of pi epoch / 200, so a cycle has twice
        its setting of 200. Within an epoch, the temperature does not change. So no epoch has the lowest temperature if
        this number is odd.
    chunk_size: as in NT-Xent.
    """

    kind: Literal["nt_xent_cycle"] = "nt_xent_cycle"
    highest: Temperature = 1.0
    lowest: Temperature = 0.1
    period_epochs: Count = 400
    chunk_size: BatchSize | None = None

    @model_validator(mode="after")
    def _the_range_ascends(self) -> Self:
        if self.lowest > self.highest:
            raise ValueError(f"lowest is {self.lowest}, above highest {self.highest}; exchange the two")
        return self

    def build(self, given: ObjectiveInputs) -> Objective:
        return NTXentCycle(self)


def cycled_temperature(epoch: int, *, lowest: float, highest: float, period_epochs: int) -> float:
    """Return lowest + (highest - lowest) (1 + cos(2 pi epoch / period)) / 2 (Kukleva et al. 2023, equation 5).

    Examples:
        >>> [round(cycled_temperature(e, lowest=0.1, highest=1.0, period_epochs=4), 3) for e in range(5)]
        [1.0, 0.55, 0.1, 0.55, 1.0]
    """
    share = (1 + math.cos(2 * math.pi * (epoch % period_epochs) / period_epochs)) / 2
    return lowest + (highest - lowest) * share


class NTXentCycle(Objective):
    """The objective of NT-Xent with a cycle of temperatures: a function of the epoch alone. Also logs `temperature`."""

    def __init__(self, config: NTXentCycleConfig) -> None:
        super().__init__()
        self._config = config

    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair) -> ObjectiveOutput:
        config = self._config
        now = cycled_temperature(
            pair.required_epoch(), lowest=config.lowest, highest=config.highest, period_epochs=config.period_epochs
        )
        output = nt_xent_loss(z_a_BD, z_b_BD, temperature=now, chunk_size=config.chunk_size)
        logged = torch.full((), now, device=z_a_BD.device)
        return ObjectiveOutput(output.loss, {**output.metrics, "temperature": logged})
