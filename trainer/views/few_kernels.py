"""Colour changes in few kernels, for GPUs: the same draws as on a CPU, and the same views up to rounding.

At the batch sizes of the papers, launching a kernel takes a GPU longer than running it. So this file computes some
numbers that a CPU leaves out, if that saves kernels. Brightness, contrast, saturation and grayscale multiply the three
channels by a 3 x 3 matrix for each picture, and the matrices of all turns are made at once.

Legend: B pictures, C channels (3 if colours are changed), H rows, W columns, P pixels of a picture, T turns of the
colour jitter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.views.colour import CONTRAST, HUE, SATURATION, JitterDraws


def change_colours(
    x_BCHW: Tensor, jitter: JitterDraws | None, gray_B: Tensor | None, *, luma_C: Tensor, identity_CC: Tensor
) -> Tensor:
    """Return the pictures after `trainer.views.colour.jitter_colour_` and grayscale, either of which may be None.

    Never makes the host wait for the device. `luma_C`, the weights of `trainer.views.colour.LUMA`, and a 3 x 3 identity
    are arguments, because making them takes kernels.
    """
    x_BCP = x_BCHW.flatten(2)
    if jitter is not None:
        x_BCP = _jitter(x_BCP, jitter, luma_C, identity_CC)
    if gray_B is not None:
        gray_B11 = gray_B[:, None, None].to(x_BCP.dtype)
        x_BCP = torch.bmm(torch.addcmul(gray_B11 * luma_C, 1 - gray_B11, identity_CC), x_BCP)
    return x_BCP.view_as(x_BCHW)


def _jitter(x_BCP: Tensor, jitter: JitterDraws, luma_C: Tensor, identity_CC: Tensor) -> Tensor:
    """Apply the changes in the order of each picture: three turns before the one change of hue, and three after it.

    A turn multiplies a pixel by the factor, and adds a share of its luma (saturation) or of the mean luma (contrast).
    """
    rest_B4 = 1 - jitter.factor_B4.gather(1, jitter.order_B4)
    is_hue_B4 = jitter.order_B4 == HUE
    num_hues_B4 = is_hue_B4.cumsum(dim=1)  # up to this turn
    before_B4, after_B4 = rest_B4 * (num_hues_B4 == 0), rest_B4 * (num_hues_B4 > is_hue_B4)
    rest_TB11 = torch.cat([before_B4[:, :3], after_B4[:, 1:]], dim=1).T[..., None, None]
    operation_TB11 = torch.cat([jitter.order_B4[:, :3], jitter.order_B4[:, 1:]], dim=1).T[..., None, None]
    own_TB1C = rest_TB11 * (operation_TB11 == SATURATION) * luma_C
    mean_TB1C = rest_TB11 * (operation_TB11 == CONTRAST) * luma_C
    matrix_TBCC = torch.addcmul(own_TB1C + identity_CC, rest_TB11, identity_CC, value=-1)
    for turn in range(6):
        if turn == 3:
            x_BCP = _shift_hue(x_BCP, jitter.factor_B4[:, HUE])
        reference_B11 = torch.bmm(mean_TB1C[turn], x_BCP.mean(dim=2, keepdim=True))
        x_BCP = torch.bmm(matrix_TBCC[turn], x_BCP).add_(reference_B11).clamp_(0, 1)
    return x_BCP


def _shift_hue(x_BCP: Tensor, turns_B: Tensor) -> Tensor:
    """Turn the hue by `turns` of the colour circle, as `trainer.views.colour.shift_hue_` does.

    The trapezoids of the three channels have one shape, a third of the circle (2 of 6 sixths) apart.
    """
    red_BP, green_BP, blue_BP = x_BCP.unbind(dim=1)
    least_BP, most_BP = torch.aminmax(x_BCP, dim=1)
    hue_BP = x_BCP.sum(dim=1).add_(red_BP, alpha=-2).add_(most_BP).sub_(least_BP, alpha=2)
    span_BP = most_BP - least_BP
    hue_BP.div_(span_BP.clamp_min(1e-8)).copysign_(green_BP - blue_BP).add_((6 * turns_B + 3)[:, None])
    centre_C1 = torch.arange(0.0, 6.0, 2.0, device=x_BCP.device)[:, None]
    distance_BCP = (hue_BP[:, None] - centre_C1).remainder_(6).sub_(3).abs_()
    return torch.addcmul(least_BP[:, None], (2 - distance_BCP).clamp_(0, 1), span_BP[:, None])
