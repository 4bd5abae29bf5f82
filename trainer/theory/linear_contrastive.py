"""The claims of Tamkin et al. 2022 about its linear model (section 4, appendices D and E), measured and judged.

Shapes: S seeds, A arms, K features, T steps, P and Q states of two features, C correlations of the other feature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from data_pipeline.errors import UserError
from data_pipeline.schema import Schema
from trainer.theory.claim import (
    Claim,
    ClaimResult,
    Interval,
    decide,
    exactly,
    judge,
    moment_bounds,
    simultaneous,
    t_bounds,
    t_interval,
    worst,
)
from trainer.theory.experiment import Experiment, Outcome, Part, Tensors, TheorySettings
from trainer.theory.figures import Curve, Map, Panel, draw
from trainer.theory.linear_model import (
    FeatureStates,
    GridMoments,
    downstream_error,
    gradient_error,
    speed_grid,
    train_arms,
)

Angle = Annotated[float, Field(ge=0, le=90)]
Norm = Annotated[float, Field(gt=0, le=4)]
Correlation = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]

Study = Literal["gradient", "theorem", "training", "error"]
STUDIES: tuple[Study, ...] = ("gradient", "theorem", "training", "error")

PAPER = "Tamkin et al. 2022"

GRADIENT = Claim(
    name="gradient",
    statement=(
        "The gradient of the loss is 1/M sum_ij (p_ij - [i = j]) (<theta_k, v_k^j> x_k^i + <theta_k, x_k^i> v_k^j)."
    ),
    source=f"by calculus from the model of {PAPER}, section 4",
)
GAIN = Claim(
    name="theorem at a point",
    statement="A feature turns faster towards its direction where another feature's correlation is lowered.",
    source=f"{PAPER}, Theorem 4.1",
)
MONOTONE = Claim(
    name="theorem, step by step",
    statement="The speed rises with every step by which the other feature's correlation is lowered.",
    source=f"{PAPER}, Theorem 4.1",
)
UNLEARNED = Claim(
    name="nothing from an unlearned feature",
    statement="Noise on a feature that has not been learned at all does not change the speed of the others.",
    source=f"{PAPER}, Theorem 4.1 (its condition that the other feature is partly learned)",
)
SOLVED = Claim(
    name="the task gets harder",
    statement="Noise on the other feature makes the pairs harder to tell apart: the mean p_ii falls.",
    source=f"{PAPER}, section 4",
)
GRID = Claim(
    name="theorem over the grid",
    statement="Lowering the other feature's correlation speeds the feature up at every point of the grid.",
    source=f"{PAPER}, Theorem 4.1",
)
WEAK_FASTER = Claim(
    name="weak feature",
    statement="Noise on the dominant features makes the weak one be learned better in the same number of steps.",
    source=f"{PAPER}, appendix D",
)
LITTLE_COST = Claim(
    name="dominant features",
    statement="The noise costs the dominant features little.",
    source=f"{PAPER}, appendix D (how little is not said; the bound is ours)",
)
P_DROPS = Claim(
    name="p_ii drops",
    statement="The mean p_ii drops sharply when the noise starts.",
    source=f"{PAPER}, appendix D (how sharply is not said; the bound is ours)",
)
FEWER = Claim(
    name="fewer dominant features",
    statement="With fewer dominant features the effect is the same but smaller.",
    source=f"{PAPER}, appendix D",
)
ALL_NOISE = Claim(
    name="total noise",
    statement="Where nothing of the dominant features is left in a view (beta = 0), what was learned of them is lost.",
    source=f"the limit of the noise of {PAPER}, appendix D; not in the paper",
)
ERROR = Claim(
    name="error is the angle",
    statement="The test error of task k is the angle between theta_k and mu_k over pi.",
    source=f"{PAPER}, Lemma E.1",
)


GRID_AXES = (
    "weak_angles_degrees",
    "weak_norms",
    "weak_correlations",
    "other_angles_degrees",
    "other_norms",
    "other_correlations",
)


class TheoremSettings(Schema):
    """Theorem 4.1: the speed of one feature (`weak`) against the correlation of one other, with others beside them.

    The first part is one point, the second a grid of all combinations. The gain is against the greatest of the other
    feature's correlations.
    """

    num_pairs: int = Field(default=32, ge=2)
    num_batches_a_seed: int = Field(default=200, ge=2)
    point_weak_angle_degrees: Angle = 60
    point_weak_norm: Norm = 0.4
    point_weak_correlation: Correlation = 0.5
    point_other_angle_degrees: Angle = 15
    point_other_norm: Norm = 0.6
    point_other_correlations: tuple[Correlation, ...] = Field(default=(0, 0.2, 0.4, 0.6, 0.8, 0.95), min_length=2)
    weak_angles_degrees: tuple[Angle, ...] = Field(default=(10, 30, 50, 70, 85), min_length=1)
    weak_norms: tuple[Norm, ...] = Field(default=(0.2, 0.5, 1), min_length=1)
    weak_correlations: tuple[Correlation, ...] = Field(default=(0.2, 0.5, 0.8), min_length=1)
    other_angles_degrees: tuple[Angle, ...] = Field(default=(10, 30, 50, 70), min_length=1)
    other_norms: tuple[Norm, ...] = Field(default=(0.3, 0.6, 1.2), min_length=1)
    other_correlations: tuple[Correlation, ...] = Field(default=(0, 0.3, 0.6, 0.9), min_length=2)
    num_rest: NonNegativeInt = 1
    rest_angle_degrees: Angle = 45
    rest_norm: Norm = 0.6
    rest_correlation: Correlation = 0.7

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        for name in ("point_other_correlations", "other_correlations"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)):
                raise ValueError(f"{name} must rise from its least to its greatest value, got {list(values)}")
        return self

    def rest(self) -> FeatureStates:
        one = FeatureStates.product([self.rest_angle_degrees], [self.rest_norm], [self.rest_correlation])
        return FeatureStates(*(part.repeat(self.num_rest) for part in (one.angle_P, one.norm_P, one.alpha_P)))

    @property
    def grid_shape(self) -> tuple[int, ...]:
        return tuple(len(getattr(self, name)) for name in GRID_AXES)


class Variation(Schema):
    """One setting of the training that is changed, all others as they are."""

    setting: Literal["dim", "num_pairs", "learning_rate", "initial_scale", "dominant_correlation", "noise_from_step"]
    value: float

    @property
    def name(self) -> str:
        return f"{self.setting}_{self.value:g}"


class TrainingSettings(Schema):
    """Appendix D: one weak and many dominant features; from `noise_from_step` on, noise on the dominant ones or none.

    The sweeps over `other_betas`, `fewer_noised`, `fewer_dominant` and `variations` have the weak feature at
    `weak_correlation`; those of `weak_correlations` that are not below `dominant_correlation` are shown, not judged.
    """

    num_pairs: int = Field(default=256, ge=2)
    dim: int = Field(default=10, ge=2)
    learning_rate: PositiveFloat = 0.5
    initial_scale: PositiveFloat = 0.3
    num_steps: PositiveInt = 150
    noise_from_step: NonNegativeInt = 50
    noise_beta: Share = 0.5
    other_betas: tuple[Share, ...] = (0, 0.25, 0.75)
    weak_correlation: Share = 0.5
    weak_correlations: tuple[Share, ...] = Field(default=(0.1, 0.2, 0.3, 0.5, 0.7, 0.9), min_length=1)
    dominant_correlation: Share = 0.9
    num_dominant: PositiveInt = 50
    fewer_dominant: tuple[PositiveInt, ...] = (40, 30, 20, 10, 1)
    fewer_noised: tuple[PositiveInt, ...] = (25, 10, 5)
    variations: tuple[Variation, ...] = (
        Variation(setting="dim", value=20),
        Variation(setting="num_pairs", value=64),
        Variation(setting="num_pairs", value=16),
        Variation(setting="learning_rate", value=0.1),
        Variation(setting="initial_scale", value=1),
    )
    cost_at_most_degrees: NonNegativeFloat = 2
    p_drop_at_least: Share = 0.2

    @model_validator(mode="after")
    def _within(self) -> Self:
        if not 1 <= self.noise_from_step < self.num_steps:
            raise ValueError(
                f"noise_from_step {self.noise_from_step} must lie between 1 and num_steps {self.num_steps}"
            )
        if max((*self.fewer_dominant, *self.fewer_noised), default=0) >= self.num_dominant:
            raise ValueError(f"fewer_dominant and fewer_noised must lie below num_dominant, {self.num_dominant}")
        if min(self.weak_correlations) >= self.dominant_correlation:
            raise ValueError("one of weak_correlations must lie below dominant_correlation, or no feature is weak")
        for variation in self.variations:
            self.varied(variation)
        return self

    def varied(self, variation: Variation) -> TrainingSettings:
        value = self.model_dump() | {"variations": (), variation.setting: variation.value}
        return TrainingSettings.model_validate(value)


class ErrorSettings(Schema):
    """Lemma E.1, by counting test samples on the wrong side."""

    angles_degrees: tuple[Angle, ...] = Field(default=(0, 5, 15, 30, 45, 60, 75, 85, 90), min_length=1)
    num_samples_a_seed: PositiveInt = 200_000
    tolerance: PositiveFloat = 0.002


class GradientSettings(Schema):
    """The closed form against autograd, in float64."""

    num_pairs: int = Field(default=16, ge=2)
    num_features: PositiveInt = 5
    dim: int = Field(default=10, ge=2)
    relative_tolerance: PositiveFloat = 1e-12


class LinearContrastiveSettings(TheorySettings):
    """`studies` are the sections that are computed and judged."""

    kind: Literal["linear_contrastive"] = "linear_contrastive"
    num_seeds: int = Field(default=16, ge=2)
    studies: tuple[Study, ...] = Field(default=STUDIES, min_length=1)
    gradient: GradientSettings = GradientSettings()
    theorem: TheoremSettings = TheoremSettings()
    training: TrainingSettings = TrainingSettings()
    error: ErrorSettings = ErrorSettings()


def parts(settings: LinearContrastiveSettings) -> Mapping[str, Part]:
    theorem, seeds = settings.theorem, settings.seeds
    check, error = settings.gradient, settings.error

    def gradient(device: torch.device) -> Tensors:
        sizes = {"num_pairs": check.num_pairs, "num_features": check.num_features, "dim": check.dim}
        return {"error_S": gradient_error(seeds=seeds, device=device, **sizes)}

    def errors(device: torch.device) -> Tensors:
        counted = downstream_error(
            error.angles_degrees, seeds=seeds, num_samples=error.num_samples_a_seed, device=device
        )
        return {"error_SP": counted}

    by_study: dict[Study, Mapping[str, Part]] = {
        "gradient": {"gradient": gradient},
        "theorem": {
            "theorem_point": partial(_theorem_point, theorem, seeds),
            "theorem_grid": partial(_theorem_grid, theorem, seeds),
        },
        "training": _training_parts(settings.training, seeds),
        "error": {"downstream_error": errors},
    }
    return {name: part for study in STUDIES if study in settings.studies for name, part in by_study[study].items()}


def _training_parts(training: TrainingSettings, seeds: Sequence[int]) -> Mapping[str, Part]:
    def train(changed: TrainingSettings, arms: Sequence[Arm], num_dominant: int) -> Part:
        return partial(_train, changed, seeds, arms, num_dominant)

    trained = {
        "weak_correlation": train(training, _weak_correlation_arms(training), training.num_dominant),
        "noise": train(training, _noise_arms(training), training.num_dominant),
    }
    for num in training.fewer_dominant:
        trained[f"dominant_{num}"] = train(training, _two_arms(training, num), num)
    for one in training.variations:
        varied = training.varied(one)
        trained[f"vary_{one.name}"] = train(varied, _two_arms(varied, varied.num_dominant), varied.num_dominant)
    return trained


@dataclasses.dataclass(frozen=True)
class Arm:
    """One training: the weak feature's correlation, beta of the noise (1: none), how many dominant features get it."""

    weak_correlation: float
    beta: float
    num_noised: int


