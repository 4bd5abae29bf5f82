"""Cheap metrics of views that show whether the viewmaker has stopped changing pictures, or lost its freedom to.

Shapes: B pictures of this rank, C channels, H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data_pipeline.core.sample import MASK_BOX


@torch.no_grad()
def view_health(
    views_a_BCHW: Tensor,
    views_b_BCHW: Tensor | None,
    images_BCHW: Tensor,
    masks_BHW: Tensor | None,
    *,
    bounded: bool = True,
) -> dict[str, Tensor]:
    """Return scalars of this rank's part of the batch, on its device, without waiting for it.

    changed_share: share of the first views that differ from their picture in any bit. For a working viewmaker this is
        its `dropout_rate`, or 1 without one; for a viewmaker that does nothing, 0. The means below include unchanged
        views. Divide them by `changed_share` to get the means of the changed views.
    budget_spent: mean |view - picture|, after any clamp.
    clamped_share, if `bounded`: share of entries that lie inside (0, 1) in the picture and at or beyond these limits in
        the view, so that a clamp cut their change short. (Of entries on a limit, half of all changes would be cut.)
    evenness: mean over the pictures of mean |view - picture| / max |view - picture|. It is q if a share q of the
        entries carries the change, and 1 if all change by as much, as behind a saturated tanh.
    diversity, with `views_b_BCHW`: mean difference between the two views of a picture.
    inside_over_outside, with `masks_BHW`: mean change inside the boxes of the drawn objects over the mean change
        outside, of changed views only; 1 if there is nothing to compare. It is above 1 for a viewmaker that destroys
        objects (Tamkin et al. 2022).

    Args:
        views_a_BCHW, views_b_BCHW: first and second views; the second None if there is one view only.
        images_BCHW: the pictures behind the first views.
        masks_BHW: uint8, in the levels of `data_pipeline.core.sample`, of the same pictures; None without masks.
        bounded: whether the pictures lie in [0, 1]; normalised spectrograms do not.
    """
    change_BCHW = (views_a_BCHW - images_BCHW).abs()
    change_BP = change_BCHW.flatten(1)
    changed_B = change_BP.amax(1) > 0
    tiny = torch.finfo(change_BP.dtype).tiny
    health = {
        "changed_share": changed_B.to(change_BP.dtype).mean(),
        "budget_spent": change_BP.mean(),
        "evenness": (change_BP.mean(1) / change_BP.amax(1).clamp_min(tiny)).mean(),
    }
    if bounded:
        clamped_BCHW = (views_a_BCHW <= 0) | (views_a_BCHW >= 1)
        health["clamped_share"] = (clamped_BCHW & (images_BCHW > 0) & (images_BCHW < 1)).float().mean()
    if views_b_BCHW is not None:
        health["diversity"] = (views_a_BCHW - views_b_BCHW).abs().mean()
    if masks_BHW is not None:
        health["inside_over_outside"] = _inside_over_outside(change_BCHW.mean(1), masks_BHW >= MASK_BOX, changed_B)
    return health


def _inside_over_outside(change_BHW: Tensor, inside_BHW: Tensor, changed_B: Tensor) -> Tensor:
    """Return the mean change where `inside_BHW` over the mean elsewhere, both of the pictures in `changed_B`.

    1 if either part is empty, or if nothing changes outside.
    """
    changed_B11 = changed_B[:, None, None]
    inside = (change_BHW * inside_BHW).sum() / (inside_BHW & changed_B11).sum()
    outside = (change_BHW * ~inside_BHW).sum() / (~inside_BHW & changed_B11).sum()
    ratio = inside / outside
    return torch.where(ratio.isfinite(), ratio, 1.0)
