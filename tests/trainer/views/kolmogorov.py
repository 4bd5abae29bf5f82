"""The Kolmogorov-Smirnov test, for draws against draws and draws against the uniform law."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import kstest


def ks_p_value(a: ArrayLike, b: ArrayLike | None = None) -> float:
    """Asymptotic p-value that `a` and `b` are drawn from one law, or `a` from the uniform law on [0, 1] if `b` is None.

    With ties, as in whole numbers, the true p-value is larger: the test errs on the side of "equal".
    """
    law = "uniform" if b is None else np.asarray(b)
    return float(kstest(np.asarray(a), law, method="asymp").pvalue)
