"""The sparse coding model of Wen and Li (2021): its data, its learner, and training by the closed-form gradient.

Data: x = M z + xi in R^P. The D columns of M, the *atoms*, are orthonormal and spread over all coordinates. z is
sparse, with entries -1, 0, 1. xi ~ N(0, sigma^2 I) is dense, and by far the larger part of x.

The learner is one layer of soft thresholds f(x)_m = sign(u_m) max(|u_m| - b_m, 0) with u_m = <w_m, x>. It learns to
tell the second view of an example from other examples by the unnormalised <f(first view), stop_gradient(f(other))>.

All arms see the same draws, which depend on (seed, step) alone. The arms and seeds train in lockstep, as one batched
computation.

Legend: S seeds, A arms, B positives, N negatives, M neurons, D features, P pixels (coordinates of x), Q = A M,
L logged steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, normal, uniform
from trainer.theory.framework.experiment import draw_keys
from trainer.theory.sparse_coding.settings import LearnerKind, Problem
from trainer.views.random_mask import coins

# Purposes of `counter_rng` (the mask has 0), and numbers of views that separate training and probes.
_NOISE, _CODE, _WEIGHTS, _ATOMS = range(1, 5)
_LABELS, _SUPERVISED, _READOUT = range(7, 10)  # probes have 6
TRAINING, PROBES = range(2)

_LEAST_EXPONENT = -60.0


def draw_atoms(keys: DrawKeys, *, num_features: int, num_pixels: int, purpose: int = _ATOMS) -> Tensor:
    """Draw random atoms (S, D, P) float64. Their rows are orthonormal: they are the columns of M in the paper."""
    D, P = num_features, num_pixels
    q_SPD, _ = torch.linalg.qr(normal(keys, P * D, purpose=purpose).double().view(-1, P, D))
    atoms_SDP: Tensor = q_SPD.mT.contiguous()
    return atoms_SDP


def draw_codes(keys: DrawKeys, num: int, *, num_features: int, probability: float) -> Tensor:
    """Draw codes z, (S, num, D) float32: -1 and 1 with probability `probability` / 2 each, else 0."""
    u_SND = uniform(keys, num * num_features, purpose=_CODE).view(-1, num, num_features)
    return (u_SND < probability / 2).float() - (u_SND >= 1 - probability / 2).float()


def draw_parts(keys: DrawKeys, num: int, *, problem: Problem) -> tuple[Tensor, Tensor]:
    """Draw codes (S, num, D) and noise (S, num, P) of examples."""
    z_SND = draw_codes(keys, num, num_features=problem.num_features, probability=problem.feature_probability)
    noise_SNP = normal(keys, num * problem.num_pixels, purpose=_NOISE).view(-1, num, problem.num_pixels)
    return z_SND, noise_SNP.mul_(math.sqrt(problem.noise_variance))


def masked_views(x_SBP: Tensor, keys: DrawKeys) -> tuple[Tensor, Tensor]:
    """Return views 2 D x and 2 (I - D) x with a fair random mask D."""
    _, B, P = x_SBP.shape
    keep_SBP = coins(keys, B * P).view(-1, B, P)
    first_SBP = keep_SBP.to(x_SBP.dtype).mul_(2).mul_(x_SBP)
    return first_SBP, 2 * x_SBP - first_SBP


def soft_threshold(u: Tensor, bias: Tensor) -> Tensor:
    """Return sign(u) max(|u| - bias, 0), which is ReLU(u - bias) - ReLU(-u - bias) for bias >= 0."""
    return u - torch.clamp(u, -bias, bias)


def contrast(
    u_first: Tensor, u_second: Tensor, u_negative: Tensor, bias: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the loss (...) and descent coefficients (..., B, M).

    The arguments are <w, x> of both views (..., B, M) and of negatives (..., N, M). The loss is the mean over positives
    of -t log[e^(s+ / t) / (e^(s+ / t) + sum_n e^(s_n / t))]. Here s = <f(first), f(.)>, and f(.) gets no gradient. The
    gradient of the loss on w_m is - sum_b coefficient_bm first_b. The temperature t changes it through the softmax
    only. The bias (..., 1, M) gets no gradient.
    """
    first, second, negative = (soft_threshold(u, bias) for u in (u_first, u_second, u_negative))
    s_positive = (first * second).sum(-1, keepdim=True) / temperature
    s_negative = first @ negative.mT / temperature
    highest = torch.maximum(s_negative.amax(-1, keepdim=True), s_positive)
    e_positive, e_negative = (  # smaller exponents have no effect, but denormal numbers are slow on a CPU
        (s - highest).clamp_(min=_LEAST_EXPONENT).exp_() for s in (s_positive, s_negative)
    )
    total = e_positive + e_negative.sum(-1, keepdim=True)
    loss = temperature * (total.log() + highest - s_positive).mean((-2, -1))
    pull = ((total - e_positive) / total) * second - (e_negative / total) @ negative
    return loss, pull * (u_first.abs() >= bias) / u_first.shape[-2]


