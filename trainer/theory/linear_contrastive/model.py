"""The linear model of feature suppression (Tamkin et al. 2022, section 4): its speeds, training and test error.

An input has K features, rows x_k ~ N(0, I) of D numbers. A view of it has rows v_k ~ N(0, I). They are independent of
x_k except in one direction mu_k: <v_k, mu_k> = alpha_k <x_k, mu_k> + sqrt(1 - alpha_k^2) xi. The model has one vector
theta_k for each feature: f(x)_k = <theta_k, x_k>. It minimises the mean of -log p_ii over a batch of M pairs. Here p_ij
is the softmax over j of <f(x_i), f(v_j)>.

The rows are independent and N(0, I) is invariant under rotations, so the code takes the first coordinate for every
mu_k.

Shapes: S seeds, A arms (settings trained side by side), K features, M pairs, D dimensions, T steps, R batches,
P and Q states of two features, ... any leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, normal
from data_pipeline.core.errors import UserError
from trainer.theory.framework.experiment import draw_keys
from trainer.theory.linear_contrastive.settings import TrainingSettings

# Purposes of `counter_rng`: four of the training, then the pairs of the grid and the test samples.
_INITIAL, _INPUT, _VIEW, _NOISE, _PAIR, _TEST = range(6)

# Numbers in the largest intermediate array of the grid: few enough for the caches of a CPU, enough to use a whole GPU.
CHUNK_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 27}


def downstream_error(
    angle_degrees_P: Sequence[float], *, seeds: Sequence[int], num_samples: int, device: torch.device
) -> Tensor:
    """Return the share of samples x ~ N(0, I) with sign <theta, x> != sign <mu, x>, (S, P), for P angles of theta.

    Draws x in the plane of theta and mu. The dimension of x does not matter.
    """
    angle_P = torch.tensor(angle_degrees_P, dtype=torch.float64, device=device).deg2rad()
    keys = draw_keys(seeds, device)
    x_SN2 = normal(keys, 2 * num_samples, purpose=_TEST).double().view(len(seeds), num_samples, 2)
    theta_P2 = torch.stack([angle_P.cos(), angle_P.sin()], dim=1)
    errors = [((x_SN2 @ theta_2 > 0) != (x_SN2[..., 0] > 0)).double().mean(1) for theta_2 in theta_P2]
    return torch.stack(errors, dim=1)


def feature_states(angles_degrees: Sequence[float], norms: Sequence[float], correlations: Sequence[float]) -> Tensor:
    """Return every combination of a feature's angle to mu, norm of theta and correlation; (P, 3) float64.

    Column 0 has the angles in radians. The last list varies fastest: view results as (angles, norms, correlations).
    """
    axes = [torch.tensor(values, dtype=torch.float64) for values in (angles_degrees, norms, correlations)]
    states_P3 = torch.cartesian_prod(*axes)
    states_P3[:, 0].deg2rad_()
    return states_P3


def draw_pairs(seed: int, first: int, num: int, *, num_pairs: int, num_features: int, device: torch.device) -> Tensor:
    """Draw standard normal numbers (R, K, M, 2) float64 for `num` batches from `first` on, for `angular_speeds`."""
    index_R = torch.arange(first, first + num, device=device)
    keys = DrawKeys(seed=seed, epoch=0, index_B=index_R, view=0)
    return normal(keys, num_features * num_pairs * 2, purpose=_PAIR).double().view(num, num_features, num_pairs, 2)


def angular_speeds(weak_P3: Tensor, other_Q3: Tensor, rest_K3: Tensor, g_RKM2: Tensor) -> tuple[Tensor, Tensor]:
    """Return how fast gradient descent turns a feature towards its mu, and the mean p_ii; (R, P, Q) each.

    The speed, in radians for each unit of learning rate, is -<dL/dtheta_k, u_k> / |theta_k|. Here u_k is the unit
    vector orthogonal to theta_k on the side of mu_k: a small step of size eta reduces the angle by eta times the speed.

    Combines each state P of the feature with each state Q of one other feature. The features of `rest_K3` have one
    state each. exp(z_ij) is a product of one factor for each feature, so the softmax sums of all P x Q states are one
    product of two matrices.

    Only the component of a row along theta decides z. The rest of the row enters the speed linearly, so its mean given
    that component takes its place: the expectation stays the same, with less noise. See `_in_plane`.

    Args:
        weak_P3, other_Q3, rest_K3: from `feature_states`.
        g_RKM2: from `draw_pairs`. Its features are the weak one, the other one, then the rest.

    Raises:
        UserError: if the norms are so large that float64 loses a softmax sum.
    """
    weak_P3, other_Q3, rest_K3 = (states.to(g_RKM2.device) for states in (weak_P3, other_Q3, rest_K3))
    z_RMPM, across_RMPM = _weak_terms(weak_P3, g_RKM2[:, 0])
    if len(rest_K3):
        z_RMPM += _rest_logits(rest_K3, g_RKM2[:, 2:])[:, :, None, :]
    along_x_RQM, along_v_RQM, _, _ = _in_plane(other_Q3, g_RKM2[:, 1])
    e_RMPM = _stable_exp(z_RMPM)
    e_RMQM = _stable_exp(along_x_RQM.mT[..., None] * along_v_RQM[:, None])
    sum_RMPQ = e_RMPM @ e_RMQM.mT
    if not bool((sum_RMPQ > 0).all()):
        raise UserError("the norms of the grid are too large: float64 loses a softmax sum; use norms of 4 or less")
    own_across_RP = _own(across_RMPM).mean(1)
    expected_RPQ = (across_RMPM.mul_(e_RMPM) @ e_RMQM.mT).div_(sum_RMPQ).mean(1)
    speed_RPQ = (own_across_RP[..., None] - expected_RPQ) / weak_P3[:, 1:2]
    positive_RMPQ = _own(e_RMPM)[..., :, None] * _own(e_RMQM)[..., None, :]
    return speed_RPQ, positive_RMPQ.div_(sum_RMPQ).mean(1)


def _in_plane(states_P3: Tensor, g_RM2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return <theta, x>, <theta, v>, and the means of <u, x> and <u, v> given these two; (R, P, M) each.

    u is the unit vector orthogonal to theta, on the side of mu. For angle a and norm n, the first two are n N(0, 1),
    with correlation r = alpha cos^2 a. <u, x> is independent of <theta, x> and has covariance n alpha cos a sin a with
    <theta, v>. For <u, v> the roles of x and v are exchanged.
    """
    x, independent = g_RM2[:, None, :, 0], g_RM2[:, None, :, 1]
    angle_P, norm_P, alpha_P = states_P3.T.contiguous()
    cos, sin = angle_P.cos(), angle_P.sin()
    r = (alpha_P * cos**2)[:, None]
    covariance = (alpha_P * cos * sin)[:, None]
    unshared = (1 - r**2).sqrt()
    v = r * x + unshared * independent
    norm = norm_P[:, None]
    across_x = covariance * independent / unshared
    return norm * x, norm * v, across_x, covariance * x - r * across_x


