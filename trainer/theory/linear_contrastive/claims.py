"""The claims of Tamkin et al. 2022 about its linear model (section 4, appendices D and E), and how they are judged.

Shapes: S seeds, A arms, T steps, P and Q states of two features, G points of their grid, C correlations of the other
feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from data_pipeline.core.errors import UserError
from trainer.theory.framework.claim import (
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
from trainer.theory.framework.experiment import Tensors
from trainer.theory.linear_contrastive.settings import (
    GRID_AXES,
    ErrorSettings,
    GradientSettings,
    TheoremSettings,
    TrainingSettings,
)

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


def judge_gradient(check: GradientSettings, error_S: Tensor) -> ClaimResult:
    return judge(
        GRADIENT,
        exactly(error_S.max().item(), kind=f"largest of {len(error_S)} seeds"),
        measured="largest deviation from autograd over the largest entry, float64",
        at_most=check.relative_tolerance,
    )


def judge_error(error: ErrorSettings, error_SP: Tensor) -> ClaimResult:
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


def judge_point(theorem: TheoremSettings, found: Tensors) -> tuple[list[ClaimResult], list[dict[str, float]]]:
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
            **bounds("gain_percent", gain_SC[:, place]),
            "p_positive": p_positive_S2C[:, 0, place].mean().item(),
        }
        for place, correlation in enumerate(correlations)
    ]
    return claims, table


def judge_grid(theorem: TheoremSettings, found: Tensors, *, num: int) -> tuple[ClaimResult, dict[str, Any]]:
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


def judge_training(training: TrainingSettings, found: Mapping[str, Tensors]) -> list[ClaimResult]:
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
        many_AS = training.two_of(by_beta)["weak_AST"][:, :, -1]
        claims.append(
            judge(
                FEWER,
                t_interval((many_AS[0] - many_AS[1]) - (few_AS[0] - few_AS[1])),
                measured=f"degrees gained with {training.num_dominant} dominant features less those with {fewest}",
                at_least=0,
            )
        )
    if 0 in training.other_betas:
        dominant_ST = by_beta["dominant_AST"][training.betas.index(0)]
        claims.append(
            judge(
                ALL_NOISE,
                t_interval(dominant_ST[:, -1] - dominant_ST[:, start]),
                measured="degrees by which the dominant features' mean angle grows after the noise starts",
                at_least=0,
            )
        )
    return claims


def bounds(name: str, values_S: Tensor) -> dict[str, Any]:
    """Entries of a table: the mean over seeds, and the bounds of its 95 % t-interval."""
    mean, low, high = t_bounds(values_S)
    return {name: mean.item(), f"{name}_95": [low.item(), high.item()]}


def _at(place: int, mean_P: Tensor, low_P: Tensor, high_P: Tensor, *, kind: str) -> Interval:
    return Interval(value=mean_P[place].item(), low=low_P[place].item(), high=high_P[place].item(), kind=kind)


def _of_seeds(num_seeds: int, num_places: int, places: str) -> str:
    return f"95 % t-interval for all {num_places} {places}, {num_seeds} seeds"
