"""Make the panels of the linear model: gains of Theorem 4.1, trainings by step and by setting, and errors.

Shapes: S seeds, A arms, T steps, P and Q states of two features, C correlations of the other feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.theory.framework.experiment import Tensors
from trainer.theory.framework.figures import Curve, Map, Panel, mean_curve
from trainer.theory.linear_contrastive.settings import ErrorSettings, TheoremSettings, TrainingSettings


def theorem_panels(theorem: TheoremSettings, point: Tensors, grid: Tensors) -> list[Panel | Map]:
    """Return the gain at the point, and maps of the gain over two settings of the grid each.

    The other feature's correlation is lowered from its greatest value: to its least, in the maps of angles and norms.
    The settings that a map does not show have their middle value.
    """
    speed = grid["speed_PQ"].view(theorem.grid_shape)
    gain = 100 * (speed[..., 0] / speed[..., -1] - 1)
    middle = [size // 2 for size in gain.shape]
    speed_SC = point["speed_S2C"][:, 0]

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
            [mean_curve(theorem.point_other_correlations, 100 * (speed_SC / speed_SC[:, -1:] - 1), marker="o")],
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


def training_panels(training: TrainingSettings, found: Mapping[str, Tensors]) -> list[Panel]:
    """Return two rows of panels: for the first of `weak_correlations`, and for `weak_correlation`.

    The panels of a row are the weak feature, a dominant feature, and the mean p_ii.
    """
    num, panels = len(training.weak_correlations), []
    kinds = [("angle (degrees)", "weak_AST"), ("angle (degrees)", "second_AST"), ("mean p_ii", "p_positive_AST")]
    by_weak, base = found["weak_correlation"], training.two_of(found["noise"])
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
                values_ST = history[name][arm]
                curves.append(mean_curve(range(values_ST.shape[1]), values_ST, label, color))
            bottom = (0, None) if name != "p_positive_AST" else (0, 1.02)
            panels.append(Panel(title, "step", y_label, curves, (training.noise_from_step,), bottom))
    return panels


def sweep_panels(training: TrainingSettings, found: Mapping[str, Tensors]) -> list[Panel]:
    """Return panels of the angle after the last step against the correlation, the number of features and the noise."""
    num, by_weak, by_beta = len(training.weak_correlations), found["weak_correlation"], found["noise"]
    base, betas = training.two_of(by_beta), training.betas
    counts = sorted({training.num_dominant, *training.fewer_dominant})
    by_count = [base if n == training.num_dominant else found[f"dominant_{n}"] for n in counts]

    def last(history: Tensors, name: str) -> Tensor:
        return history[name][:, :, -1]

    def panel(title: str, x_label: str, x: Sequence[float], lines: Mapping[str, Tensor], color: int = 0) -> Panel:
        curves = [
            mean_curve(x, last_PS.T, label, at, marker="o") for at, (label, last_PS) in enumerate(lines.items(), color)
        ]
        return Panel(
            title, x_label, "angle after the last step (degrees)", curves, y_range=(0, None), log_x=x is counts
        )

    noise = f"noise, beta {training.noise_beta:g}"
    weak_AS = last(by_weak, "weak_AST")
    weak_counts = torch.stack([last(history, "weak_AST") for history in by_count])
    weak, dominant = (last(by_beta, name)[: len(betas)] for name in ("weak_AST", "dominant_AST"))
    return [
        panel(
            "Weak feature against its correlation",
            "correlation of the weak feature",
            training.weak_correlations,
            {"no noise": weak_AS[:num], noise: weak_AS[num:]},
        ),
        panel(
            "Weak feature against the number of others",
            "number of dominant features",
            counts,
            {"no noise": weak_counts[:, 0], noise: weak_counts[:, 1]},
        ),
        panel(
            "Both against the noise",
            "beta (1: no noise; 0: all noise)",
            betas,
            {"weak feature": weak, "dominant, mean": dominant},
            color=2,
        ),
    ]


def error_panel(error: ErrorSettings, error_SP: Tensor) -> Panel:
    """Return the counted errors and the line of Lemma E.1 in one panel."""
    measured = mean_curve(error.angles_degrees, error_SP, "counted", 1, style="", marker="o")
    line = Curve((0, 90), (0, 0.5), "angle / pi")
    return Panel("Test error of a feature against its angle", "angle (degrees)", "test error", [line, measured])