def _weak_terms(weak_P3: Tensor, g_RM2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the feature's part of z_ij and its derivative along u, (R, M, P, M) each: i, state, j."""
    along_x_RPM, along_v_RPM, across_x_RPM, across_v_RPM = _in_plane(weak_P3, g_RM2)
    along_x, across_x = along_x_RPM.mT[..., None], across_x_RPM.mT[..., None]
    along_v, across_v = along_v_RPM[:, None], across_v_RPM[:, None]
    return along_x * along_v, torch.addcmul(across_x * along_v, along_x, across_v)


def _rest_logits(rest_K3: Tensor, g_RKM2: Tensor) -> Tensor:
    """Return the part of z_ij of all features in `rest_K3`, (R, M, M)."""
    single = [_in_plane(state[None], g_RKM2[:, k])[:2] for k, state in enumerate(rest_K3)]
    return torch.stack([along_x.mT * along_v for along_x, along_v in single]).sum(0)


def _stable_exp(z: Tensor) -> Tensor:
    """Return exp(z - greatest of its row), which overwrites `z`."""
    return z.sub_(z.amax(-1, keepdim=True)).exp_()


def _own(by_pair_RMPM: Tensor) -> Tensor:
    """Return the entries with i = j, (R, M, P)."""
    return by_pair_RMPM.diagonal(dim1=1, dim2=3).mT


def speed_grid(
    weak_P3: Tensor,
    other_Q3: Tensor,
    rest_K3: Tensor,
    *,
    reference_Q: Tensor,
    seed: int,
    num_batches: int,
    num_pairs: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Average `angular_speeds` over `num_batches` batches of one seed. All states see the same batches.

    A gain is the speed less the speed at a reference state. `reference_Q` is the number of that state, for each state
    of the other feature.
    Returns means over the batches, (P, Q) each: "speed_PQ", "p_positive_PQ", "gain_PQ" and "gain_square_PQ".
    """
    reference_Q = reference_Q.to(device)
    total: dict[str, Tensor] = {}
    num_features, P, Q = 2 + len(rest_K3), len(weak_P3), len(other_Q3)
    numbers = num_pairs * (num_pairs * (P + Q) + P * Q)
    at_once = max(1, CHUNK_NUMBERS[device.type] // numbers)
    for first in range(0, num_batches, at_once):
        num = min(at_once, num_batches - first)
        g_RKM2 = draw_pairs(seed, first, num, num_pairs=num_pairs, num_features=num_features, device=device)
        speed_RPQ, p_positive_RPQ = angular_speeds(weak_P3, other_Q3, rest_K3, g_RKM2)
        gain_RPQ = speed_RPQ - speed_RPQ[:, :, reference_Q]
        parts = {"speed_PQ": speed_RPQ, "p_positive_PQ": p_positive_RPQ, "gain_PQ": gain_RPQ}
        for name, part_RPQ in (parts | {"gain_square_PQ": gain_RPQ**2}).items():
            total[name] = total.get(name, 0) + part_RPQ.sum(0)
    return {name: total_PQ / num_batches for name, total_PQ in total.items()}


def train_arms(
    training: TrainingSettings, alpha_AK: Tensor, beta_AK: Tensor, *, seeds: Sequence[int], device: torch.device
) -> dict[str, Tensor]:
    """Train arms by gradient descent in float32. All arms of a seed have the same first weights and the same batches.

    `alpha_AK` is the correlation of each feature's view with its input. `beta_AK` is the share of the view that the
    noise leaves; 1 is no noise. Before `noise_from_step` views have the correlations alpha. From that step on, feature
    k of a view is beta_k v_k + sqrt(1 - beta_k^2) N(0, I), so its correlation is alpha_k beta_k. A beta of 1 changes no
    bit.

    Returns angles in degrees before each step and after the last, (A, S, T + 1): "weak_AST" of feature 0, "second_AST"
    of feature 1, and "dominant_AST", the mean over all features but 0. "p_positive_AST" is the mean p_ii and "loss_AST"
    the loss of each step's batch.
    """
    dim, num_pairs = training.dim, training.num_pairs
    num_arms, num_features = alpha_AK.shape
    alpha_KMA, beta_KMA = (each.T[:, None, :].float().to(device) for each in (alpha_AK, beta_AK))
    independent_KMA, noise_KMA = (1 - alpha_KMA**2).sqrt() - 1, (1 - beta_KMA**2).sqrt()
    seeds_S = torch.tensor(seeds, device=device)

    def draws(step: int, purpose: int, num_rows: int) -> Tensor:
        flat = normal(draw_keys(seeds_S, step=step), num_features * num_rows * dim, purpose=purpose)
        return flat.reshape(len(seeds), num_features, num_rows, dim)

    initial_SKD = draws(0, _INITIAL, 1)[:, :, 0] * (training.initial_scale / math.sqrt(dim))
    theta_SKDA = initial_SKD[..., None].repeat(1, 1, 1, num_arms)
    angles, positives, losses = [_angles(theta_SKDA)], [], []
    for step in range(training.num_steps):
        noisy = step >= training.noise_from_step
        x_SKMD, n_SKMD = draws(step, _INPUT, num_pairs), draws(step, _VIEW, num_pairs)
        # All arms share n: a view is n except in its first coordinate, and <theta, v> is linear in that coordinate.
        first_SKMA = alpha_KMA * x_SKMD[..., :1] + independent_KMA * n_SKMD[..., :1]
        fx_SKMA = x_SKMD @ theta_SKDA
        fv_SKMA = n_SKMD @ theta_SKDA + theta_SKDA[:, :, :1] * first_SKMA
        if noisy:
            w_SKMD = draws(step, _NOISE, num_pairs)
            fv_SKMA = beta_KMA * fv_SKMA + noise_KMA * (w_SKMD @ theta_SKDA)
        fx_ASMK, fv_ASMK = fx_SKMA.permute(3, 0, 2, 1).contiguous(), fv_SKMA.permute(3, 0, 2, 1).contiguous()
        pull_ASMM, own_ASM = _pull(fx_ASMK @ fv_ASMK.mT)
        of_x_SKMA = (pull_ASMM @ fv_ASMK).permute(1, 3, 2, 0)
        of_v_SKMA = (pull_ASMM.mT @ fx_ASMK).permute(1, 3, 2, 0)
        gradient_SKDA = x_SKMD.mT @ of_x_SKMA
        if noisy:
            gradient_SKDA += w_SKMD.mT @ (noise_KMA * of_v_SKMA)
            of_v_SKMA = beta_KMA * of_v_SKMA
        gradient_SKDA += n_SKMD.mT @ of_v_SKMA
        gradient_SKDA[:, :, 0] += (first_SKMA * of_v_SKMA).sum(2)
        theta_SKDA -= training.learning_rate * gradient_SKDA
        angles.append(_angles(theta_SKDA))
        positives.append(own_ASM.exp().mean(-1))
        losses.append(-own_ASM.mean(-1))
    angle_ASKT = torch.stack(angles, dim=-1)
    return {
        "weak_AST": angle_ASKT[:, :, 0],
        "second_AST": angle_ASKT[:, :, 1],
        "dominant_AST": angle_ASKT[:, :, 1:].mean(2),
        "p_positive_AST": torch.stack(positives, dim=-1),
        "loss_AST": torch.stack(losses, dim=-1),
    }


def _angles(theta_SKDA: Tensor) -> Tensor:
    """Return the acute angles to mu in degrees, (A, S, K)."""
    across_SKA = theta_SKDA[:, :, 1:].norm(dim=2)
    return torch.atan2(across_SKA, theta_SKDA[:, :, 0].abs()).rad2deg().permute(2, 0, 1)


def _pull(z_MM: Tensor) -> tuple[Tensor, Tensor]:
    """Return (p_ij - [i = j]) / M, which overwrites `z_MM`, and log p_ii."""
    greatest_M1 = z_MM.amax(-1, keepdim=True)
    own_M = z_MM.diagonal(dim1=-2, dim2=-1) - greatest_M1[..., 0]
    pull_MM = z_MM.sub_(greatest_M1).exp_()
    sum_M1 = pull_MM.sum(-1, keepdim=True)
    pull_MM.div_(sum_M1)
    pull_MM.diagonal(dim1=-2, dim2=-1).sub_(1)
    return pull_MM.div_(z_MM.shape[-1]), own_M - sum_M1[..., 0].log()
