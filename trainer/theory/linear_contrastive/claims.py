"""Measure the claims in claims.yaml, on the linear model of Tamkin et al. 2022.

Shapes: S seeds, A arms, T steps, P and Q states of two features, G points of their grid, C correlations of the other
feature. With seeds, P is angles or correlations of the weak feature.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.theory.framework.claim import (
    Intervals,
    Measurement,
    Measurements,
    at_places,
    exact_interval,
    mean_entries,
    moment_bounds,
    simultaneous,
)
from trainer.theory.framework.experiment import Tensors, require_finite
from trainer.theory.linear_contrastive.settings import GRID_AXES, ErrorSettings, TheoremSettings, TrainingSettings


def measure_error(error: ErrorSettings, error_SP: Tensor) -> Intervals:
    """Return the test error less angle / pi, at every angle."""
    expected_P = torch.tensor(error.angles_degrees, dtype=torch.float64) / 180
    return at_places(error_SP - expected_P, [f"{angle:g}" for angle in error.angles_degrees], of="angles")


def measure_point(theorem: TheoremSettings, found: Tensors) -> tuple[Measurements, list[dict[str, float]]]:
    """Return the measurements at one point, and a table with a row for each correlation of the other feature."""
    speed_S2C, p_positive_S2C = found["speed_S2C"], found["p_positive_S2C"]
    correlations = theorem.point_other_correlations
    lowered = {"lowered": f"correlation {correlations[-1]:g} lowered to {correlations[0]:g}"}
    gain_SC = 100 * (speed_S2C[:, 0] / speed_S2C[:, 0, -1:] - 1)
    steps = [f"{high:g} to {low:g}" for low, high in itertools.pairwise(correlations)]
    unlearned = (speed_S2C[:, 1] - speed_S2C[:, 1, -1:]).abs().max().item()
    measured: Measurements = {
        "theorem at a point": Measurement(gain_SC[:, 0], lowered),
        "theorem, step by step": Measurement(at_places(gain_SC[:, :-1] - gain_SC[:, 1:], steps, of="steps")),
        "nothing from an unlearned feature": Measurement(
            exact_interval(unlearned, kind=f"largest of {len(gain_SC)} seeds and {len(correlations)} correlations")
        ),
        "the task gets harder": Measurement(p_positive_S2C[:, 0, -1] - p_positive_S2C[:, 0, 0], lowered),
    }
    table = [
        {
            "other_correlation": correlation,
            "speed": speed_S2C[:, 0, place].mean().item(),
            **mean_entries("gain_percent", gain_SC[:, place]),
            "p_positive": p_positive_S2C[:, 0, place].mean().item(),
        }
        for place, correlation in enumerate(correlations)
    ]
    return measured, table


def measure_grid(theorem: TheoremSettings, found: Tensors, *, num: int) -> tuple[Intervals, dict[str, Any]]:
    """Return the gains in speed at all points of the grid, and a table about them.

    A point is a state of the feature and a state of the other feature, except those with the reference correlation.
    `num` is the number of batches.
    """
    shape = theorem.grid_shape
    mean, square, speed = (found[name].view(shape) for name in ("gain_PQ", "gain_square_PQ", "speed_PQ"))
    mean_G, square_G, reference_G = (part[..., :-1].flatten() for part in (mean, square, speed[..., -1:].expand(shape)))
    low_G, high_G = moment_bounds(mean_G, square_G, num=num, confidence=simultaneous(0.95, len(mean_G)))
    mean_G, low_G, high_G = (100 * part / reference_G for part in (mean_G, low_G, high_G))
    *others, last = (getattr(theorem, name) for name in GRID_AXES)
    points = [dict(zip(GRID_AXES, point, strict=True)) for point in itertools.product(*others, last[:-1])]
    gains = Intervals(
        mean_G,
        low_G,
        high_G,
        kind=f"95 % normal interval for all {len(mean_G)} points, {num} batches",
        places=[", ".join(f"{name.replace('_', ' ')} {at:g}" for name, at in point.items()) for point in points],
    )
    return gains, {
        "points": len(mean_G),
        "gain_percent_least_median_greatest": torch.quantile(mean_G, torch.tensor([0, 0.5, 1]).double()).tolist(),
    }


def measure_training(training: TrainingSettings, found: Mapping[str, Tensors]) -> Measurements:
    """Return the measurements of the trainings. Raises `UserError` if one of them diverged."""
    by_weak, by_beta, start = found["weak_correlation"], found["noise"], training.noise_from_step
    num = len(training.weak_correlations)
    for history in (*by_weak.values(), *by_beta.values()):
        require_finite(history, "training.learning_rate", training.learning_rate)
    judged_P = torch.tensor(training.weak_correlations) < training.dominant_correlation
    places = [f"{value:g}" for value in training.weak_correlations if value < training.dominant_correlation]

    def over_weak(values_PS: Tensor) -> Intervals:
        return at_places(values_PS[judged_P].T, places, of="correlations")

    weak_PS, dominant_PS = (
        last_AS[:num] - last_AS[num:] for last_AS in (by_weak[name][:, :, -1] for name in ("weak_AST", "dominant_AST"))
    )
    p_AST = by_weak["p_positive_AST"][num:]
    around = min(10, start, training.num_steps - start)
    drop_PS = p_AST[:, :, start - around : start].mean(-1) - p_AST[:, :, start : start + around].mean(-1)
    measured = {
        "weak feature": Measurement(over_weak(weak_PS)),
        "dominant features": Measurement(over_weak(-dominant_PS)),
        "p_ii drops": Measurement(over_weak(drop_PS), {"around": around}),
    }
    if training.fewer_dominant:
        fewest = min(training.fewer_dominant)
        few_AS = found[f"dominant_{fewest}"]["weak_AST"][:, :, -1]
        many_AS = training.two_of(by_beta)["weak_AST"][:, :, -1]
        measured["fewer dominant features"] = Measurement(
            (many_AS[0] - many_AS[1]) - (few_AS[0] - few_AS[1]), {"fewest": fewest}
        )
    if 0 in training.other_betas:
        dominant_ST = by_beta["dominant_AST"][training.betas.index(0)]
        measured["total noise"] = Measurement(dominant_ST[:, -1] - dominant_ST[:, start])
    return measured


def training_tables(training: TrainingSettings, found: Mapping[str, Tensors]) -> dict[str, Any]:
    """Return tables of the trainings after the last step: means over seeds and 95 % t-intervals, angles in degrees."""
    num, start = len(training.weak_correlations), training.noise_from_step

    def arm(history: Tensors, place: int) -> dict[str, Any]:
        p_ST, loss_ST = history["p_positive_AST"][place], history["loss_AST"][place]
        return {
            **mean_entries("weak_degrees", history["weak_AST"][place][:, -1]),
            **mean_entries("dominant_degrees", history["dominant_AST"][place][:, -1]),
            "p_positive_before_noise": p_ST[:, start - 1].mean().item(),
            "p_positive_at_its_start": p_ST[:, start].mean().item(),
            "p_positive": p_ST[:, -1].mean().item(),
            "loss": loss_ST[:, -1].mean().item(),
        }

    def pair(history: Tensors, without: int = 0, noisy: int = 1) -> dict[str, Any]:
        last_AS = history["weak_AST"][:, :, -1]
        benefit = mean_entries("benefit_degrees", last_AS[without] - last_AS[noisy])
        return {"without_noise": arm(history, without), "with_noise": arm(history, noisy), **benefit}

    by_weak, base = found["weak_correlation"], training.two_of(found["noise"])
    return {
        "by_weak_correlation": [
            {"weak_correlation": value, **pair(by_weak, place, num + place)}
            for place, value in enumerate(training.weak_correlations)
        ],
        "by_beta": [{"beta": beta, **arm(found["noise"], place)} for place, beta in enumerate(training.betas)],
        "by_num_dominant": [
            {"num_dominant": training.num_dominant, **pair(base)},
            *({"num_dominant": count, **pair(found[f"dominant_{count}"])} for count in training.fewer_dominant),
        ],
    }
