"""Run the experiment on generalisation of contrastive learning (Huang et al. 2023).

It has two studies. "encoders" trains small encoders by every loss, and measures the divergence of class centres and its
bounds. "bound" computes the error bound in a model in which all terms are known.

Shapes: S seeds, O objectives, M = S O encoders, Q shares of outliers, G gains, T strengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from pydantic import Field
from torch import Tensor

from data_pipeline.core.schema import Count, LearningRate
from trainer.theory.framework.claim import mean_entries
from trainer.theory.framework.experiment import (
    Experiment,
    Outcome,
    Tensors,
    TheorySettings,
    in_blocks,
    on_cpu,
    require_finite,
)
from trainer.theory.framework.figures import Curve, Map, Panel, PanelGrid
from trainer.theory.generalization import claims, divergence
from trainer.theory.generalization.bound import BoundSettings, measure_cells
from trainer.theory.generalization.encoders import (
    MEASURED,
    TEST,
    EncoderSettings,
    ObjectiveSettings,
    draw_population,
    train,
)

Study = Literal["encoders", "bound"]


class GeneralizationSettings(TheorySettings):
    """Settings of the experiment."""

    seeds_at_once: Count = 5
    studies: tuple[Study, ...] = Field(default=get_args(Study), min_length=1)
    encoders: EncoderSettings = EncoderSettings()
    bound: BoundSettings = BoundSettings()
    classifier_steps: Count = 200
    classifier_learning_rate: LearningRate = 0.1


def check_encoders(settings: GeneralizationSettings, device: torch.device) -> Outcome:
    """Train small encoders by every loss. Raises `UserError` if a training diverged."""
    measured = in_blocks(
        settings.seeds, settings.seeds_at_once, lambda seeds: _train_and_measure(settings, seeds, device)
    )
    objectives = settings.encoders.objectives
    require_finite(measured["loss"], "encoders.learning_rate", settings.encoders.learning_rate)
    measured = {**measured, "trained": training_progress(settings, measured["loss"])[..., -1]}
    judged = {
        **claims.measure_collapse(objectives, measured),
        **claims.measure_theorems(objectives, measured),
        **claims.measure_classifiers(objectives, measured),
    }
    return Outcome(judged, tables={"encoders": _encoder_table(objectives, measured)})


def check_bound(settings: GeneralizationSettings, device: torch.device) -> Outcome:
    """Compute the error bound in a model in which all terms are known."""
    bound = settings.bound
    cells = on_cpu(measure_cells(bound, seeds=settings.seeds, device=device))
    panels = PanelGrid(_bound_panels(bound, cells), num_columns=2, panel_size=(4.6, 3.2))
    measured, words = claims.measure_bound(cells, bound)
    return Outcome(measured, words, {"generalization_bound": panels})


def _train_and_measure(settings: GeneralizationSettings, seeds: Sequence[int], device: torch.device) -> Tensors:
    """Train the encoders and return their measures, (S, O, ...)."""
    config = settings.encoders
    encoders, loss_SOL = train(config, seeds=seeds, device=device)
    seeds_S = torch.tensor(seeds, device=device)

    def embedded(which: int) -> Tensor:
        x_SKNAI = draw_population(config, seeds_S, which=which)
        z_SOPD = encoders.embed(x_SKNAI.flatten(1, 3))
        return z_SOPD.reshape(-1, *x_SKNAI.shape[1:4], config.embedding_dim)

    z_MKNAD, test_MKNAD = embedded(MEASURED), embedded(TEST)
    population = divergence.population_of(z_MKNAD)
    theorem_4_M, theorem_4_sharpened_M = divergence.theorem_4_bounds(population)
    by_encoder = {
        "rank": population.rank_M,
        "closest": divergence.closest_centres(population.centre_MKD),
        "alignment": population.alignment_MK.mean(1),
        "mean_norm": population.centre_MKD.mean(1).norm(dim=-1),
        "theorem_3": divergence.theorem_3_bound(population),
        "theorem_3_sharpened": divergence.theorem_3_sharpened(population),
        "theorem_4": theorem_4_M,
        "theorem_4_sharpened": theorem_4_sharpened_M,
    }
    by_encoder |= divergence.classify(
        z_MKNAD.flatten(2, 3),
        test_MKNAD.flatten(2, 3),
        num_steps=settings.classifier_steps,
        learning_rate=settings.classifier_learning_rate,
    )
    shape = (len(seeds), len(config.objectives))
    return {name: values_M.view(shape) for name, values_M in by_encoder.items()} | {"loss": loss_SOL}


def loss_floor(objective: ObjectiveSettings, batch_size: int) -> float:
    """Return a lower bound of the loss, for any encoder: positives coincide, and negatives have the least mean product.

    The mean product of two different vectors among B unit vectors is at least -1 / (B - 1), because the square of their
    sum is not negative. The log of a sum of exponentials is convex.
    """
    B, t = batch_size, objective.temperature
    least = -1 / (B - 1)
    if objective.loss == "linear":
        return -1 + objective.divergence_weight * least
    if objective.loss == "split":
        return objective.divergence_weight * (math.log(B - 1) + least / t)
    if objective.loss == "info_nce":  # if positives coincide, an anchor's 2 B - 2 products sum to at least -2
        return math.log(1 + (2 * B - 2) * math.exp((least - 1) / t))
    return 0.0


def training_progress(settings: GeneralizationSettings, loss_SOL: Tensor) -> Tensor:
    """Return the share of the way from the first loss to its `loss_floor`, at every logged loss, (S, O, L)."""
    encoders = settings.encoders
    floor_O1 = torch.tensor([[loss_floor(one, encoders.batch_size)] for one in encoders.objectives])
    return (loss_SOL[..., :1] - loss_SOL) / (loss_SOL[..., :1] - floor_O1)


def _encoder_table(objectives: Sequence[ObjectiveSettings], measured: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return a row for each loss: means over seeds, and 95 % t-intervals."""
    quantities = [name for name in measured if name not in ("loss", "disagreements")]
    rows = []
    for at, objective in enumerate(objectives):
        row: dict[str, Any] = {"loss": objective.name}
        for quantity in quantities:
            row |= mean_entries(quantity, measured[quantity][:, at])
        loss_SL = measured["loss"][:, at]
        rows.append(row | {"first_loss": loss_SL[:, 0].mean().item(), "last_loss": loss_SL[:, -1].mean().item()})
    return rows


