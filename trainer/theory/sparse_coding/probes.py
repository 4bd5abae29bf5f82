"""Measure the trained sparse coding model: cosines to signal and noise, sizes of features, probes on labels.

`planted_losses` measures how low the loss of the model can be, without training.

Legend: S seeds, A arms, M neurons, D features, P pixels, T items, C label counts, K targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from data_pipeline.core.counter_rng import normal
from trainer.theory.framework.experiment import draw_keys
from trainer.theory.sparse_coding.model import (
    PROBES,
    TRAINING,
    Trained,
    atom_cosines,
    contrast,
    draw_atoms,
    draw_parts,
    masked_views,
    soft_threshold,
)
from trainer.theory.sparse_coding.settings import Problem

_LABELS: Final = 6  # a purpose of `counter_rng` that the model does not use
_RIDGE: Final = (
    1e-4,
    1e-3,
    1e-2,
    1e-1,
    1.0,
    10.0,
)  # penalties to try, in units of the mean diagonal of the Gram matrix
_CHUNK: Final = 1024  # items at a time
_COVERED: Final = 0.5  # a neuron covers an atom if their |cosine| is larger
_NORMS: Final = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 9.0)  # of planted neurons
_BIASES: Final = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)  # of planted neurons, in units of their norm
_MOST_POSITIVES: Final = 256  # of planted neurons


def measure(trained: Trained, problem: Problem, *, seeds: Sequence[int]) -> dict[str, Tensor]:
    """Return all metrics of trained arms, (S, A, ...), on new items. All arms see the same items.

    Metrics that end in `_labels` are (..., C). Metrics that begin with `raw_` are of x itself, with A = 1. The labels
    are y = <w*, z> with a Gaussian w*, and sign(y) if y != 0. If the last arm is supervised, `resemblance` is the mean
    over neurons of the largest |cosine| to a neuron of that arm.

    A neuron covers an atom if their |cosine| exceeds 0.5. `neurons_per_atom` is the most neurons that cover one atom,
    `size_ratio` the largest over the smallest |<w, atom>| of such pairs, and `other_cosine` the root mean square of the
    cosines of all other pairs.
    """
    atoms_SDP, settings = trained.atoms_SDP, problem.settings
    num_items = settings.label_counts[-1] + 2 * settings.num_test_items
    features, inputs, codes = [], [], []
    sums: dict[str, Tensor] = {}
    for chunk, first in enumerate(range(0, num_items, _CHUNK)):
        keys = draw_keys(seeds, atoms_SDP.device, step=chunk, view=PROBES)
        num = min(_CHUNK, num_items - first)
        z_STD, noise_STP = draw_parts(keys, num, problem=problem)
        codes.append(z_STD)
        signal_STP = torch.bmm(z_STD, atoms_SDP)
        inputs.append(noise_STP + signal_STP)
        of_noise, of_signal = _features(trained, noise_STP), _features(trained, signal_STP)
        features.append(_features(trained, inputs[-1]))
        seen_S1T = (z_STD != 0).any(-1)[:, None]
        for name, values_SAT in {
            "noise_cosine": cosine_similarity(features[-1], of_noise, dim=-1),
            "signal_cosine": cosine_similarity(features[-1], of_signal, dim=-1) * seen_S1T,
            "seen": seen_S1T.float().expand(-1, of_noise.shape[1], -1),
            "active": (features[-1] != 0).float().mean(-1),
            "active_on_noise": (of_noise != 0).float().mean(-1),
        }.items():
            sums[name] = sums.get(name, 0) + values_SAT.sum(-1)
    z_STD = torch.cat(codes, dim=1)
    w_SD1 = normal(keys, problem.num_features, purpose=_LABELS)[..., None]
    y_ST1 = torch.bmm(z_STD, w_SD1)
    target_STK = torch.cat([y_ST1, y_ST1.sign()], dim=-1)
    cosine_SAMD = torch.cat([atom_cosines(group, atoms_SDP) for group in trained.groups], dim=1)
    seen_SA = sums.pop("seen")
    found = {name: total_SA / num_items for name, total_SA in sums.items()}
    found["signal_cosine"] = sums["signal_cosine"] / seen_SA
    square_SAMD, covers_SAMD = cosine_SAMD.square(), cosine_SAMD > _COVERED
    size_SAMD = cosine_SAMD * torch.cat([group.norm_SAM for group in trained.groups], dim=1)[..., None]
    smallest_SA = size_SAMD.masked_fill(~covers_SAMD, torch.inf).amin((-2, -1))
    found |= {
        "coverage": covers_SAMD.any(2).sum(-1).float(),
        "atoms_per_neuron": (square_SAMD.sum(-1).square() / square_SAMD.square().sum(-1)).mean(-1),
        "neurons_per_atom": covers_SAMD.sum(2).amax(-1).float(),
        "size_ratio": (size_SAMD * covers_SAMD).amax((-2, -1)) / smallest_SA,
        "other_cosine": ((square_SAMD * ~covers_SAMD).sum((-2, -1)) / (~covers_SAMD).sum((-2, -1))).sqrt(),
        "bias_start": torch.cat([group.start_SA for group in trained.groups], dim=1),
    }
    for prefix, x_SATM in (("", torch.cat(features, dim=2)), ("raw_", torch.cat(inputs, dim=1)[:, None])):
        found[f"{prefix}r2_labels"], found[f"{prefix}accuracy_labels"] = probe_curves(
            x_SATM, target_STK[:, None], counts=settings.label_counts, num_test=settings.num_test_items
        )
    if trained.groups[-1].arms[0].supervised:
        supervised_SQP = normalize(trained.groups[-1].weights_SQP, dim=-1)
        found["resemblance"] = torch.cat(
            [
                torch.bmm(normalize(group.weights_SQP, dim=-1), supervised_SQP.mT)
                .abs()
                .amax(-1)
                .view_as(group.bias_SAM)
                .mean(-1)
                for group in trained.groups
            ],
            dim=1,
        )
    return found | trained.logs


def _features(trained: Trained, x_STP: Tensor) -> Tensor:
    """Return f(x) of every arm, (S, A, T, M)."""
    parts = [soft_threshold(group.project(x_STP), group.bias_SAM[:, :, None]) for group in trained.groups]
    return torch.cat(parts, dim=1)


def planted_losses(problem: Problem, *, seeds: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Return losses with the mask that the model can have, over `Problem.first_loss`, (S,) each.

    planted: the loss of neurons that equal the atoms, at the norm and the bias at which its mean over seeds is lowest.
    floor: mean log(1 + n), where n is the number of negatives with the code of the positive. No similarity of two codes
        has a lower loss.
    """
    keys = draw_keys(seeds, device, view=TRAINING)
    atoms_SDP = draw_atoms(keys, num_features=problem.num_features, num_pixels=problem.num_pixels).float()
    B = min(problem.num_positives, _MOST_POSITIVES)
    z_STD, noise_STP = draw_parts(keys, B + problem.num_negatives, problem=problem)
    x_STP = torch.baddbmm(noise_STP, z_STD, atoms_SDP)
    u_first, u_second, u_negative = (
        torch.bmm(part, atoms_SDP.mT) for part in (*masked_views(x_STP[:, :B], keys), x_STP[:, B:])
    )
    bias_S1D = torch.ones_like(u_first[:, :1])
    tries = [
        contrast(
            norm * u_first,
            norm * u_second,
            norm * u_negative,
            norm * bias * bias_S1D,
            temperature=problem.settings.temperature,
        )[0]
        for norm in _NORMS
        for bias in _BIASES
    ]
    equal_SB = (torch.cdist(z_STD[:, :B], z_STD[:, B:]) < 0.5).sum(-1)
    return {
        "planted": min(tries, key=lambda loss_S: loss_S.mean().item()) / problem.first_loss,
        "floor": problem.settings.temperature * equal_SB.double().log1p().mean(-1) / problem.first_loss,
    }


