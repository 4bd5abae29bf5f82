"""Compute cheap metrics of views that show whether the viewmaker has stopped changing pictures, or has saturated.

Shapes: B pictures of this rank, C channels, H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data_pipeline.core.sample import MASK_BOX
from trainer.distributed.collectives import all_reduce_sum


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

    Every rank must call this at the same time: with masks, one collective adds up what `inside_over_outside` compares.

    changed_share: the share of the first views that differ from their picture in any bit. For a working viewmaker, this
        is its `dropout_rate`, or 1 without one; for a viewmaker that does nothing, 0. The means below include unchanged
        views. Divide them by `changed_share` to get the means over changed views.
    budget_spent: the mean of |view - picture|, after any clamp.
    clamped_share, if `bounded`: the share of entries that are inside (0, 1) in the picture and at or beyond the limits
        in the view, so that a clamp has cut their change. (Entries on a limit do not count: a clamp cuts half of all
        their changes anyway.)
    evenness: the mean over the pictures of mean |view - picture| / max |view - picture|. It is q if a share q of the
        entries changes equally, and 1 if all entries do, as after a saturated tanh.
    diversity, with `views_b_BCHW`: the mean difference between the two views of a picture.
    inside_over_outside, with `masks_BHW`: the mean change inside the boxes of the drawn objects over the mean change
        outside, for changed views of all ranks only; 1 if there is nothing to compare. It is above 1 for a viewmaker
        that destroys objects (Tamkin et al. 2022).

    Args:
        views_a_BCHW, views_b_BCHW: the first and the second views; None for the second if there is only one view.
        images_BCHW: the pictures of the first views.
        masks_BHW: uint8 masks of the same pictures, in the levels of `data_pipeline.core.sample`; None without masks.
        bounded: whether the pictures are in [0, 1], unlike normalised spectrograms.
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
    """Return the mean change inside `inside_BHW` over the mean change outside, for the pictures in `changed_B`.

    Counts the pictures of all ranks: a mean of the ratios of the ranks would depend on their number.

    Returns 1 if either part is empty, or if nothing changes outside.
    """
    changed_B11 = changed_B[:, None, None]
    sums = [(change_BHW * part_BHW).sum() for part_BHW in (inside_BHW, ~inside_BHW)]
    sums += [(part_BHW & changed_B11).sum().to(change_BHW.dtype) for part_BHW in (inside_BHW, ~inside_BHW)]
    inside, outside, num_inside, num_outside = all_reduce_sum(torch.stack(sums)).unbind()
    ratio = (inside / num_inside) / (outside / num_outside)
    return torch.where(ratio.isfinite(), ratio, 1.0)
