"""Colour jitter and grayscale of a batch of pictures, with amounts and an order for each picture.

Brightness, contrast and saturation are one formula with different coefficients. So a random order costs six cheap
passes and a single change of hue. On a CPU, a pass, or a part of it, that changes none of the pictures is left out; the
bits are the same.

The changes of a picture are `factor_B4`: factors of brightness, contrast and saturation (1: unchanged), and the shift
of hue in turns (0: unchanged). `order_B4` (int64) holds their numbers in the order in which they are applied.

Legend: B samples, C = 3 channels, H rows, W columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.views.resampling import per_picture

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
_GRAIN = 1 << 15  # torch leaves smaller sums to one thread
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as PIL; torchvision's tensors use 0.2989
NUM_COLOURS = len(LUMA)  # channels of a picture in colour


def jitter_colour_(x_BCHW: Tensor, factor_B4: Tensor, order_B4: Tensor) -> Tensor:
    """Apply torchvision's ColorJitter in place, with factors and an order for each sample.

    Three of the four operations are blends. Blends that come before hue in a sample's order run before the single
    change of hue, the others after it. A blend with the factor 1 changes nothing.
    """
    in_turn_B4 = factor_B4.gather(1, order_B4)
    is_hue_B4 = order_B4 == HUE
    after_hue_B4 = is_hue_B4.cumsum(dim=1) > 0
    before_B4 = torch.where(after_hue_B4, 1.0, in_turn_B4)
    after_B4 = torch.where(after_hue_B4 & ~is_hue_B4, in_turn_B4, 1.0)
    for turn in (0, 1, 2):
        blend_(x_BCHW, order_B4[:, turn], before_B4[:, turn])
    shift_hue_(x_BCHW, factor_B4[:, HUE])
    for turn in (1, 2, 3):
        blend_(x_BCHW, order_B4[:, turn], after_B4[:, turn])
    return x_BCHW


def blend_(x_BCHW: Tensor, operation_B: Tensor, factor_B: Tensor) -> Tensor:
    """Set x to `factor * x + (1 - factor) * reference`, clamped to [0, 1], in place.

    The reference is black (BRIGHTNESS), the picture's mean luma (CONTRAST) or the luma of each pixel (SATURATION).
    """
    if not changes_any(factor_B != 1):
        return x_BCHW.clamp_(0, 1)
    own_B, mean_B = ((1 - factor_B) * (operation_B == operation) for operation in (SATURATION, CONTRAST))
    if not (changes_any(own_B) or changes_any(mean_B)):
        return x_BCHW.mul_(per_picture(factor_B)).clamp_(0, 1)
    reference_B1HW = luma(x_BCHW)
    mean_B = mean_B * _mean(reference_B1HW)
    reference_B1HW.mul_(per_picture(own_B)).add_(per_picture(mean_B))
    return x_BCHW.mul_(per_picture(factor_B)).add_(reference_B1HW).clamp_(0, 1)


def changes_any(amount_B: Tensor) -> bool:
    """Return whether an amount is not 0; True for other devices than a CPU, because the host would wait for them."""
    return amount_B.device.type != "cpu" or bool(amount_B.any())


def _mean(x_B1HW: Tensor) -> Tensor:
    """Return the mean of each picture, (B,), in bits that do not depend on the number of threads or pictures."""
    if x_B1HW.shape[2] * x_B1HW.shape[3] < _GRAIN:
        return x_B1HW.mean(dim=(1, 2, 3))
    return x_B1HW.mean(dim=3).mean(dim=(1, 2))  # threads would share the one sum of a single large picture


def luma(x_BCHW: Tensor) -> Tensor:
    """Return the brightness, weighted as the eye perceives it, (B, 1, H, W)."""
    red, green, blue = LUMA
    return (x_BCHW[:, :1] * red).add_(x_BCHW[:, 1:2], alpha=green).add_(x_BCHW[:, 2:], alpha=blue)


def shift_hue_(x_BCHW: Tensor, turns_B: Tensor) -> Tensor:
    """Turn the hue by `turns` of the colour circle in HSV, in place; value and saturation do not change.

    The largest and the smallest channel therefore keep their values. Only the position of each channel between the two
    is computed again; over the hue, it is a trapezoid. The hue is in sixths of a turn from red, from -3 to 3. Its size
    has one formula in all six sectors, |hue| = (most - 2 least + green + blue - red) / (most - least). For example,
    with green > red > blue it is 2 - (red - least) / (most - least). Its sign is the sign of green - blue.
    """
    red_BHW, green_BHW, blue_BHW = x_BCHW.unbind(dim=1)
    least_BHW = torch.minimum(green_BHW, blue_BHW).minimum(red_BHW)
    span_BHW = torch.maximum(green_BHW, blue_BHW).maximum(red_BHW)

    hue_BHW = (green_BHW + blue_BHW).sub_(red_BHW).add_(span_BHW).sub_(least_BHW, alpha=2)
    span_BHW -= least_BHW
    hue_BHW /= span_BHW.clamp_min(1e-8)  # a grey pixel has no hue, and its span of 0 cancels the result
    hue_BHW.copysign_(green_BHW.sub_(blue_BHW)).add_(6 * turns_B[:, None, None])
    hue_BHW.sub_(torch.round(hue_BHW / 6), alpha=6)

    torch.abs(hue_BHW, out=red_BHW).neg_().add_(2)
    torch.add(hue_BHW, 1, out=green_BHW).abs_().sub_(1)
    torch.sub(hue_BHW, 1, out=blue_BHW).abs_().sub_(1)
    return x_BCHW.clamp_(0, 1).mul_(span_BHW[:, None]).add_(least_BHW[:, None])