def probe_curves(
    features_SATM: Tensor, target_STK: Tensor, *, counts: Sequence[int], num_test: int
) -> tuple[Tensor, Tensor]:
    """Fit ridge regression to the first `counts` items; return R^2 of target 0 and share of right signs of target 1.

    Both are (S, A, C). The targets are (S, 1, T, K). `num_test` items after the largest count choose the penalty, for
    each target by itself. The next `num_test` items measure. R^2 is relative to predicting 0, the expectation of the
    targets. Only items with y != 0 count for the signs.
    """
    x, y = features_SATM.double(), target_STK.double()
    chosen, measured = (slice(counts[-1] + part * num_test, counts[-1] + (part + 1) * num_test) for part in (0, 1))
    eye_MM = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    gram_SAMM, moment_SAMK = torch.zeros_like(eye_MM), torch.zeros((), dtype=x.dtype, device=x.device)
    r2, accuracy = [], []
    for low, high in zip((0, *counts), counts, strict=False):
        gram_SAMM = gram_SAMM + x[:, :, low:high].mT @ x[:, :, low:high]
        moment_SAMK = moment_SAMK + x[:, :, low:high].mT @ y[:, :, low:high]
        unit_SA11 = gram_SAMM.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp(min=1e-12)
        tries = []
        for penalty in _RIDGE:
            weights_SAMK = torch.linalg.solve(gram_SAMM + penalty * unit_SA11 * eye_MM, moment_SAMK)
            tries.append(torch.stack([torch.stack(_scores(x[:, :, part] @ weights_SAMK, y[:, :, part]))
                                      for part in (chosen, measured)]))  # fmt: skip
        score_RXKSA = torch.stack(tries)
        best_1KSA = score_RXKSA[:, 0].argmax(0, keepdim=True)
        best_KSA = score_RXKSA[:, 1].gather(0, best_1KSA)[0]
        r2.append(best_KSA[0])
        accuracy.append(best_KSA[1])
    return torch.stack(r2, dim=-1), torch.stack(accuracy, dim=-1)


def _scores(predicted_SATK: Tensor, target_SATK: Tensor) -> tuple[Tensor, Tensor]:
    """Return R^2 of target 0 and the share of right signs of target 1, (S, A) each."""
    error_SA = (predicted_SATK - target_SATK)[..., 0].square().sum(-1)
    r2_SA = 1 - error_SA / target_SATK[..., 0].square().sum(-1)
    decided_SAT = target_SATK[..., 1] != 0
    right_SAT = (predicted_SATK[..., 1].sign() == target_SATK[..., 1]) & decided_SAT
    return r2_SA, right_SAT.sum(-1) / decided_SAT.sum(-1)
