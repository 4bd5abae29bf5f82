"""Run the experiment on feature suppression in the linear model of Tamkin et al. 2022, study by study.

Shapes: S seeds, A arms, K features, T steps, P and Q states of two features, C correlations of the other feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from trainer.theory.framework.claim import Measurement
from trainer.theory.framework.experiment import Experiment, Outcome, Tensors, in_blocks, on_cpu
from trainer.theory.framework.figures import PanelGrid
from trainer.theory.linear_contrastive import claims, figures, model
from trainer.theory.linear_contrastive.model import feature_states
from trainer.theory.linear_contrastive.settings import (
    LinearContrastiveSettings,
    TheoremSettings,
    TrainingSettings,
)

# The feature beside the weak and the other one: its angle in degrees, norm and correlation.
_REST = [45], [0.6], [0.7]


def check_theorem(settings: LinearContrastiveSettings, device: torch.device) -> Outcome:
    """Measure the gains in speed of Theorem 4.1, at a point and over a grid."""
    theorem, num_batches = settings.theorem, settings.theorem.num_batches_a_seed * settings.num_seeds
    point = on_cpu(theorem_point(theorem, settings.seeds, device))
    grid = on_cpu(theorem_grid(theorem, settings.seeds, device))
    at_point, point_table = claims.measure_point(theorem, point)
    over_grid, grid_table = claims.measure_grid(theorem, grid, num=num_batches)
    panels = PanelGrid(figures.theorem_panels(theorem, point, grid), num_columns=2, panel_size=(4.6, 3.2))
    return Outcome(
        {**at_point, "theorem over the grid": Measurement(over_grid)},
        figures={"linear_contrastive_theorem": panels},
        tables={"theorem_point": point_table, "theorem_grid": grid_table},
    )


def theorem_point(theorem: TheoremSettings, seeds: Sequence[int], device: torch.device) -> Tensors:
    """Return means for each seed, (S, 2, C): first with the other feature as set, then with it at 90 degrees.

    At 90 degrees the other feature is not learned at all.
    """
    weak_P3 = feature_states(
        [theorem.point_weak_angle_degrees], [theorem.point_weak_norm], [theorem.point_weak_correlation]
    )
    other = [theorem.point_other_angle_degrees, 90], [theorem.point_other_norm], theorem.point_other_correlations
    grids = [_grid_of_a_seed(theorem, weak_P3, *other, seed, device) for seed in seeds]
    return {
        f"{name}_S2C": torch.stack([grid[f"{name}_PQ"].view(2, -1) for grid in grids])
        for name in ("speed", "p_positive")
    }


def theorem_grid(theorem: TheoremSettings, seeds: Sequence[int], device: torch.device) -> Tensors:
    """Return means over all batches of all seeds, (P, Q)."""
    weak_P3 = feature_states(theorem.weak_angles_degrees, theorem.weak_norms, theorem.weak_correlations)
    other = theorem.other_angles_degrees, theorem.other_norms, theorem.other_correlations
    grids = [_grid_of_a_seed(theorem, weak_P3, *other, seed, device) for seed in seeds]
    return {name: torch.stack([grid[name] for grid in grids]).mean(0) for name in grids[0]}


def _grid_of_a_seed(
    theorem: TheoremSettings,
    weak_P3: Tensor,
    angles: Sequence[float],
    norms: Sequence[float],
    correlations: Sequence[float],
    seed: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return `speed_grid`, with gains relative to the last correlation of the other feature."""
    other_Q3, num = feature_states(angles, norms, correlations), len(correlations)
    return model.speed_grid(
        weak_P3,
        other_Q3,
        feature_states(*_REST),
        reference_Q=torch.arange(len(other_Q3)) // num * num + num - 1,
        seed=seed,
        num_batches=theorem.num_batches_a_seed,
        num_pairs=theorem.num_pairs,
        device=device,
    )


# One training: the correlation of the weak feature, and the beta of the noise on the others (1 is no noise).
Arm: TypeAlias = tuple[float, float]


def check_training(settings: LinearContrastiveSettings, device: torch.device) -> Outcome:
    """Train the arms for the claims and for each sweep."""
    training = settings.training
    found = {
        name: in_blocks(settings.seeds, settings.seeds_at_once, partial(_train, varied, arms, device), dim=1)
        for name, (varied, arms) in _arms(training).items()
    }
    panels = {"linear_contrastive_training": PanelGrid(figures.training_panels(training, found))}
    tables = {"training": claims.training_tables(training, found)}
    words = {"num_dominant": training.num_dominant}
    return Outcome(claims.measure_training(training, found), words, panels, tables)


def _arms(training: TrainingSettings) -> dict[str, tuple[TrainingSettings, Sequence[Arm]]]:
    """Return the trainings by name, for the claims and for each sweep. The arms of one are trained side by side."""
    weak, pair = training.weak_correlation, (1.0, training.noise_beta)
    by_weak = [(value, beta) for beta in pair for value in training.weak_correlations]
    by_noise = [(weak, beta) for beta in training.betas]
    pairs = {
        f"dominant_{num}": (training.model_copy(update={"num_dominant": num}), [(weak, beta) for beta in pair])
        for num in training.fewer_dominant
    }
    return {"weak_correlation": (training, by_weak), "noise": (training, by_noise), **pairs}


def _train(training: TrainingSettings, arms: Sequence[Arm], device: torch.device, seeds: Sequence[int]) -> Tensors:
    """Return what `train_arms` returns for these arms."""
    alpha_AK = torch.full((len(arms), 1 + training.num_dominant), training.dominant_correlation, dtype=torch.float64)
    beta_AK = torch.ones_like(alpha_AK)
    for alpha_K, beta_K, (weak, beta) in zip(alpha_AK, beta_AK, arms, strict=True):
        alpha_K[0], beta_K[1:] = weak, beta
    return model.train_arms(training, alpha_AK, beta_AK, seeds=seeds, device=device)


def check_error(settings: LinearContrastiveSettings, device: torch.device) -> Outcome:
    """Compare the test error of a direction with its angle."""
    error = settings.error
    error_SP = model.downstream_error(
        error.angles_degrees, seeds=settings.seeds, num_samples=error.num_samples_a_seed, device=device
    ).cpu()
    return Outcome({"error is the angle": Measurement(claims.measure_error(error, error_SP))})


EXPERIMENT = Experiment(
    defaults=LinearContrastiveSettings(),
    studies={"theorem": check_theorem, "training": check_training, "error": check_error},
)