def _weak_correlation_arms(training: TrainingSettings) -> list[Arm]:
    """Without noise, then with it."""
    betas = (1.0, training.noise_beta)
    return [Arm(value, beta, training.num_dominant) for beta in betas for value in training.weak_correlations]


def _noise_arms(training: TrainingSettings) -> list[Arm]:
    """Of `_betas`, then of `fewer_noised`."""
    counts = [(beta, training.num_dominant) for beta in _betas(training)]
    counts += [(training.noise_beta, num) for num in training.fewer_noised]
    return [Arm(training.weak_correlation, beta, num) for beta, num in counts]


def _betas(training: TrainingSettings) -> list[float]:
    """Ascending; the last is 1, no noise."""
    return sorted({*training.other_betas, training.noise_beta, 1.0})


def _two_arms(training: TrainingSettings, num_dominant: int) -> list[Arm]:
    """Without noise, and with it."""
    return [Arm(training.weak_correlation, beta, num_dominant) for beta in (1.0, training.noise_beta)]


def _train(
    training: TrainingSettings, seeds: Sequence[int], arms: Sequence[Arm], num_dominant: int, device: torch.device
) -> Tensors:
    alpha_AK = torch.full((len(arms), 1 + num_dominant), training.dominant_correlation, dtype=torch.float64)
    beta_AK = torch.ones_like(alpha_AK)
    for alpha_K, beta_K, arm in zip(alpha_AK, beta_AK, arms, strict=True):
        alpha_K[0] = arm.weak_correlation
        beta_K[1 : 1 + arm.num_noised] = arm.beta
    history = train_arms(
        alpha_AK,
        beta_AK,
        seeds=seeds,
        dim=training.dim,
        num_pairs=training.num_pairs,
        learning_rate=training.learning_rate,
        initial_scale=training.initial_scale,
        num_steps=training.num_steps,
        noise_from_step=training.noise_from_step,
        device=device,
    )
    return {field.name: getattr(history, field.name) for field in dataclasses.fields(history)}


