"""Measure the claims in claims.yaml, of Wen and Li (2021) on sparse coding.

Legend: S seeds, A arms, L logged steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trainer.theory.framework.claim import Measurement
from trainer.theory.sparse_coding.settings import (
    MASK_BIAS,
    MASK_LINEAR,
    MASK_TRAINED,
    NONE_BIAS,
    NONE_LINEAR,
    NONE_TRAINED,
    SUPERVISED,
    LearnerKind,
    Problem,
)

_LEAST_FALL = 0.03  # share of its first value; an arm whose loss fell by less has not trained
_LATE_FALL = 0.2  # share of the fall; an arm with more in the last quarter of the steps still trains
_REACHED = 0.9  # share of the rise of a curve, from its first value to its highest


@dataclass(frozen=True)
class ArmMetrics:
    """The metrics of all arms of one problem, (S, A, ...).

    A metric whose name ends in `_log` has a value for each logged step. The others are of the trained arms.
    """

    problem: Problem
    metrics: Mapping[str, Tensor]

    def of(self, arm: LearnerKind, name: str) -> Tensor:
        """Return a metric of one arm, (S, ...).

        "r2" and "accuracy" are the values with the most labels, and "loss" is the last logged loss.
        """
        values = self.metrics[{"r2": "r2_labels", "accuracy": "accuracy_labels", "loss": "loss_log"}.get(name, name)]
        values = values[:, self.problem.arms.index(arm)]
        return values[..., -1] if name in {"r2", "accuracy", "loss"} else values

    def untrained(self, arms: Sequence[LearnerKind]) -> str:
        """Return a text that names the arms of which a seed has not trained or still trains; "" if there are none."""
        told = []
        for arm in arms:
            start = self.problem.first_loss_of(arm)
            loss_SL = self.of(arm, "loss_log")
            fall_S = start - loss_SL[:, -1]
            late_S = loss_SL[:, loss_SL.shape[1] * 3 // 4 - 1] - loss_SL[:, -1]
            if (fall_S < _LEAST_FALL * start).any():
                told.append(f'"{arm.name}" has not trained (loss {loss_SL[:, -1].max():.2f}, at first {start:.2f})')
            elif (late_S > _LATE_FALL * fall_S).any():
                late = (late_S / fall_S).max()
                told.append(f'"{arm.name}" still trains ({late:.0%} of the fall of its loss in the last quarter)')
        return "; ".join(told)


def steps_to_reach(log_SL: Tensor, *, every: int) -> Tensor:
    """Return the first logged step at which each curve has made nine tenths of its rise, (S,).

    The rise is from the first value of a curve to its highest.
    """
    first_S1, highest_S1 = log_SL[:, :1], log_SL.amax(1, keepdim=True)
    reached_SL = log_SL >= first_S1 + _REACHED * (highest_S1 - first_S1)
    return (reached_SL.int().argmax(1) + 1) * every


def measure_arms(arms: ArmMetrics) -> tuple[dict[str, Measurement], dict[str, object]]:
    """Return the measurements of the arms of one problem, and words for their claims.

    A claim on an arm that has not trained is not decided.
    """
    of, problem, D = arms.of, arms.problem, arms.problem.num_features
    label_counts = problem.settings.label_counts
    few = next((place for place, count in enumerate(label_counts) if count >= 8 * D), -1)
    cosine_steps_S, share_steps_S = (
        steps_to_reach(of(MASK_BIAS, name), every=problem.log_every) for name in ("cosine_log", "share_log")
    )
    raw_few_S = arms.metrics["raw_r2_labels"][:, 0, few]
    found: dict[str, tuple[Tensor, Sequence[LearnerKind]]] = {
        "low loss without mask": (of(NONE_BIAS, "loss") / problem.first_loss, [NONE_BIAS]),
        "noise decides without mask": (of(NONE_LINEAR, "noise_cosine"), [NONE_LINEAR]),
        "bad regression without mask": (of(NONE_BIAS, "r2") - problem.linear_ceiling, [NONE_BIAS]),
        "bad classification without mask": (of(NONE_LINEAR, "accuracy"), [NONE_LINEAR]),
        "atoms missed without mask": (of(NONE_BIAS, "coverage") / D, [NONE_BIAS]),
        "the mask makes the loss higher": (of(MASK_BIAS, "loss") - of(NONE_BIAS, "loss"), [MASK_BIAS, NONE_BIAS]),
        "the lower loss has the worse features": (of(MASK_BIAS, "r2") - of(NONE_BIAS, "r2"), [MASK_BIAS, NONE_BIAS]),
        "low loss with mask": (of(MASK_BIAS, "loss") / problem.first_loss, [MASK_BIAS]),
        "signal decides with mask": (of(MASK_BIAS, "signal_cosine"), [MASK_BIAS]),
        "good regression with mask": (of(MASK_BIAS, "r2") - problem.linear_ceiling, [MASK_BIAS]),
        "few labels are enough with mask": (of(MASK_BIAS, "r2_labels")[:, few] - raw_few_S, [MASK_BIAS]),
        "every atom is covered with mask": (of(MASK_BIAS, "coverage"), [MASK_BIAS]),
        "a neuron has few atoms": (of(MASK_BIAS, "atoms_per_neuron"), [MASK_BIAS]),
        "an atom has few neurons": (of(MASK_BIAS, "neurons_per_atom") * D / problem.num_neurons, [MASK_BIAS]),
        "features have one size": (of(MASK_BIAS, "size_ratio"), [MASK_BIAS]),
        "other atoms are weak": (of(MASK_BIAS, "other_cosine") * D**0.5, [MASK_BIAS]),
        "noise fires nothing with mask": (of(MASK_BIAS, "active_on_noise"), [MASK_BIAS]),
        "single atoms need the bias": (
            of(MASK_BIAS, "cosine_log")[:, -1] - of(MASK_LINEAR, "cosine_log")[:, -1],
            [MASK_BIAS, MASK_LINEAR],
        ),
        "the subspace comes first": (cosine_steps_S - share_steps_S, [MASK_BIAS]),
    }
    words = {
        "most": label_counts[-1],
        "few": label_counts[few],
        "raw": raw_few_S.mean(),
        "ceiling": problem.linear_ceiling,
        "mask_loss": of(MASK_BIAS, "loss").mean(),
        "none_loss": of(NONE_BIAS, "loss").mean(),
        "bias_over_noise": problem.bias_over_noise,
        "num_features": D,
        "num_pixels": problem.num_pixels,
        "log_every": problem.log_every,
    }
    return {name: _unless_untrained(values_S, arms, kinds) for name, (values_S, kinds) in found.items()}, words


def measure_biases(arms: ArmMetrics) -> dict[str, Measurement]:
    """Return the measurements of trained biases, and of the likeness of contrastive and supervised neurons."""

    def last(arm: LearnerKind, name: str) -> Tensor:
        return arms.of(arm, f"{name}_log")[:, -1]

    start = arms.problem.settings.trained_bias_start
    resemblance_S = arms.of(MASK_TRAINED, "resemblance") - arms.of(NONE_TRAINED, "resemblance")
    single_S = last(MASK_TRAINED, "cosine") - last(MASK_LINEAR, "cosine")
    found: dict[str, tuple[Tensor, Sequence[LearnerKind]]] = {
        "trained biases rise with mask": (last(MASK_TRAINED, "bias") - start, [MASK_TRAINED]),
        "trained biases fall without mask": (last(NONE_TRAINED, "bias") - start, [NONE_TRAINED]),
        "trained biases find single atoms": (single_S, [MASK_TRAINED, MASK_LINEAR]),
        "neurons resemble supervised ones": (resemblance_S, [MASK_TRAINED, NONE_TRAINED, SUPERVISED]),
    }
    return {name: _unless_untrained(values_S, arms, kinds) for name, (values_S, kinds) in found.items()}


def measure_gaps(grid: Sequence[ArmMetrics]) -> dict[str, Sequence[Measurement]]:
    """Return how much better features are with the mask, and the loss with the mask, for each problem."""
    gaps, losses = [], []
    for arms in grid:
        words = problem_words(arms.problem) | {
            "losses": " and ".join(f"{arms.of(arm, 'loss').mean():.2f}" for arm in arms.problem.arms)
        }
        gap_S = arms.of(MASK_BIAS, "r2") - arms.of(NONE_BIAS, "r2")
        gaps.append(_unless_untrained(gap_S, arms, arms.problem.arms, words))
        loss_S = arms.of(MASK_BIAS, "loss") / arms.problem.first_loss
        losses.append(_unless_untrained(loss_S, arms, [MASK_BIAS], words))
    return {"the mask helps at {where}": gaps, "low loss at {where}": losses}


def problem_words(problem: Problem) -> dict[str, object]:
    """Return the words of the claims that are made at each problem of a grid."""
    return {
        "where": f"D={problem.num_features}, P={problem.num_pixels}, sigma^2={problem.noise_variance:.4g}",
        "bias_over_noise": problem.bias_over_noise,
        "noise_over_signal": problem.noise_over_signal,
    }


def _unless_untrained(
    values_S: Tensor, arms: ArmMetrics, needed: Sequence[LearnerKind], words: Mapping[str, object] | None = None
) -> Measurement:
    """Return a measurement that decides nothing if a needed arm has not trained.

    The features of such an arm look as if it could not learn.
    """
    told = arms.untrained(needed)
    return Measurement(values_S, words or {}, undecided=f"; {told}" if told else "")
