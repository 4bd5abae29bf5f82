"""The claims of Wen and Li (2021) on sparse coding, judged from trained arms.

Where the paper has an order of growth (a power of D, a little o) the threshold is ours, and part of the statement.

Legend: S seeds, A arms, L logged steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trainer.theory.framework.claim import Claim, ClaimResult, judge, t_interval
from trainer.theory.framework.experiment import Tensors
from trainer.theory.sparse_coding.settings import (
    MASK_BIAS,
    MASK_LINEAR,
    NONE_BIAS,
    NONE_LINEAR,
    Arm,
    Problem,
    SparseCodingSettings,
)

_PAPER = "Wen and Li 2021"
_DECOUPLING = f"{_PAPER}, feature decoupling"
_WITHOUT, _WITH, _STAGES = (f"{_PAPER}, {what}" for what in ("without augmentation", "with augmentation", "stages"))
_GROWTH_TOLERANCE = 0.02
_REACHED = 0.9  # of its way from the start to its highest value


@dataclass(frozen=True)
class Arms:
    """All seeds of one problem at one noise level; metrics (S, A, ...), final unless their name ends in _log."""

    problem: Problem
    noise_variance: float
    metrics: Mapping[str, Tensor]

    def of(self, arm: Arm, name: str) -> Tensor:
        """(S, ...) a metric of one arm; "r2" and "accuracy" are those with the most labels, "loss" the last logged."""
        values = self.metrics[{"r2": "r2_labels", "accuracy": "accuracy_labels", "loss": "loss_log"}.get(name, name)]
        values = values[:, self.problem.arms.index(arm)]
        return values[..., -1] if name in {"r2", "accuracy", "loss"} else values

    @property
    def linear_ceiling(self) -> float:
        """R^2 of the best linear function of x: E[z^2] / (E[z^2] + sigma^2)."""
        probability = self.problem.feature_probability
        return probability / (probability + self.noise_variance)

    @property
    def bias_over_noise(self) -> float:
        """The largest bias over the standard deviation of a unit neuron's response to noise: kappa / sigma."""
        return self.problem.bias_cap / math.sqrt(self.noise_variance) if self.noise_variance else math.inf

    @property
    def noise_over_signal(self) -> float:
        """E|xi|^2 / E|M z|^2: P sigma^2 / (D E[z^2])."""
        problem = self.problem
        return problem.num_pixels * self.noise_variance / (problem.num_features * problem.feature_probability)

    def untrained(self, arms: Sequence[Arm], settings: SparseCodingSettings) -> str:
        """Which of the arms have a seed that has not trained yet or still does, in words; "" where none has."""
        start, told = self.problem.first_loss, []
        for arm in arms:
            loss_SL = self.of(arm, "loss_log")
            fall_S = start - loss_SL[:, -1]
            late_S = loss_SL[:, loss_SL.shape[1] * 3 // 4 - 1] - loss_SL[:, -1]
            if (fall_S < settings.trained_loss_fall * start).any():
                told.append(f'"{arm.name}" has not trained (loss {loss_SL[:, -1].max():.2f}, at first {start:.2f})')
            elif (late_S > settings.settled_share * fall_S).any():
                late = (late_S / fall_S).max()
                told.append(f'"{arm.name}" still trains ({late:.0%} of the fall of its loss in the last quarter)')
        return "; ".join(told)


def growth_claims(growth: Mapping[bool, Tensors]) -> list[ClaimResult]:
    """Of `measure_growth` with the mask (True) and without."""
    rates = {(masked, name): values_S for masked, found in growth.items() for name, values_S in found.items()}
    cases = (
        (True, "along", "growth with mask", "With the mask the growth matrix is Sigma - diag(Sigma): atoms grow."),
        (False, "along", "growth without mask", "Without the mask the growth matrix is Sigma: atoms grow."),
        (False, "across", "growth of noise without mask", "Without the mask the growth matrix is Sigma: noise grows."),
    )
    results = [
        judge(
            Claim(name=name, statement=statement, source=_DECOUPLING),
            t_interval(rates[masked, f"{direction}_sampled"] / rates[masked, direction] - 1),
            measured=f"growth {direction} atoms, Monte-Carlo over closed form "
            f"({rates[masked, direction].mean():.5f}), less 1",
            at_least=-_GROWTH_TOLERANCE,
            at_most=_GROWTH_TOLERANCE,
        )
        for masked, direction, name, statement in cases
    ]
    across = judge(
        Claim(
            name="no growth of noise with mask",
            statement="With the mask nothing grows across the atoms: the trace of the growth matrix is 0.",
            source=_DECOUPLING,
        ),
        t_interval(rates[True, "across_sampled"]),
        measured=f"mean growth across atoms, Monte-Carlo (closed form {rates[True, 'across'].mean():.5f})",
        at_most=0.0,
    )
    return [*results, across]


def steps_to_reach(log_SL: Tensor, *, every: int, share: float = _REACHED) -> Tensor:
    """(S,) the first logged step at which a curve has done `share` of its way from its first value to its highest."""
    first_S1, highest_S1 = log_SL[:, :1], log_SL.amax(1, keepdim=True)
    reached_SL = log_SL >= first_S1 + share * (highest_S1 - first_S1)
    return (reached_SL.int().argmax(1) + 1) * every


def arm_claims(arms: Arms, settings: SparseCodingSettings) -> list[ClaimResult]:
    of, D = arms.of, arms.problem.num_features
    most = settings.label_counts[-1]
    few = next((place for place, count in enumerate(settings.label_counts) if count >= 8 * D), -1)
    every = arms.problem.log_every
    order_S = steps_to_reach(of(MASK_BIAS, "cosine_log"), every=every) - steps_to_reach(
        of(MASK_BIAS, "share_log"), every=every
    )
    raw_few_S = arms.metrics["raw_r2_labels"][:, 0, few]

    def claim(
        name: str,
        source: str,
        statement: str,
        values_S: Tensor,
        measured: str,
        needed: Sequence[Arm],
        **bounds: float,
    ) -> ClaimResult:
        result = judge(
            Claim(name=name, statement=statement, source=source), t_interval(values_S), measured=measured, **bounds
        )
        return _unless_untrained(result, arms, needed, settings)

    return [
        claim(
            "low loss without mask",
            _WITHOUT,
            "Without augmentation the loss becomes small: here at most a quarter of its first value.",
            of(NONE_BIAS, "loss") / arms.problem.first_loss,
            "loss over that of the start, no mask and growing bias",
            [NONE_BIAS],
            at_most=0.25,
        ),
        claim(
            "noise decides without mask",
            _WITHOUT,
            "Without augmentation f(x) is nearly f(noise): here a cosine of at least 0.93, without bias.",
            of(NONE_LINEAR, "noise_cosine"),
            "cos(f(x), f(xi)), no mask and no bias",
            [NONE_LINEAR],
            at_least=0.93,
        ),
        claim(
            "bad regression without mask",
            _WITHOUT,
            "Without augmentation no linear function of the features regresses well: here, none beats one of x itself.",
            of(NONE_BIAS, "r2") - arms.linear_ceiling,
            f"R^2 with {most} labels less the linear ceiling {arms.linear_ceiling:.3f}, no mask and growing bias",
            [NONE_BIAS],
            at_most=0.0,
        ),
        claim(
            "bad classification without mask",
            _WITHOUT,
            "Without augmentation a linear classifier is near chance: here at most 0.55 of the signs.",
            of(NONE_LINEAR, "accuracy"),
            f"share of right signs with {most} labels, no mask and no bias",
            [NONE_LINEAR],
            at_most=0.55,
        ),
        claim(
            "atoms missed without mask",
            _WITHOUT,
            "Without augmentation atoms are missed: here at least half of them have no neuron of cosine above 0.5.",
            of(NONE_BIAS, "coverage") / D,
            "share of atoms covered, no mask and growing bias",
            [NONE_BIAS],
            at_most=0.5,
        ),
        claim(
            "the lower loss has the worse features",
            _PAPER,
            "The mask makes the loss higher and the features better.",
            of(MASK_BIAS, "r2") - of(NONE_BIAS, "r2"),
            f"R^2 with {most} labels, mask less no mask, growing bias (losses {of(MASK_BIAS, 'loss').mean():.2f} and "
            f"{of(NONE_BIAS, 'loss').mean():.2f})",
            [MASK_BIAS, NONE_BIAS],
            at_least=0.0,
        ),
        claim(
            "signal decides with mask",
            _WITH,
            "With augmentation and a growing bias f(x) follows the signal: here a cosine of at least 0.55.",
            of(MASK_BIAS, "signal_cosine"),
            "cos(f(x), f(Mz)) where z != 0, mask and growing bias",
            [MASK_BIAS],
            at_least=0.55,
        ),
        claim(
            "good regression with mask",
            _WITH,
            "With augmentation a linear function of the features regresses well: here better than any one of x itself.",
            of(MASK_BIAS, "r2") - arms.linear_ceiling,
            f"R^2 with {most} labels less the linear ceiling {arms.linear_ceiling:.3f}, mask and growing bias",
            [MASK_BIAS],
            at_least=0.0,
        ),
        claim(
            "few labels are enough with mask",
            _WITH,
            f"The features need about D labels, x itself about as many as its coordinates, {arms.problem.num_pixels}.",
            of(MASK_BIAS, "r2_labels")[:, few] - raw_few_S,
            f"R^2 with {settings.label_counts[few]} labels, features less x ({raw_few_S.mean():.3f})",
            [MASK_BIAS],
            at_least=0.0,
        ),
        claim(
            "every atom is covered with mask",
            _WITH,
            "With augmentation and a growing bias every atom has a neuron: here, of cosine above 0.5.",
            of(MASK_BIAS, "coverage"),
            f"atoms covered, of {D}, mask and growing bias",
            [MASK_BIAS],
            at_least=float(D),
        ),
        claim(
            "noise fires nothing with mask",
            _WITH,
            "Pure noise fires no neuron: here at most 0.05 of them.",
            of(MASK_BIAS, "active_on_noise"),
            f"share of neurons that fire on noise alone, mask and growing bias "
            f"(kappa / sigma {arms.bias_over_noise:.2f})",
            [MASK_BIAS],
            at_most=0.05,
        ),
        claim(
            "single atoms need the bias",
            _STAGES,
            "With the mask it is the growing bias that turns mixtures of atoms into single ones.",
            of(MASK_BIAS, "cosine_log")[:, -1] - of(MASK_LINEAR, "cosine_log")[:, -1],
            "mean largest cosine to an atom, growing bias less no bias, mask",
            [MASK_BIAS, MASK_LINEAR],
            at_least=0.0,
        ),
        claim(
            "the subspace comes first",
            _STAGES,
            "Neurons enter the span of all atoms first and choose single ones later.",
            order_S,
            f"steps from {_REACHED:.0%} of the rise of the subspace share to {_REACHED:.0%} of that of the largest "
            f"cosine, mask and growing bias",
            [MASK_BIAS],
            at_least=float(every),
        ),
    ]


def gap_claim(arms: Arms, settings: SparseCodingSettings) -> ClaimResult:
    problem = arms.problem
    where = f"D={problem.num_features}, P={problem.num_pixels}, sigma^2={arms.noise_variance:g}"
    losses = " and ".join(f"{arms.of(arm, 'loss').mean():.2f}" for arm in problem.arms)
    result = judge(
        Claim(name=f"the mask helps at {where}", statement="Features are better with the mask.", source=_PAPER),
        t_interval(arms.of(MASK_BIAS, "r2") - arms.of(NONE_BIAS, "r2")),
        measured=f"R^2, mask less no mask; kappa / sigma {arms.bias_over_noise:.2f}, P sigma^2 / (D E[z^2]) "
        f"{arms.noise_over_signal:.3g}, losses {losses}",
        at_least=0.0,
    )
    return _unless_untrained(result, arms, problem.arms, settings)


def _unless_untrained(
    result: ClaimResult, arms: Arms, needed: Sequence[Arm], settings: SparseCodingSettings
) -> ClaimResult:
    """An arm that has not trained yet looks like one that cannot learn: then nothing is decided."""
    told = arms.untrained(needed, settings)
    if not told:
        return result
    return result.model_copy(update={"verdict": "not decidable here", "measured": f"{result.measured}; {told}"})