def _theorem_point(theorem: TheoremSettings, seeds: Sequence[int], device: torch.device) -> Tensors:
    """Means of each seed, (S, 2, C): the other feature as learned as set, and not learned at all (90 degrees)."""
    weak = FeatureStates.product(
        [theorem.point_weak_angle_degrees], [theorem.point_weak_norm], [theorem.point_weak_correlation]
    )
    correlations = theorem.point_other_correlations
    other = FeatureStates.product([theorem.point_other_angle_degrees, 90], [theorem.point_other_norm], correlations)
    speed, p_positive = [], []
    for seed in seeds:
        found = _grid_of_a_seed(theorem, weak, other, len(correlations), seed, device)
        speed.append(found.speed_PQ.view(2, -1))
        p_positive.append(found.p_positive_PQ.view(2, -1))
    return {"speed_S2C": torch.stack(speed), "p_positive_S2C": torch.stack(p_positive)}


def _theorem_grid(theorem: TheoremSettings, seeds: Sequence[int], device: torch.device) -> Tensors:
    """Means over all batches of all seeds, (P, Q)."""
    weak = FeatureStates.product(theorem.weak_angles_degrees, theorem.weak_norms, theorem.weak_correlations)
    other = FeatureStates.product(theorem.other_angles_degrees, theorem.other_norms, theorem.other_correlations)
    found = [_grid_of_a_seed(theorem, weak, other, len(theorem.other_correlations), seed, device) for seed in seeds]
    names = [field.name for field in dataclasses.fields(found[0])]
    return {name: torch.stack([getattr(one, name) for one in found]).mean(0) for name in names}


