"""Run the experiment on contrastive learning of sparse coding data, with and without a random mask (Wen and Li 2021).

Without a mask the two views are equal. They share their noise, which tells one example from another, so the loss
becomes small and the features are bad. Two disjoint halves of an example share no noise. So with a mask the neurons
find the atoms: one or a few each, after their bias has grown. The paper proves that the loss becomes small with a mask,
too (Theorem 3.4). With few atoms it cannot, because many examples have the same code or none. The features of an arm
that has not trained are bad too. So tables give the loss with every metric, and a claim on such an arm is not decided.

Legend: S seeds, A arms, X places on a horizontal axis, M neurons, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from trainer.theory.framework.claim import Measurement, mean_entries
from trainer.theory.framework.experiment import Experiment, Outcome, Tensors, in_blocks, on_cpu, require_finite
from trainer.theory.framework.figures import Curve, Panel, PanelGrid, mean_curve
from trainer.theory.sparse_coding.claims import (
    ArmMetrics,
    measure_arms,
    measure_biases,
    measure_gaps,
    problem_words,
)
from trainer.theory.sparse_coding.model import train
from trainer.theory.sparse_coding.probes import measure, planted_losses
from trainer.theory.sparse_coding.settings import (
    MASK_BIAS,
    NONE_BIAS,
    Problem,
    SparseCodingSettings,
    Study,
    problems,
)

_PROBLEM = ("num_features", "num_pixels", "num_neurons", "num_steps", "feature_probability", "bias_cap", "first_loss",
            "noise_variance")  # fmt: skip


def check_arms(settings: SparseCodingSettings, device: torch.device) -> Outcome:
    """Compare four arms on one problem. Raises `UserError` if a training diverged, as the next two do."""
    (arms,) = train_grid(settings, "arms", device)
    return Outcome(*measure_arms(arms), _arm_figures(arms), {"arms": _table(arms)})


def check_biases(settings: SparseCodingSettings, device: torch.device) -> Outcome:
    """Compare trained biases with and without mask, and supervised training."""
    (arms,) = train_grid(settings, "biases", device)
    return Outcome(measure_biases(arms), tables={"biases": _table(arms)})


def check_grid(study: Study, settings: SparseCodingSettings, device: torch.device) -> Outcome:
    """Compare the arms with growing biases at each problem of a grid."""
    grid = train_grid(settings, study, device)
    tables: dict[str, Any] = {study: [_table(arms) for arms in grid]}
    return Outcome(measure_gaps(grid), {}, _grid_figures(grid, study), tables)


def check_planted(settings: SparseCodingSettings, device: torch.device) -> Outcome:
    """Measure the losses of planted atoms for each number of features."""
    losses, table = [], []
    for problem in problems(settings, "planted"):
        found = on_cpu(planted_losses(problem, seeds=settings.seeds, device=device))
        entries = mean_entries("planted", found["planted"]) | mean_entries("floor", found["floor"])
        losses.append(Measurement(found["planted"], problem_words(problem) | {"floor": entries["floor"]}))
        table.append({"num_features": problem.num_features, "num_pixels": problem.num_pixels} | entries)
    return Outcome({"low loss of planted atoms at {where}": losses}, tables={"planted": table})


def train_grid(settings: SparseCodingSettings, study: Study, device: torch.device) -> list[ArmMetrics]:
    """Return the metrics of every problem of the study, `seeds_at_once` seeds at a time.

    Raises `UserError` if a training diverged.
    """
    grid = []
    for problem in problems(settings, study):

        @torch.no_grad()
        def trained(seeds: Sequence[int], problem: Problem = problem) -> Tensors:
            return measure(train(problem, seeds=seeds, device=device), problem, seeds=seeds)

        metrics = in_blocks(settings.seeds, settings.seeds_at_once, trained)
        require_finite(metrics["loss_log"], "learning_rate", settings.learning_rate)
        grid.append(ArmMetrics(problem, metrics))
    return grid


def _table(arms: ArmMetrics) -> dict[str, Any]:
    """Return the ratios of one problem, and mean and standard deviation of each arm's metrics."""
    single = ["noise_cosine", "signal_cosine", "active", "active_on_noise", "coverage", "atoms_per_neuron",
              "neurons_per_atom", "size_ratio", "other_cosine", "r2", "accuracy", "loss"]  # fmt: skip
    if arms.problem.arms[-1].supervised:
        single.append("resemblance")
    rows: dict[str, Any] = {}
    for arm in arms.problem.arms:
        values = {name: arms.of(arm, name) for name in single}
        values |= {name: arms.of(arm, f"{name}_log")[..., -1] for name in ("share", "cosine", "bias")}
        values["bias_start"] = arms.of(arm, "bias_start")
        rows[arm.name] = {
            name: {"mean": values_S.double().mean().item(), "sd": values_S.double().std().item()}
            for name, values_S in values.items()
        }
        rows[arm.name]["r2_by_labels"] = arms.of(arm, "r2_labels").mean(0).tolist()
        rows[arm.name]["accuracy_by_labels"] = arms.of(arm, "accuracy_labels").mean(0).tolist()
    problem = arms.problem
    return {
        **{name: getattr(problem, name) for name in _PROBLEM},
        "bias_over_noise": arms.problem.bias_over_noise if problem.noise_variance else None,
        "noise_over_signal": arms.problem.noise_over_signal,
        "linear_ceiling": arms.problem.linear_ceiling,
        "label_counts": list(problem.settings.label_counts),
        "raw_r2_by_labels": arms.metrics["raw_r2_labels"][:, 0].mean(0).tolist(),
        "raw_accuracy_by_labels": arms.metrics["raw_accuracy_labels"][:, 0].mean(0).tolist(),
        "arms": rows,
    }


