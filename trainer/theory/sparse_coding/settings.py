"""Settings of the experiment on sparse coding, and the problems that they describe."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from data_pipeline.core.schema import Count, Decay, Factor, LearningRate, PositiveFactor
from trainer.theory.framework.experiment import TheorySettings

Study = Literal["arms", "biases", "noise", "pixels", "features", "planted"]


class SparseCodingSettings(TheorySettings):
    """Settings of the experiment.

    The defaults are half the size of the full setting (pixels_per_feature=64 learning_rate=0.05 num_steps=6000).

    studies: "arms" compares four arms on one problem: with and without mask, with and without bias. "biases" compares
        trained biases with and without mask, and supervised training. "noise", "pixels" and "features" compare the two
        arms with growing biases over `noise_variances`, `pixel_counts` (the dimension of x) or `feature_counts`.
        "planted" trains nothing: its neurons are the atoms, over `feature_counts`.
    num_features: D. The numbers of pixels, neurons, positives and negatives are multiples of it.
    feature_probability, noise_variance: P(z_j != 0) and sigma^2. None is ln ln D / D and sqrt(ln D) / D.
    initial_scale: expected norm of the first weights of a neuron.
    num_steps: steps with `num_features` features. Other `feature_counts` train in proportion to 1 / P(z_j != 0).
    trained_bias_start: a trained bias over the norm of its neuron, before the first step.
    bias_growth_start: the bias is 0 until the norm of every neuron is this multiple of its first norm.
    label_counts: the numbers of labelled items that the probes learn from. `num_test_items` more items choose the
        penalty, and as many again measure.
    """

    studies: tuple[Study, ...] = Field(default=("arms",), min_length=1)
    num_features: int = Field(default=16, ge=4, le=10**9)
    pixels_per_feature: Count = 32
    neurons_per_feature: Count = 4
    positives_per_feature: Count = 8
    negatives_per_feature: Count = 8
    feature_probability: float | None = Field(default=None, gt=0, le=1)
    noise_variance: Factor | None = None
    num_steps: Count = 3000
    learning_rate: LearningRate = 0.1
    weight_decay: Decay = 1e-3
    temperature: PositiveFactor = 1.0
    initial_scale: PositiveFactor = 0.1
    trained_bias_start: PositiveFactor = 0.1
    bias_growth_start: float = Field(default=3.0, gt=1, le=1e12)
    num_logs: int = Field(default=60, ge=4, le=10**9)
    label_counts: tuple[Count, ...] = (32, 64, 128, 256, 512, 1024, 2048, 4000)
    num_test_items: Count = 2000
    noise_variances: tuple[PositiveFactor, ...] = Field(default=(0.03, 0.05, 0.07, 0.1041, 0.16), min_length=1)
    pixel_counts: tuple[Count, ...] = Field(default=(32, 64, 128, 256, 512), min_length=1)
    feature_counts: tuple[Count, ...] = Field(default=(16, 24, 32), min_length=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if tuple(sorted(set(self.label_counts))) != self.label_counts or not self.label_counts:
            raise ValueError(f"label_counts must ascend, got {list(self.label_counts)}")
        if min(self.feature_counts) < 4:
            raise ValueError(f"feature_counts must be at least 4, got {list(self.feature_counts)}")
        for problem in (problem for study in self.studies for problem in problems(self, study)):
            D, P = problem.num_features, problem.num_pixels
            if P < D:
                raise ValueError(f"{D} atoms do not fit {P} pixels; take at least as many pixels as features")
        return self


@dataclass(frozen=True)
class LearnerKind:
    """A learner that is trained: its views, its bias, and whether it regresses labels in place of the contrast."""

    name: str
    masked: bool
    bias: Literal["growing", "trained", "none"]
    supervised: bool = False


MASK_BIAS = LearnerKind("mask, growing bias", masked=True, bias="growing")
MASK_LINEAR = LearnerKind("mask, no bias", masked=True, bias="none")
MASK_TRAINED = LearnerKind("mask, trained bias", masked=True, bias="trained")
NONE_BIAS = LearnerKind("no mask, growing bias", masked=False, bias="growing")
NONE_LINEAR = LearnerKind("no mask, no bias", masked=False, bias="none")
NONE_TRAINED = LearnerKind("no mask, trained bias", masked=False, bias="trained")
SUPERVISED = LearnerKind("supervised, trained bias", masked=False, bias="trained", supervised=True)
ARMS: Mapping[Study, tuple[LearnerKind, ...]] = {
    "arms": (MASK_BIAS, MASK_LINEAR, NONE_BIAS, NONE_LINEAR),
    "biases": (MASK_TRAINED, MASK_LINEAR, NONE_TRAINED, SUPERVISED),
}  # other studies compare MASK_BIAS and NONE_BIAS


@dataclass(frozen=True)
class Problem:
    """One problem of a study: its own numbers, and the settings that all problems have.

    The bias of a neuron goes from `bias_first` to `bias_cap`, in units of its norm, by the factor 1 + learning_rate / D
    a step. They are 0.2 and 0.45 at D = 16, and in proportion to sqrt(ln D / D).
    """

    settings: SparseCodingSettings
    arms: tuple[LearnerKind, ...]
    num_features: int
    num_pixels: int
    num_neurons: int
    num_positives: int
    num_negatives: int
    feature_probability: float
    noise_variance: float
    num_steps: int
    log_every: int
    bias_first: float
    bias_cap: float

    @property
    def first_loss(self) -> float:
        """Return the contrastive loss of f = 0."""
        return self.settings.temperature * math.log1p(self.num_negatives)

    def first_loss_of(self, arm: LearnerKind) -> float:
        """Return the loss of f = 0; of a supervised arm, half the expected square of its labels."""
        return self.num_features * self.feature_probability / 2 if arm.supervised else self.first_loss

    @property
    def linear_ceiling(self) -> float:
        """Return the R^2 of the best linear function of x: E[z^2] / (E[z^2] + sigma^2)."""
        return self.feature_probability / (self.feature_probability + self.noise_variance)

    @property
    def bias_over_noise(self) -> float:
        """Return kappa / sigma: the largest bias over the standard deviation of <w, noise>, for |w| = 1."""
        return self.bias_cap / math.sqrt(self.noise_variance) if self.noise_variance else math.inf

    @property
    def noise_over_signal(self) -> float:
        """Return E|xi|^2 / E|M z|^2 = P sigma^2 / (D E[z^2])."""
        return self.num_pixels * self.noise_variance / (self.num_features * self.feature_probability)


def problems(settings: SparseCodingSettings, study: Study) -> list[Problem]:
    """Return the problems of a study, in the order of its grid."""
    counts = settings.feature_counts if study in ("features", "planted") else (settings.num_features,)
    pixels = settings.pixel_counts if study == "pixels" else (None,)
    variances = settings.noise_variances if study == "noise" else (settings.noise_variance,)
    arms = ARMS.get(study, (MASK_BIAS, NONE_BIAS))
    return [_problem(settings, arms, *of_problem) for of_problem in itertools.product(counts, pixels, variances)]


def _problem(
    settings: SparseCodingSettings, arms: tuple[LearnerKind, ...], D: int, P: int | None, variance: float | None
) -> Problem:
    probability, usual = (
        settings.feature_probability or math.log(math.log(count)) / count for count in (D, settings.num_features)
    )
    steps = round(settings.num_steps * usual / probability)
    threshold = math.sqrt(math.log(D) / D / (math.log(16) / 16))
    return Problem(
        settings=settings,
        arms=arms,
        num_features=D,
        num_pixels=P or settings.pixels_per_feature * D,
        num_neurons=settings.neurons_per_feature * D,
        num_positives=settings.positives_per_feature * D,
        num_negatives=settings.negatives_per_feature * D,
        feature_probability=probability,
        noise_variance=math.sqrt(math.log(D)) / D if variance is None else variance,
        num_steps=steps,
        log_every=max(1, steps // settings.num_logs),
        bias_first=0.2 * threshold,
        bias_cap=0.45 * threshold,
    )
