"""Run the experiment on feature suppression in the linear model of Tamkin et al. 2022: parts and conclusions.

Shapes: S seeds, A arms, K features, T steps, P and Q states of two features, C correlations of the other feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.theory.framework.claim import Measurements, exact_interval, judge_rows, mean_entries
from trainer.theory.framework.experiment import Experiment, Outcome, Part, Tensors
from trainer.theory.framework.figures import draw
from trainer.theory.linear_contrastive import claims, figures, model
from trainer.theory.linear_contrastive.model import feature_states
from trainer.theory.linear_contrastive.settings import (
    STUDIES,
    ErrorSettings,
    GradientSettings,
    LinearContrastiveSettings,
    Study,
    TheoremSettings,
    TrainingSettings,
)


def parts(settings: LinearContrastiveSettings) -> Mapping[str, Part]:
    """Return the parts of the chosen studies."""
    seeds = settings.seeds
    by_study: dict[Study, Mapping[str, Part]] = {
        "gradient": {"gradient": partial(_gradient, settings.gradient, seeds)},
        "theorem": {
            "theorem_point": partial(_theorem_point, settings.theorem, seeds),
            "theorem_grid": partial(_theorem_grid, settings.theorem, seeds),
        },
        "training": _training_parts(settings.training, seeds),
        "error": {"downstream_error": partial(_downstream_error, settings.error, seeds)},
    }
    return {name: part for study in STUDIES if study in settings.studies for name, part in by_study[study].items()}


def _gradient(check: GradientSettings, seeds: Sequence[int], device: torch.device) -> Tensors:
    sizes = {"num_pairs": check.num_pairs, "num_features": check.num_features, "dim": check.dim}
    return {"error_S": model.gradient_error(seeds=seeds, device=device, **sizes)}


def _downstream_error(error: ErrorSettings, seeds: Sequence[int], device: torch.device) -> Tensors:
    angles, num = error.angles_degrees, error.num_samples_a_seed
    return {"error_SP": model.downstream_error(angles, seeds=seeds, num_samples=num, device=device)}


@dataclass(frozen=True)
class NoiseArm:
    """One training: correlation of the weak feature, beta of the noise (1 is no noise), number of noised features."""

    weak_correlation: float
    beta: float
    num_noised: int


def _training_parts(training: TrainingSettings, seeds: Sequence[int]) -> Mapping[str, Part]:
    """Return the parts of the trainings, for the claims and for each sweep. A part trains its arms side by side."""
    weak, beta, num = training.weak_correlation, training.noise_beta, training.num_dominant
    by_weak = [NoiseArm(value, each, num) for each in (1.0, beta) for value in training.weak_correlations]
    by_noise = [NoiseArm(weak, each, num) for each in training.betas]
    by_noise += [NoiseArm(weak, beta, count) for count in training.fewer_noised]
    changed = {f"dominant_{num}": training.model_copy(update={"num_dominant": num}) for num in training.fewer_dominant}
    changed |= {f"vary_{one.name}": training.varied(one) for one in training.variations}
    trained = {"weak_correlation": (training, by_weak), "noise": (training, by_noise)}
    for name, other in changed.items():
        trained[name] = (other, [NoiseArm(weak, each, other.num_dominant) for each in (1.0, beta)])
    return {name: partial(_train, one, seeds, arms) for name, (one, arms) in trained.items()}


def _train(training: TrainingSettings, seeds: Sequence[int], arms: Sequence[NoiseArm], device: torch.device) -> Tensors:
    """Return what `train_arms` returns for these arms."""
    alpha_AK = torch.full((len(arms), 1 + training.num_dominant), training.dominant_correlation, dtype=torch.float64)
    beta_AK = torch.ones_like(alpha_AK)
    for alpha_K, beta_K, arm in zip(alpha_AK, beta_AK, arms, strict=True):
        alpha_K[0] = arm.weak_correlation
        beta_K[1 : 1 + arm.num_noised] = arm.beta
    return model.train_arms(training, alpha_AK, beta_AK, seeds=seeds, device=device)


def _theorem_point(theorem: TheoremSettings, seeds: Sequence[int], device: torch.device) -> Tensors:
    """Return means for each seed, (S, 2, C): first with the other feature as set, then with it at 90 degrees.

    At 90 degrees the other feature is not learned at all.
    """
    correlations = theorem.point_other_correlations
    weak_P3 = feature_states(
        [theorem.point_weak_angle_degrees], [theorem.point_weak_norm], [theorem.point_weak_correlation]
    )
    other_Q3 = feature_states([theorem.point_other_angle_degrees, 90], [theorem.point_other_norm], correlations)
    grids = [_grid_of_a_seed(theorem, weak_P3, other_Q3, len(correlations), seed, device) for seed in seeds]
    return {
        f"{name}_S2C": torch.stack([grid[f"{name}_PQ"].view(2, -1) for grid in grids])
        for name in ("speed", "p_positive")
    }


def _theorem_grid(theorem: TheoremSettings, seeds: Sequence[int], device: torch.device) -> Tensors:
    """Return means over all batches of all seeds, (P, Q)."""
    correlations = theorem.other_correlations
    weak_P3 = feature_states(theorem.weak_angles_degrees, theorem.weak_norms, theorem.weak_correlations)
    other_Q3 = feature_states(theorem.other_angles_degrees, theorem.other_norms, correlations)
    grids = [_grid_of_a_seed(theorem, weak_P3, other_Q3, len(correlations), seed, device) for seed in seeds]
    return {name: torch.stack([grid[name] for grid in grids]).mean(0) for name in grids[0]}


def _grid_of_a_seed(
    theorem: TheoremSettings,
    weak_P3: Tensor,
    other_Q3: Tensor,
    num_correlations: int,
    seed: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return `speed_grid`, with gains relative to the last correlation of the other feature."""
    rest_13 = feature_states([theorem.rest_angle_degrees], [theorem.rest_norm], [theorem.rest_correlation])
    return model.speed_grid(
        weak_P3,
        other_Q3,
        rest_13.repeat(theorem.num_rest, 1),
        reference_Q=torch.arange(len(other_Q3)) // num_correlations * num_correlations + num_correlations - 1,
        seed=seed,
        num_batches=theorem.num_batches_a_seed,
        num_pairs=theorem.num_pairs,
        device=device,
    )


