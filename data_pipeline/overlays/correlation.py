"""Draw the class of an overlay that is correlated with the base label: the settings of Dominoes and coloured digits.

With the probability `correlation`, the class is that of the base label, modulo the number of classes; otherwise it is
uniform. So class and base label agree with the probability correlation + (1 - correlation) / K for K classes. A record
without a base label has a uniform class.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, integers, uniform
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BASE, NO_LABEL
from data_pipeline.overlays import OverlayInputs


def check_base_label(given: OverlayInputs, correlation: float) -> None:
    """Raise `UserError` if a correlation with the base label is asked for, and the pictures do not have one."""
    if correlation and not sum(given.class_counts.get(BASE, ())):
        raise UserError(
            f"the overlay {given.name} with correlation={correlation:g} follows the label {BASE}, and {given.pictures} "
            "have none that is known before the build; set correlation=0, or build pictures with class labels"
        )


def correlated_classes(
    keys: DrawKeys, labels: Mapping[str, Tensor], num_classes: int, *, correlation: float, purpose: int
) -> Tensor:
    """Draw a class for each key, (B,) int64. Uses the purposes `purpose` and `purpose + 1`.

    `labels` are those of the source by name, (B,) int64. Without a base label, or with correlation 0, the class is
    uniform.
    """
    uniform_B = integers(keys, 1, num_classes, purpose=purpose)[:, 0]
    base_B = labels.get(BASE)
    if base_B is None or not correlation:
        return uniform_B
    follows_B = (uniform(keys, 1, purpose=purpose + 1)[:, 0] < correlation) & (base_B != NO_LABEL)
    return torch.where(follows_B, base_B % num_classes, uniform_B)
