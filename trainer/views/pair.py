"""Make the two views of a batch in your own training loop, from a seed and the number of the step.

Shapes: B samples, C channels, H height, W width, T points of a waveform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, keys_of_rows
from trainer.views.inputs import to_unit_range

# A view policy: one of `build_view_policy`, or a module or function of your own with these arguments.
Policy: TypeAlias = Callable[[Tensor, DrawKeys, Tensor | None], Tensor]


def two_views(
    policy: Policy, inputs: Tensor, *, seed: int, step: int, first_row: int = 0, masks_BHW: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return two views of each sample of a batch of pictures (B, C, H, W) or waveforms (B, T).

    Pictures are uint8, or float in [0, 1]. Waveforms are int16, or float in [-1, 1].

    `masks_BHW` (B, H, W) uint8 marks the objects on the pictures, for a masked viewmaker: 0 outside, 128 in the box
    around the object, 255 on it, as `Batch.masks_BHW` does.

    Equal arguments give equal views, because no draw comes from torch's generator. On several ranks, pass the number of
    rows of the ranks before this one as `first_row`. Raises `UserError` if inputs are of another type, pictures are
    outside [0, 1] or waveforms far outside [-1, 1], and `ValueError` as the policy does.
    """
    inputs = to_unit_range(inputs)
    a, b = (keys_of_rows(inputs, seed=seed, step=step, view=view, first_row=first_row) for view in (0, 1))
    return policy(inputs, a, masks_BHW), policy(inputs, b, masks_BHW)