def _grid_of_a_seed(
    theorem: TheoremSettings,
    weak: FeatureStates,
    other: FeatureStates,
    num_correlations: int,
    seed: int,
    device: torch.device,
) -> GridMoments:
    reference_Q = torch.arange(len(other)) // num_correlations * num_correlations + num_correlations - 1
    return speed_grid(
        weak,
        other,
        theorem.rest(),
        reference_Q=reference_Q,
        seed=seed,
        num_batches=theorem.num_batches_a_seed,
        num_pairs=theorem.num_pairs,
        device=device,
    )


def conclude(settings: LinearContrastiveSettings, found: Mapping[str, Tensors]) -> Outcome:
    theorem, training, error = settings.theorem, settings.training, settings.error
    claims: list[ClaimResult] = []
    figures: dict[str, bytes] = {}
    tables: dict[str, Any] = {}
    if "gradient" in settings.studies:
        claims.append(_judge_gradient(settings.gradient, found["gradient"]["error_S"]))
    if "theorem" in settings.studies:
        num_batches = theorem.num_batches_a_seed * settings.num_seeds
        at_point, tables["theorem_point"] = _judge_point(theorem, found["theorem_point"])
        over_grid, tables["theorem_grid"] = _judge_grid(theorem, found["theorem_grid"], num=num_batches)
        claims += [*at_point, over_grid]
        panels = _theorem_panels(theorem, found)
        figures["linear_contrastive_theorem"] = draw(panels, num_columns=2, panel_size=(4.6, 3.2))
    if "training" in settings.studies:
        claims += _judge_training(training, found)
        figures["linear_contrastive_training"] = draw(_training_panels(training, found))
        figures["linear_contrastive_sweeps"] = draw(_sweep_panels(training, found))
        tables["training"] = _training_tables(training, found)
    if "error" in settings.studies:
        claims.append(_judge_error(error, found["downstream_error"]["error_SP"]))
        panel = _error_panel(error, found)
        figures["linear_contrastive_error"] = draw([panel], num_columns=1, panel_size=(4.6, 3.2))
    return Outcome(claims, figures, tables)