@dataclass
class Learners:
    """Weights, bias and the stage of the bias, of arms that see the same views."""

    arms: tuple[LearnerKind, ...]
    growing_A: Tensor
    trained_A: Tensor
    weights_SQP: Tensor
    bias_SAM: Tensor
    first_norm_SAM: Tensor
    norm_SAM: Tensor
    start_SA: Tensor  # the step that set the bias; -1 before it is set

    @property
    def weights_by_arm(self) -> Tensor:
        """Return the weights as (S, A, M, P)."""
        S, A, M = self.bias_SAM.shape
        return self.weights_SQP.view(S, A, M, -1)

    def project(self, x_SBP: Tensor) -> Tensor:
        """Return <w, x>, (S, A, B, M)."""
        S, A, M = self.bias_SAM.shape
        return torch.bmm(x_SBP, self.weights_SQP.mT).view(S, -1, A, M).transpose(1, 2)


def new_learners(arms: Sequence[LearnerKind], weights_SMP: Tensor, *, trained_bias_start: float = 0.0) -> Learners:
    """Return learners with the same weights for every arm. A trained bias has its start, others are 0."""
    weights_SAMP = weights_SMP[:, None].repeat(1, len(arms), 1, 1)
    norm_SAM = weights_SAMP.norm(dim=-1)
    growing_A, trained_A = (
        torch.tensor([arm.bias == bias for arm in arms], device=norm_SAM.device) for bias in ("growing", "trained")
    )
    return Learners(
        arms=tuple(arms),
        growing_A=growing_A,
        trained_A=trained_A,
        weights_SQP=weights_SAMP.flatten(1, 2),
        bias_SAM=trained_bias_start * norm_SAM * trained_A[:, None],
        first_norm_SAM=norm_SAM,
        norm_SAM=norm_SAM,
        start_SA=torch.full_like(norm_SAM[..., 0], -1, dtype=torch.long),
    )


def train_step(
    learners: Learners,
    views: tuple[Tensor, Tensor],
    x_SNP: Tensor,
    *,
    problem: Problem,
    step: int,
) -> Tensor:
    """Take one step of gradient descent and of the bias schedule, in place; return the loss before it, (S, A)."""
    first_SBP, second_SBP = views
    u_first, u_negative = learners.project(first_SBP), learners.project(x_SNP)
    u_second = u_first if second_SBP is first_SBP else learners.project(second_SBP)
    loss_SA, coefficient_SABM = contrast(
        u_first, u_second, u_negative, learners.bias_SAM[:, :, None], temperature=problem.settings.temperature
    )
    descend(learners, first_SBP, u_first, coefficient_SABM, problem=problem, step=step)
    return loss_SA