def _arm_figures(arms: ArmMetrics) -> dict[str, PanelGrid]:
    problem, counts = arms.problem, arms.problem.settings.label_counts
    steps = [problem.log_every * (place + 1) for place in range(arms.metrics["loss_log"].shape[-1])]
    start = arms.of(MASK_BIAS, "bias_start").double().mean().item()
    training = [
        Panel(
            title,
            "step",
            title.split(":")[0].lower(),
            [
                mean_curve(steps, arms.of(arm, f"{name}_log"), arm.name if name == "loss" else "", color)
                for color, arm in enumerate(problem.arms)
            ],
            vertical=[start] if start >= 0 else [],
        )
        for name, title in (
            ("loss", "Loss"),
            ("share", "Subspace share: of |w|² in the span of the atoms"),
            ("cosine", "Largest cosine: of a neuron to an atom"),
            ("bias", "Bias: over the neuron's norm"),
        )
    ]
    labels = []
    for name, title in (("r2", "Regression of <w*, z>: R²"), ("accuracy", "Classification: right signs")):
        curves = [
            mean_curve(counts, arms.of(arm, f"{name}_labels"), "" if name == "r2" else arm.name, color, marker="o")
            for color, arm in enumerate(problem.arms)
        ]
        raw_SC = arms.metrics[f"raw_{name}_labels"][:, 0]
        curves.append(mean_curve(counts, raw_SC, "" if name == "r2" else "x itself", 4, marker="s"))
        if name == "r2":
            ceiling = [arms.problem.linear_ceiling] * len(counts)
            curves.append(Curve(counts, ceiling, "best linear function of x", 6, ":"))
        labels.append(Panel(title, "labels", "R²" if name == "r2" else "accuracy", curves, log_x=True))
    return {
        "sparse_training": PanelGrid(training, num_columns=2),
        "sparse_labels": PanelGrid(labels, num_columns=2, panel_size=(4.2, 3.3)),
    }


def _grid_figures(grid: Sequence[ArmMetrics], study: Study) -> dict[str, PanelGrid]:
    label, x = {
        "noise": ("largest bias over noise, κ / σ", [arms.problem.bias_over_noise for arms in grid]),
        "pixels": ("noise over signal, Pσ² / (D E[z²])", [arms.problem.noise_over_signal for arms in grid]),
        "features": ("features, D", [float(arms.problem.num_features) for arms in grid]),
    }[study]
    x = [float(f"{value:.3g}") for value in x]  # rounded, because they are the labels of the axis
    panels = []
    for name, title, y_label in (
        ("r2", "Regression of <w*, z>", "R²"),
        ("loss", "Loss", "loss"),
        ("coverage", "Atoms covered", "share of the atoms"),
    ):
        curves = []
        for color, arm in ((0, MASK_BIAS), (2, NONE_BIAS)):
            scale_X = torch.tensor([arms.problem.num_features if name == "coverage" else 1 for arms in grid])
            values_SX = torch.stack([arms.of(arm, name).double() for arms in grid], dim=1) / scale_X
            curves.append(mean_curve(x, values_SX, arm.name, color, marker="o"))
        if name == "r2":
            curves.append(Curve(x, [arms.problem.linear_ceiling for arms in grid], "best linear function of x", 6, ":"))
        if name == "loss":
            curves.append(Curve(x, [arms.problem.first_loss for arms in grid], "at the start", 6, ":"))
        y_range = (-0.03, 1.05) if name == "coverage" else None
        panels.append(Panel(title, label, y_label, curves, y_range=y_range, log_x=study == "pixels"))
    return {f"sparse_{study}": PanelGrid(panels)}


EXPERIMENT = Experiment(
    defaults=SparseCodingSettings(),
    studies={
        "arms": check_arms,
        "biases": check_biases,
        "planted": check_planted,
        **{study: partial(check_grid, study) for study in ("noise", "pixels", "features")},
    },
)
