"""Predict a label that is a number, such as an age, by ridge regression, and measure R² on the test set.

R² is one minus the mean squared error over the variance of the test numbers: 1 is perfect, and a guess of the mean of
the test numbers has 0. It is the mean of one score for each sample, so differences between encoders are told from
chance as those of accuracies are.

Shapes: N samples, M test samples, F features, P penalties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from data_pipeline.core.randomness import generator
from data_pipeline.core.schema import Schema

PENALTIES: Final = torch.logspace(-6, 4, 21, dtype=torch.float64)  # of the squared weights, relative to N
_HELD_OUT: Final = 10  # one sample of so many chooses the penalty
_NUM_DRAWS: Final = 1000  # of the bootstrap


class NumberResult(Schema):
    """What the result of a label that is a number has besides its R².

    penalty: the chosen one of `PENALTIES`.
    intervals: for each method, "linear" and "knn", the 95 % interval of its R².
    """

    penalty: float
    intervals: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Ridge:
    """A fitted ridge regression: the numbers (M,) float64 that it predicts, its R² on the train set, its penalty."""

    predicted_M: Tensor
    train_r2: float
    penalty: float


def fit_ridge(train_NF: Tensor, number_N: Tensor, test_MF: Tensor, *, seed: int) -> Ridge:
    """Fit numbers (N,) by features and an intercept, in closed form, and predict test samples; all in float64.

    The features are standardised by the mean and deviation of the train set. A tenth of it, drawn by `seed`, chooses
    the penalty of `PENALTIES` that gives the least squared error; then all of it is fitted. The features are finite.
    """
    x_NF, x_MF, number_N = train_NF.double(), test_MF.double(), number_N.double()
    mean_F, std_F = x_NF.mean(0), x_NF.std(0, correction=0)
    std_F = torch.where(std_F > 0, std_F, 1.0)
    x_NF, x_MF = (x_NF - mean_F) / std_F, (x_MF - mean_F) / std_F
    order_N = torch.from_numpy(generator(seed, "held out of a ridge regression").permutation(len(x_NF)))
    num_held = max(1, len(x_NF) // _HELD_OUT)
    held, kept = order_N[:num_held].to(x_NF.device), order_N[num_held:].to(x_NF.device)
    tried_PX = _predictions(x_NF[kept], number_N[kept], x_NF[held], PENALTIES)
    penalty = PENALTIES[int((tried_PX - number_N[held]).square().mean(1).argmin())]
    [predicted_X] = _predictions(x_NF, number_N, torch.cat([x_MF, x_NF]), penalty[None])
    return Ridge(predicted_X[: len(x_MF)], r2(predicted_X[len(x_MF) :], number_N), float(penalty))


def _predictions(x_NF: Tensor, number_N: Tensor, x_MF: Tensor, penalty_P: Tensor) -> Tensor:
    """Return the predictions (P, M) of the ridge regression of each penalty, by the smaller of both Gram matrices."""
    mean_F, mean = x_NF.mean(0), number_N.mean()
    x_NF, x_MF, y_N = x_NF - mean_F, x_MF - mean_F, number_N - mean
    is_wide = x_NF.shape[1] > len(x_NF)
    value_R, vector_RR = torch.linalg.eigh(x_NF @ x_NF.T if is_wide else x_NF.T @ x_NF)
    right_R = vector_RR.T @ (y_N if is_wide else x_NF.T @ y_N)
    weight_PR = right_R / (value_R.clamp_min(0) + len(x_NF) * penalty_P.to(x_NF.device)[:, None]) @ vector_RR.T
    predicted_PM: Tensor = (weight_PR @ x_NF if is_wide else weight_PR) @ x_MF.T + mean
    return predicted_PM


def sample_scores(predicted_M: Tensor, number_M: Tensor) -> Tensor:
    """Return one minus the squared error over the variance of the numbers, (M,) float64; the mean of them is R²."""
    number_M = number_M.to(predicted_M.device)
    return 1 - (predicted_M - number_M).square() / number_M.var(correction=0)


def r2(predicted_M: Tensor, number_M: Tensor) -> float:
    """Return the R² of predicted numbers (M,), which are not all equal."""
    return float(sample_scores(predicted_M, number_M).mean())


def r2_interval(predicted_M: Tensor, number_M: Tensor, *, seed: int) -> tuple[float, float]:
    """Return the 95 % interval of R² over draws of the test samples with replacement (percentile bootstrap)."""
    draw, predicted_M, number_M = generator(seed, "bootstrap of R2"), predicted_M.cpu(), number_M.cpu()
    rows = (torch.from_numpy(draw.integers(len(number_M), size=len(number_M))) for _ in range(_NUM_DRAWS))
    found = np.array([r2(predicted_M[row_M], number_M[row_M]) for row_M in rows])
    low, high = np.quantile(found[np.isfinite(found)], (0.025, 0.975)).tolist()
    return low, high
