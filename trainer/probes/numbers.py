"""Predict a label that is a number, such as an age, by ridge regression, and measure R² on the test set.

R² is one minus the mean squared error over the variance of the test numbers: 1 is perfect, and a guess of the mean of
the test numbers has 0. It is the mean of one score for each sample, so intervals, and differences between encoders, are
those of accuracies.

Shapes: N samples, M test samples, F features.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

PENALTIES: Final = np.logspace(-6, 4, 21)  # of the squared weights, relative to N


def fit_ridge(train_NF: Tensor, number_N: Tensor, test_MF: Tensor) -> tuple[Tensor, Tensor, float]:
    """Fit numbers (N,) by features and an intercept; all in float64 on the CPU.

    The features, which are finite, are standardised by the train set. Of `PENALTIES`, the one is taken that gives the
    least squared error of single samples that are left out. Returns the numbers that are predicted for the test samples
    (M,) and for the train samples (N,), and the penalty.
    """
    from sklearn.linear_model import RidgeCV  # here, because few probes are of numbers
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()
    x_NF = scaler.fit_transform(train_NF.double().cpu().numpy())
    ridge = RidgeCV(PENALTIES * len(x_NF)).fit(x_NF, number_N.cpu().numpy())
    x_MF = scaler.transform(test_MF.double().cpu().numpy())
    predicted_M, predicted_N = (torch.from_numpy(ridge.predict(x)) for x in (x_MF, x_NF))
    return predicted_M, predicted_N, float(ridge.alpha_ / len(x_NF))


def sample_scores(predicted_M: Tensor, number_M: Tensor) -> Tensor:
    """Return one minus the squared error over the variance of the numbers, (M,) float64; the mean of them is R²."""
    return 1 - (predicted_M - number_M).square() / number_M.var(correction=0)


def r2(predicted_M: Tensor, number_M: Tensor) -> float:
    """Return the R² of predicted numbers (M,), which are not all equal."""
    return float(sample_scores(predicted_M, number_M).mean())
