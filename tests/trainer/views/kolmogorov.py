"""The Kolmogorov-Smirnov test, for draws against draws and draws against the uniform law."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike


def ks_p_value(a: ArrayLike, b: ArrayLike | None = None) -> float:
    """Asymptotic p-value that `a` and `b` are drawn from one law, or `a` from the uniform law on [0, 1] if `b` is None.

    With ties, as in whole numbers, the true p-value is larger: the test errs on the side of "equal".
    """
    x = np.sort(np.asarray(a, dtype=np.float64))
    if b is None:
        rank = np.arange(len(x) + 1) / len(x)
        distance = max((rank[1:] - x).max(), (x - rank[:-1]).max())
        scale = math.sqrt(len(x))
    else:
        y = np.sort(np.asarray(b, dtype=np.float64))
        at = np.concatenate([x, y])
        distance = np.abs(
            np.searchsorted(x, at, side="right") / len(x) - np.searchsorted(y, at, side="right") / len(y)
        ).max()
        scale = math.sqrt(len(x) * len(y) / (len(x) + len(y)))
    z = float(distance) * scale
    if z < 0.3:  # the series below converges slowly there, and the value is 1 to five digits
        return 1.0
    return 2 * sum((1 if k % 2 else -1) * math.exp(-2 * (k * z) ** 2) for k in range(1, 101))