def _bound_panels(bound: BoundSettings, cells: Tensors) -> list[Panel | Map]:
    """Return error and bound against strength, for a small and for the greatest gain, and maps of the condition."""
    q, small = len(bound.outlier_shares) // 2, min(1, len(bound.gains) - 1)
    shares, strengths, gains = bound.outlier_shares, bound.strengths, bound.gains
    shown = [t for t, strength in enumerate(strengths) if strength > 0]

    def against_strength(g: int) -> Panel:
        x = [strengths[t] for t in shown]
        error_T, bound_T, free_T, sigma_T = (
            cells[name][:, q, g].double().mean(0)[shown] for name in ("error", "bound", "unconditional", "sigma_at_0")
        )
        return Panel(
            f"Gain {gains[g]:g}, {100 * shares[q]:g} % outliers",
            "strength of the augmentation",
            "share of the samples",
            [
                Curve(x, sigma_T, "sigma at delta = 0", 2, "--"),
                Curve(x, bound_T, "bound (1: condition not met)", 0),
                Curve(x, free_T, "bound, condition ignored", 5, ":"),
                Curve(x, error_T, "error", 1, "", "o"),
            ],
            y_range=(-0.03, 1.05),
            log_x=True,
        )

    met_QGT = cells["met"].double().mean(0)
    by_gain = f"Share of seeds that meet it, {100 * shares[q]:g} % outliers"
    by_share = f"Share of seeds that meet it, gain {gains[small]:g}"
    return [
        against_strength(small),
        against_strength(len(gains) - 1),
        Map(by_gain, "strength", "gain", strengths, gains, met_QGT[q], centred=False),
        Map(by_share, "strength", "share of outliers", strengths, shares, met_QGT[:, small], centred=False),
    ]


EXPERIMENT = Experiment(
    defaults=GeneralizationSettings(),
    studies={"encoders": check_encoders, "bound": check_bound},
)