def conclude(settings: LinearContrastiveSettings, found: Mapping[str, Tensors]) -> Outcome:
    theorem, training, error = settings.theorem, settings.training, settings.error
    measured: Measurements = {}
    pictures: dict[str, bytes] = {}
    tables: dict[str, Any] = {}
    if "gradient" in settings.studies:
        error_S = found["gradient"]["error_S"]
        measured = {"gradient": exact_interval(error_S.max().item(), kind=f"largest of {len(error_S)} seeds")}
    if "theorem" in settings.studies:
        num_batches = theorem.num_batches_a_seed * settings.num_seeds
        at_point, tables["theorem_point"] = claims.measure_point(theorem, found["theorem_point"])
        over_grid, tables["theorem_grid"] = claims.measure_grid(theorem, found["theorem_grid"], num=num_batches)
        measured = {**measured, **at_point, "theorem over the grid": over_grid}
        panels = figures.theorem_panels(theorem, found)
        pictures["linear_contrastive_theorem"] = draw(panels, num_columns=2, panel_size=(4.6, 3.2))
    if "training" in settings.studies:
        measured = {**measured, **claims.measure_training(training, found)}
        pictures["linear_contrastive_training"] = draw(figures.training_panels(training, found))
        pictures["linear_contrastive_sweeps"] = draw(figures.sweep_panels(training, found))
        tables["training"] = _training_tables(training, found)
    if "error" in settings.studies:
        error_SP = found["downstream_error"]["error_SP"]
        measured = {**measured, "error is the angle": claims.measure_error(error, error_SP)}
        panel = figures.error_panel(error, error_SP)
        pictures["linear_contrastive_error"] = draw([panel], num_columns=1, panel_size=(4.6, 3.2))
    results = judge_rows(
        claims.CLAIMS,
        measured,
        gradient_tolerance=settings.gradient.relative_tolerance,
        error_tolerance=error.tolerance,
        least_error=-error.tolerance,
        cost_at_most_degrees=training.cost_at_most_degrees,
        p_drop_at_least=training.p_drop_at_least,
        num_dominant=training.num_dominant,
    )
    return Outcome(results, pictures, tables)


def _training_tables(training: TrainingSettings, found: Mapping[str, Tensors]) -> dict[str, Any]:
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

    by_weak, base, betas = found["weak_correlation"], training.two_of(found["noise"]), training.betas
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


EXPERIMENT = Experiment(defaults=LinearContrastiveSettings(), parts=parts, conclude=conclude)
