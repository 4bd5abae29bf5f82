"""Make the panels of the linear model: gains of Theorem 4.1, and trainings by step.

Shapes: S seeds, A arms, T steps, P and Q states of two features, C correlations of the other feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainer.theory.framework.experiment import Tensors
from trainer.theory.framework.figures import Map, Panel, mean_curve
from trainer.theory.linear_contrastive.settings import TheoremSettings, TrainingSettings


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