def _judge_gradient(check: GradientSettings, error_S: Tensor) -> ClaimResult:
    return judge(
        GRADIENT,
        exactly(error_S.max().item(), kind=f"largest of {len(error_S)} seeds"),
        measured="largest deviation from autograd over the largest entry, float64",
        at_most=check.relative_tolerance,
    )


def _judge_error(error: ErrorSettings, error_SP: Tensor) -> ClaimResult:
    angles = torch.tensor(error.angles_degrees, dtype=torch.float64)
    deviation_SP = error_SP - angles / 180
    mean_P, low_P, high_P = t_bounds(deviation_SP, confidence=simultaneous(0.95, len(angles)))
    place = worst(low_P, high_P, at_least=-error.tolerance, at_most=error.tolerance)
    return judge(
        ERROR,
        _at(place, mean_P, low_P, high_P, kind=_of_seeds(len(error_SP), len(angles), "angles")),
        measured=f"error - angle / pi at the worst of {len(angles)} angles, {angles[place]:g} degrees",
        at_least=-error.tolerance,
        at_most=error.tolerance,
    )


def _judge_point(theorem: TheoremSettings, found: Tensors) -> tuple[list[ClaimResult], list[dict[str, float]]]:
    speed_S2C, p_positive_S2C = found["speed_S2C"], found["p_positive_S2C"]
    correlations = theorem.point_other_correlations
    lowered = f"correlation {correlations[-1]:g} lowered to {correlations[0]:g}"
    gain_SC = 100 * (speed_S2C[:, 0] / speed_S2C[:, 0, -1:] - 1)
    step_SC = gain_SC[:, :-1] - gain_SC[:, 1:]
    mean_C, low_C, high_C = t_bounds(step_SC, confidence=simultaneous(0.95, step_SC.shape[1]))
    smallest = worst(low_C, high_C, at_least=0)
    unlearned = (speed_S2C[:, 1] - speed_S2C[:, 1, -1:]).abs().max().item()
    claims = [
        judge(GAIN, t_interval(gain_SC[:, 0]), measured=f"gain in speed in %, {lowered}", at_least=0),
        judge(
            MONOTONE,
            _at(smallest, mean_C, low_C, high_C, kind=_of_seeds(len(gain_SC), len(mean_C), "steps")),
            measured=f"gain in % at the worst step, {correlations[smallest + 1]:g} to {correlations[smallest]:g}",
            at_least=0,
        ),
        judge(
            UNLEARNED,
            exactly(unlearned, kind=f"largest of {len(gain_SC)} seeds and {len(correlations)} correlations"),
            measured="change in speed with the other feature at 90 degrees",
            at_most=1e-12,
        ),
        judge(
            SOLVED,
            t_interval(p_positive_S2C[:, 0, -1] - p_positive_S2C[:, 0, 0]),
            measured=f"fall of the mean p_ii, {lowered}",
            at_least=0,
        ),
    ]
    table = [
        {
            "other_correlation": correlation,
            "speed": speed_S2C[:, 0, place].mean().item(),
            **_bounds("gain_percent", gain_SC[:, place]),
            "p_positive": p_positive_S2C[:, 0, place].mean().item(),
        }
        for place, correlation in enumerate(correlations)
    ]
    return claims, table


