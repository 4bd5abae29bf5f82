"""Settings of the experiment on the linear model: one class for each study."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

import torch
from pydantic import Field, model_validator
from torch import Tensor

from data_pipeline.core.schema import (
    Count,
    CountOrZero,
    LearningRate,
    PositiveFactor,
    Schema,
    Share,
    ShareBelowOne,
)
from trainer.theory.framework.experiment import Tensors, TheorySettings, TwoOrMore

Angle = Annotated[float, Field(ge=0, le=90)]
# At an angle of 0 or without a correlation, a feature does not turn. So it has no gain, which is relative to its speed.
TurningAngle = Annotated[float, Field(gt=0, le=90)]
SomeCorrelation = Annotated[float, Field(gt=0, lt=1)]
Norm = Annotated[float, Field(gt=0, le=4)]

Study = Literal["theorem", "training", "error"]

GRID_AXES = (
    "weak_angles_degrees",
    "weak_norms",
    "weak_correlations",
    "other_angles_degrees",
    "other_norms",
    "other_correlations",
)


class TheoremSettings(Schema):
    """Settings for Theorem 4.1: the speed of a feature (`weak`) against the correlation of another feature (`other`).

    One more feature stays the same. The settings `point_...` are one point. The plural ones, such as
    `weak_norms`, are a grid of all combinations. The gain is relative to the greatest correlation of the other feature.
    """

    num_pairs: TwoOrMore = 32
    num_batches_a_seed: TwoOrMore = 200
    point_weak_angle_degrees: TurningAngle = 60
    point_weak_norm: Norm = 0.4
    point_weak_correlation: SomeCorrelation = 0.5
    point_other_angle_degrees: Angle = 15
    point_other_norm: Norm = 0.6
    point_other_correlations: tuple[ShareBelowOne, ...] = Field(default=(0, 0.2, 0.4, 0.6, 0.8, 0.95), min_length=2)
    weak_angles_degrees: tuple[TurningAngle, ...] = Field(default=(10, 30, 50, 70, 85), min_length=1)
    weak_norms: tuple[Norm, ...] = Field(default=(0.2, 0.5, 1), min_length=1)
    weak_correlations: tuple[SomeCorrelation, ...] = Field(default=(0.2, 0.5, 0.8), min_length=1)
    other_angles_degrees: tuple[Angle, ...] = Field(default=(10, 30, 50, 70), min_length=1)
    other_norms: tuple[Norm, ...] = Field(default=(0.3, 0.6, 1.2), min_length=1)
    other_correlations: tuple[ShareBelowOne, ...] = Field(default=(0, 0.3, 0.6, 0.9), min_length=2)

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        for name in ("point_other_correlations", "other_correlations"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)):
                raise ValueError(f"{name} must rise from its least to its greatest value, got {list(values)}")
        return self

    @property
    def grid_shape(self) -> tuple[int, ...]:
        return tuple(len(getattr(self, name)) for name in GRID_AXES)


class TrainingSettings(Schema):
    """Settings for appendix D: one weak and many dominant features, with noise on the dominant ones from a step on.

    `noise_from_step` is that step. In the sweeps over `other_betas` and `fewer_dominant` the weak feature has
    `weak_correlation`. The claims use only the `weak_correlations` below `dominant_correlation`; figures and tables
    show all of them.

    `initial_scale` is the root mean square norm of theta_k at the start. Its entries are N(0, initial_scale^2 / dim).
    """

    num_pairs: TwoOrMore = 256
    dim: TwoOrMore = 10
    learning_rate: LearningRate = 0.5
    initial_scale: PositiveFactor = 0.3
    num_steps: Count = 150
    noise_from_step: CountOrZero = 50
    noise_beta: Share = 0.5
    other_betas: tuple[Share, ...] = (0, 0.25, 0.75)
    weak_correlation: Share = 0.5
    weak_correlations: tuple[Share, ...] = Field(default=(0.1, 0.2, 0.3, 0.5, 0.7, 0.9), min_length=1)
    dominant_correlation: Share = 0.9
    num_dominant: Count = 50
    fewer_dominant: tuple[Count, ...] = (40, 30, 20, 10, 1)

    @model_validator(mode="after")
    def _within(self) -> Self:
        if not 1 <= self.noise_from_step < self.num_steps:
            raise ValueError(
                f"noise_from_step {self.noise_from_step} must lie between 1 and num_steps {self.num_steps}"
            )
        if max(self.fewer_dominant, default=0) >= self.num_dominant:
            raise ValueError(f"fewer_dominant must lie below num_dominant, {self.num_dominant}")
        if min(self.weak_correlations) >= self.dominant_correlation:
            raise ValueError("one of weak_correlations must lie below dominant_correlation, or no feature is weak")
        return self

    @property
    def betas(self) -> list[float]:
        """Return all betas in ascending order. The last is 1, which is no noise."""
        return sorted({*self.other_betas, self.noise_beta, 1.0})

    def two_of(self, by_beta: Tensors) -> dict[str, Tensor]:
        """Return two of the arms, which are in the order of `betas`: first without noise, then with `noise_beta`."""
        chosen = torch.tensor([self.betas.index(1), self.betas.index(self.noise_beta)])
        return {name: history[chosen] for name, history in by_beta.items()}


class ErrorSettings(Schema):
    """Settings for Lemma E.1, which is checked by counting the test samples on the wrong side."""

    angles_degrees: tuple[Angle, ...] = Field(default=(0, 5, 15, 30, 45, 60, 75, 85, 90), min_length=1)
    num_samples_a_seed: Count = 200_000


class LinearContrastiveSettings(TheorySettings):
    """Settings of the experiment."""

    num_seeds: TwoOrMore = 16
    studies: tuple[Study, ...] = Field(default=get_args(Study), min_length=1)
    theorem: TheoremSettings = TheoremSettings()
    training: TrainingSettings = TrainingSettings()
    error: ErrorSettings = ErrorSettings()
