"""Quantities of views that are cheap to log: has the viewmaker stopped changing pictures, or run into the clamp?"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def view_health(views_BCHW: Tensor, images_BCHW: Tensor) -> dict[str, Tensor]:
    """Scalars on the views' device, without waiting for it.

    `budget_spent`: mean |view - image|, after any clamp. `clamped_share`: share of entries at or beyond the limits 0
    and 1; a viewmaker changes nearly every entry, so one that sits on a limit was clamped there.
    """
    return {
        "budget_spent": (views_BCHW - images_BCHW).abs().mean(),
        "clamped_share": ((views_BCHW <= 0) | (views_BCHW >= 1)).float().mean(),
    }