def _judge_grid(theorem: TheoremSettings, found: Tensors, *, num: int) -> tuple[ClaimResult, dict[str, Any]]:
    """Every weak state with every other one, at each correlation but the reference."""
    shape = theorem.grid_shape
    mean, square, speed = (found[name].view(shape) for name in ("gain_PQ", "gain_square_PQ", "speed_PQ"))
    lowered = tuple(part[..., :-1].flatten() for part in (mean, square, speed[..., -1:].expand(shape)))
    mean_G, square_G, reference_G = lowered
    confidence = simultaneous(0.95, len(mean_G))
    low_G, high_G = moment_bounds(mean_G, square_G, num=num, confidence=confidence)
    mean_G, low_G, high_G = (100 * part / reference_G for part in (mean_G, low_G, high_G))
    place = worst(low_G, high_G, at_least=0)
    verdicts = [decide(low, high, at_least=0) for low, high in zip(low_G.tolist(), high_G.tolist(), strict=True)]
    coordinates = [int(part) for part in torch.unravel_index(torch.tensor(place), (*shape[:-1], shape[-1] - 1))]
    where = {name: getattr(theorem, name)[at] for name, at in zip(GRID_AXES, coordinates, strict=True)}
    text = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in where.items())
    claim = judge(
        GRID,
        _at(place, mean_G, low_G, high_G, kind=f"95 % normal interval for all {len(mean_G)} points, {num} batches"),
        measured=f"gain in speed in % at the worst point ({text})",
        at_least=0,
    )
    counts = {verdict: verdicts.count(verdict) for verdict in ("holds", "not decidable here", "does not hold")}
    quantiles = torch.quantile(mean_G, torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)).tolist()
    return claim, {
        "points": len(mean_G),
        "points_by_verdict": counts,
        "batches": num,
        "gain_percent_least_median_greatest": quantiles,
        "worst_point": where,
    }


def _judge_training(training: TrainingSettings, found: Mapping[str, Tensors]) -> list[ClaimResult]:
    by_weak, by_beta, start = found["weak_correlation"], found["noise"], training.noise_from_step
    num = len(training.weak_correlations)
    if not all(bool(history.isfinite().all()) for histories in (by_weak, by_beta) for history in histories.values()):
        raise UserError(f"the training diverged at training.learning_rate {training.learning_rate:g}; set a lower one")
    judged_P = torch.tensor(training.weak_correlations) < training.dominant_correlation
    judged = [value for value in training.weak_correlations if value < training.dominant_correlation]

    def over_weak(claim: Claim, values_PS: Tensor, measured: str, **bound: float) -> ClaimResult:
        mean_P, low_P, high_P = t_bounds(values_PS[judged_P].T, confidence=simultaneous(0.95, len(judged)))
        place = worst(low_P, high_P, **bound)
        kind = _of_seeds(values_PS.shape[1], len(judged), "correlations")
        where = f"{measured}, at the worst of {len(judged)} correlations of the weak feature, {judged[place]:g}"
        return judge(claim, _at(place, mean_P, low_P, high_P, kind=kind), measured=where, **bound)

    weak_PS, dominant_PS = (
        last_AS[:num] - last_AS[num:] for last_AS in (by_weak[name][:, :, -1] for name in ("weak_AST", "dominant_AST"))
    )
    p_AST = by_weak["p_positive_AST"][num:]
    around = min(10, start, training.num_steps - start)
    drop_PS = p_AST[:, :, start - around : start].mean(-1) - p_AST[:, :, start : start + around].mean(-1)
    claims = [
        over_weak(WEAK_FASTER, weak_PS, "degrees less of the weak feature's angle", at_least=0),
        over_weak(
            LITTLE_COST,
            -dominant_PS,
            "degrees more of the dominant features' mean angle",
            at_most=training.cost_at_most_degrees,
        ),
        over_weak(
            P_DROPS,
            drop_PS,
            f"mean p_ii of the {around} steps before the noise less that of the {around} after",
            at_least=training.p_drop_at_least,
        ),
    ]
    if training.fewer_dominant:
        fewest = min(training.fewer_dominant)
        few_AS = found[f"dominant_{fewest}"]["weak_AST"][:, :, -1]
        many_AS = _two_of(by_beta, training)["weak_AST"][:, :, -1]
        claims.append(
            judge(
                FEWER,
                t_interval((many_AS[0] - many_AS[1]) - (few_AS[0] - few_AS[1])),
                measured=f"degrees gained with {training.num_dominant} dominant features less those with {fewest}",
                at_least=0,
            )
        )
    if 0 in training.other_betas:
        dominant_ST = by_beta["dominant_AST"][_betas(training).index(0)]
        claims.append(
            judge(
                ALL_NOISE,
                t_interval(dominant_ST[:, -1] - dominant_ST[:, start]),
                measured="degrees by which the dominant features' mean angle grows after the noise starts",
                at_least=0,
            )
        )
    return claims


def _two_of(by_beta: Tensors, training: TrainingSettings) -> dict[str, Tensor]:
    """Of the arms that differ in beta, the one without noise and the one with `noise_beta`."""
    betas = _betas(training)
    chosen = torch.tensor([betas.index(1), betas.index(training.noise_beta)])
    return {name: history[chosen] for name, history in by_beta.items()}