def regress(u: Tensor, bias: Tensor, readout: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of labels y (..., B, K) that are read from features, and its descent directions.

    The loss is the mean over examples of |y - f readout|^2 / 2, (...). The directions are the coefficients (..., B, M)
    as in `contrast`, and that of the readout (..., M, K).
    """
    features, num = soft_threshold(u, bias), u.shape[-2]
    error = y - features @ readout
    coefficient = (error @ readout.mT) * (u.abs() >= bias) / num
    return error.square().sum(-1).mean(-1) / 2, coefficient, features.mT @ error / num


def descend(
    learners: Learners,
    x_SBP: Tensor,
    u_SABM: Tensor,
    coefficient_SABM: Tensor,
    *,
    problem: Problem,
    step: int,
) -> None:
    """Move the weights and the trained biases down the gradient, then raise growing biases, in place.

    The features of x fall by sign(u) with the bias, so its gradient is sum_b coefficient_bm sign(u_bm).
    """
    coefficient_SBQ = coefficient_SABM.transpose(1, 2).flatten(2)
    rate, decay = problem.settings.learning_rate, problem.settings.weight_decay
    learners.weights_SQP.baddbmm_(coefficient_SBQ.mT, x_SBP, beta=1 - rate * decay, alpha=rate)
    fall_SAM = rate * (coefficient_SABM * u_SABM.sign()).sum(2) * learners.trained_A[:, None]
    learners.bias_SAM = (learners.bias_SAM - fall_SAM).clamp_(min=0)
    norm_SAM = learners.weights_by_arm.norm(dim=-1)
    raise_bias(learners, norm_SAM, problem=problem, step=step)


def raise_bias(learners: Learners, norm_SAM: Tensor, *, problem: Problem, step: int) -> None:
    """Set a growing bias when all neurons have grown. Then raise it, and keep it in proportion to the norm."""
    bias_SAM, old_SAM = learners.bias_SAM, learners.norm_SAM
    started_SA1 = learners.start_SA[..., None] >= 0
    factor_SAM = torch.clamp(norm_SAM / old_SAM, min=1 + problem.settings.learning_rate / problem.num_features)
    raised_SAM = torch.minimum(bias_SAM * factor_SAM, problem.bias_cap * norm_SAM)
    grown_SA = (norm_SAM >= problem.settings.bias_growth_start * learners.first_norm_SAM).all(-1)
    set_SA1 = grown_SA[..., None] & learners.growing_A[:, None] & ~started_SA1
    grown_SAM = torch.where(set_SA1, problem.bias_first * norm_SAM, raised_SAM)
    learners.bias_SAM = torch.where(learners.trained_A[:, None], bias_SAM, grown_SAM)
    learners.start_SA = torch.where(set_SA1[..., 0], step, learners.start_SA)
    learners.norm_SAM = norm_SAM


@dataclass
class Trained:
    """Trained arms. `groups` are masked, unmasked and supervised arms.

    `logs` are loss_log and, after each logged step, the means of `measure_atoms`: share_log, cosine_log and bias_log.
    They are (S, A, L), in the order of `problem.arms`. The loss is the mean since the last logged step.
    """

    atoms_SDP: Tensor
    groups: list[Learners]
    logs: dict[str, Tensor]


def measure_atoms(learners: Learners, atoms_SDP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return means over neurons, (S, A) each.

    They are the share of |w|^2 in the span of the atoms, the largest |cosine| to an atom, and bias / |w|.
    """
    cosine_SAMD = atom_cosines(learners, atoms_SDP)
    share_SAM = cosine_SAMD.square().sum(-1)
    return share_SAM.mean(-1), cosine_SAMD.amax(-1).mean(-1), (learners.bias_SAM / learners.norm_SAM).mean(-1)


def atom_cosines(learners: Learners, atoms_SDP: Tensor) -> Tensor:
    """Return the |cosine| of the weights of every neuron to every atom, (S, A, M, D)."""
    S, A, M = learners.bias_SAM.shape
    along_SAMD = torch.bmm(learners.weights_SQP, atoms_SDP.mT).view(S, A, M, -1)
    return along_SAMD.abs() / learners.norm_SAM[..., None]


def train(problem: Problem, *, seeds: Sequence[int], device: torch.device) -> Trained:
    """Train every arm of every seed on the same draws.

    A supervised arm sees unmasked examples with D labels, a random rotation of their codes. Its first weights are other
    ones, so that it resembles no arm by them.
    """
    keys = draw_keys(seeds, device, view=TRAINING)
    D, P, M = problem.num_features, problem.num_pixels, problem.num_neurons
    atoms_SDP = draw_atoms(keys, num_features=D, num_pixels=P).float()

    def small(num: int, purpose: int) -> Tensor:
        return normal(keys, M * num, purpose=purpose).view(-1, M, num) * (
            problem.settings.initial_scale / math.sqrt(num)
        )

    groups = [
        new_learners(
            arms,
            small(P, _SUPERVISED if supervised else _WEIGHTS),
            trained_bias_start=problem.settings.trained_bias_start,
        )
        for masked, supervised in ((True, False), (False, False), (False, True))
        if (arms := [arm for arm in problem.arms if (arm.masked, arm.supervised) == (masked, supervised)])
    ]
    rotation_SDD = draw_atoms(keys, num_features=D, num_pixels=D, purpose=_LABELS).float()
    readout_SAMD = small(D, _READOUT)[:, None]
    assert [arm for group in groups for arm in group.arms] == list(problem.arms)
    logs: dict[str, list[Tensor]] = {name: [] for name in ("loss_log", "share_log", "cosine_log", "bias_log")}
    losses = torch.zeros(len(atoms_SDP), len(problem.arms), device=device)
    num = problem.num_positives + problem.num_negatives
    for step in range(problem.num_steps):
        keys = dataclasses.replace(keys, epoch=step)
        z_SND, noise_SNP = draw_parts(keys, num, problem=problem)
        x_SNP = torch.baddbmm(noise_SNP, z_SND, atoms_SDP)
        positive_SBP, negative_SNP = x_SNP[:, : problem.num_positives], x_SNP[:, problem.num_positives :]
        step_losses = []
        for group in groups:
            if group.arms[0].supervised:
                u_SANM, y_SAND = group.project(x_SNP), torch.bmm(z_SND, rotation_SDD)[:, None]
                loss_SA, coefficient_SANM, direction_SAMD = regress(
                    u_SANM, group.bias_SAM[:, :, None], readout_SAMD, y_SAND
                )
                descend(group, x_SNP, u_SANM, coefficient_SANM, problem=problem, step=step)
                readout_SAMD = readout_SAMD + problem.settings.learning_rate * direction_SAMD
            else:
                views = masked_views(positive_SBP, keys) if group.arms[0].masked else (positive_SBP, positive_SBP)
                loss_SA = train_step(group, views, negative_SNP, problem=problem, step=step)
            step_losses.append(loss_SA)
        losses += torch.cat(step_losses, dim=1)
        if (step + 1) % problem.log_every == 0:
            measured = zip(*(measure_atoms(group, atoms_SDP) for group in groups), strict=True)
            values = (losses / problem.log_every, *(torch.cat(by_group, dim=1) for by_group in measured))
            for log, values_SA in zip(logs.values(), values, strict=True):
                log.append(values_SA)
            losses = torch.zeros_like(losses)
    return Trained(atoms_SDP, groups, {name: torch.stack(log, dim=-1) for name, log in logs.items()})