def _training_tables(training: TrainingSettings, found: Mapping[str, Tensors]) -> dict[str, Any]:
    """After the last step, means over seeds with the bounds of their 95 % t-intervals; angles in degrees."""
    num, start = len(training.weak_correlations), training.noise_from_step

    def arm(history: Tensors, place: int) -> dict[str, Any]:
        p_ST, loss_ST = history["p_positive_AST"][place], history["loss_AST"][place]
        return {
            **_bounds("weak_degrees", history["weak_AST"][place][:, -1]),
            **_bounds("dominant_degrees", history["dominant_AST"][place][:, -1]),
            "p_positive_before_noise": p_ST[:, start - 1].mean().item(),
            "p_positive_at_its_start": p_ST[:, start].mean().item(),
            "p_positive": p_ST[:, -1].mean().item(),
            "loss": loss_ST[:, -1].mean().item(),
        }

    def pair(history: Tensors, without: int = 0, noisy: int = 1) -> dict[str, Any]:
        last_AS = history["weak_AST"][:, :, -1]
        benefit = _bounds("benefit_degrees", last_AS[without] - last_AS[noisy])
        return {"without_noise": arm(history, without), "with_noise": arm(history, noisy), **benefit}

    by_weak, base, betas = found["weak_correlation"], _two_of(found["noise"], training), _betas(training)
    return {
        "by_weak_correlation": [
            {"weak_correlation": value, **pair(by_weak, place, num + place)}
            for place, value in enumerate(training.weak_correlations)
        ],
        "by_beta": [{"beta": beta, **arm(found["noise"], place)} for place, beta in enumerate(betas)],
        "by_num_noised": [
            {"num_noised": count, **pair(found["noise"], len(betas) - 1, len(betas) + place)}
            for place, count in enumerate(training.fewer_noised)
        ],
        "by_num_dominant": [
            {"num_dominant": training.num_dominant, **pair(base)},
            *({"num_dominant": count, **pair(found[f"dominant_{count}"])} for count in training.fewer_dominant),
        ],
        "by_variation": [
            {"setting": one.setting, "value": one.value, **pair(found[f"vary_{one.name}"])}
            for one in training.variations
        ],
    }


def _theorem_panels(theorem: TheoremSettings, found: Mapping[str, Tensors]) -> list[Panel | Map]:
    """Gain with the correlation lowered from greatest to least, over two settings at a time, the rest in the middle."""
    speed = found["theorem_grid"]["speed_PQ"].view(theorem.grid_shape)
    gain = 100 * (speed[..., 0] / speed[..., -1] - 1)
    middle = [size // 2 for size in gain.shape]
    point = found["theorem_point"]["speed_S2C"][:, 0]
    mean_C, low_C, high_C = t_bounds(100 * (point / point[:, -1:] - 1))

    def over(y: int, x: int) -> Tensor:
        at: list[Any] = list(middle)
        at[y] = at[x] = slice(None)
        return gain[tuple(at)]

    correlations = theorem.other_correlations
    lowered = f"{correlations[-1]:g} to {correlations[0]:g}"
    return [
        Panel(
            "Gain in speed at the point (%)",
            "correlation of the other feature",
            "gain (%)",
            [Curve(theorem.point_other_correlations, mean_C, marker="o", low=low_C, high=high_C)],
        ),
        Map(
            f"Gain (%), correlation {lowered}: angles",
            "angle of the other feature (degrees)",
            "angle of the feature (degrees)",
            theorem.other_angles_degrees,
            theorem.weak_angles_degrees,
            over(0, 3),
        ),
        Map(
            f"Gain (%), correlation {lowered}: norms",
            "norm of the other feature",
            "norm of the feature",
            theorem.other_norms,
            theorem.weak_norms,
            over(1, 4),
        ),
        Map(
            f"Gain (%), from {correlations[-1]:g}: correlations",
            "correlation of the other feature, lowered to",
            "correlation of the feature",
            correlations[:-1],
            theorem.weak_correlations,
            100 * (speed[..., :-1] / speed[..., -1:] - 1)[middle[0], middle[1], :, middle[3], middle[4], :],
        ),
    ]


def _training_panels(training: TrainingSettings, found: Mapping[str, Tensors]) -> list[Panel]:
    """A row for the weakest feature and one for that of the other parts: weak, a dominant one, mean p_ii."""
    num, panels = len(training.weak_correlations), []
    kinds = [("angle (degrees)", "weak_AST"), ("angle (degrees)", "second_AST"), ("mean p_ii", "p_positive_AST")]
    by_weak, base = found["weak_correlation"], _two_of(found["noise"], training)
    rows = [(training.weak_correlations[0], by_weak, (0, num)), (training.weak_correlation, base, (0, 1))]
    for correlation, history, arms in rows:
        titles = (
            f"Weak feature, correlation {correlation:g}",
            "A dominant feature beside it",
            "Mean p_ii of the batch",
        )
        for title, (y_label, name) in zip(titles, kinds, strict=True):
            curves = []
            for color, (arm, label) in enumerate(zip(arms, ("no noise", "noise on the dominant"), strict=True)):
                mean_T, low_T, high_T = t_bounds(history[name][arm])
                curves.append(Curve(range(len(mean_T)), mean_T, label, color, low=low_T, high=high_T))
            bottom = (0, None) if name != "p_positive_AST" else (0, 1.02)
            panels.append(Panel(title, "step", y_label, curves, (training.noise_from_step,), bottom))
    return panels


def _sweep_panels(training: TrainingSettings, found: Mapping[str, Tensors]) -> list[Panel]:
    """Angles after the last step against each of the three knobs."""
    num, by_weak, by_beta = len(training.weak_correlations), found["weak_correlation"], found["noise"]
    base, betas = _two_of(by_beta, training), _betas(training)
    counts = sorted({training.num_dominant, *training.fewer_dominant})
    by_count = [base if n == training.num_dominant else found[f"dominant_{n}"] for n in counts]

    def curve(x: Sequence[float], last_PS: Tensor, label: str, color: int) -> Curve:
        mean_P, low_P, high_P = t_bounds(last_PS.T)
        return Curve(x, mean_P, label, color, marker="o", low=low_P, high=high_P)

    def last(history: Tensors, name: str) -> Tensor:
        return history[name][:, :, -1]

    weak_AS = last(by_weak, "weak_AST")
    weak_counts = torch.stack([last(history, "weak_AST") for history in by_count])
    y_label = "angle after the last step (degrees)"
    return [
        Panel(
            "Weak feature against its correlation",
            "correlation of the weak feature",
            y_label,
            [
                curve(training.weak_correlations, weak_AS[:num], "no noise", 0),
                curve(training.weak_correlations, weak_AS[num:], f"noise, beta {training.noise_beta:g}", 1),
            ],
            y_range=(0, None),
        ),
        Panel(
            "Weak feature against the number of others",
            "number of dominant features",
            y_label,
            [
                curve(counts, weak_counts[:, 0], "no noise", 0),
                curve(counts, weak_counts[:, 1], f"noise, beta {training.noise_beta:g}", 1),
            ],
            y_range=(0, None),
            log_x=True,
        ),
        Panel(
            "Both against the noise",
            "beta (1: no noise; 0: all noise)",
            y_label,
            [
                curve(betas, last(by_beta, "weak_AST")[: len(betas)], "weak feature", 2),
                curve(betas, last(by_beta, "dominant_AST")[: len(betas)], "dominant, mean", 3),
            ],
            y_range=(0, None),
        ),
    ]


def _error_panel(error: ErrorSettings, found: Mapping[str, Tensors]) -> Panel:
    mean_P, low_P, high_P = t_bounds(found["downstream_error"]["error_SP"])
    angles = error.angles_degrees
    measured = Curve(angles, mean_P, "counted", 1, "", "o", low_P, high_P)
    line = Curve((0, 90), (0, 0.5), "angle / pi")
    return Panel("Test error of a feature against its angle", "angle (degrees)", "test error", [line, measured])


def _bounds(name: str, values_S: Tensor) -> dict[str, Any]:
    mean, low, high = t_bounds(values_S)
    return {name: mean.item(), f"{name}_95": [low.item(), high.item()]}


def _at(place: int, mean_P: Tensor, low_P: Tensor, high_P: Tensor, *, kind: str) -> Interval:
    return Interval(value=mean_P[place].item(), low=low_P[place].item(), high=high_P[place].item(), kind=kind)


def _of_seeds(num_seeds: int, num_places: int, places: str) -> str:
    return f"95 % t-interval for all {num_places} {places}, {num_seeds} seeds"


EXPERIMENT = Experiment(
    title="feature suppression in the linear model of Tamkin et al. 2022: Theorem 4.1, appendix D, Lemma E.1",
    defaults=LinearContrastiveSettings(),
    parts=parts,
    conclude=conclude,
)
