"""Expert views in few kernels, for GPUs: the same draws as on a CPU, and the same views up to rounding.

At the batch sizes of the papers, launching a kernel takes a GPU longer than running it. So this file computes some
numbers that a CPU leaves out, if that saves kernels:

- The crop and the flip are one `grid_sample`.
- Brightness, contrast, saturation and grayscale multiply the three channels by a 3 x 3 matrix for each picture. The
  matrices of all turns are made at once.
- The three box filters of PIL's blur are one matrix, which is the difference of its cumulative weights.

Legend: B pictures, C channels (3 if colours are changed), H rows, W columns, P pixels of a picture, T turns of the
colour jitter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.views.colour import CONTRAST, HUE, SATURATION, JitterDraws
from trainer.views.expert_draws import ExpertDraws
from trainer.views.resampling import CropDraws, constant_blur_matrix, gaussian_blur_matrix, per_picture


def apply_draws_in_few_kernels(
    images_BCHW: Tensor, draws: ExpertDraws, *, luma_C: Tensor, identity_CC: Tensor
) -> Tensor:
    """Return the views with these parameters, (B, C, H, W) float32 in [0, 1] like the pictures, in new memory.

    Equals `trainer.views.expert_image.apply_draws` up to rounding, and never makes the host wait for the device. The
    weights of `trainer.views.colour.LUMA` and a 3 x 3 identity are arguments, because making them takes kernels.
    """
    x_BCHW = crop_and_flip(images_BCHW, draws.crop, draws.flip_B)
    if draws.jitter is not None or draws.gray_B is not None:
        x_BCHW = change_colours(x_BCHW, draws.jitter, draws.gray_B, luma_C=luma_C, identity_CC=identity_CC)
    if draws.pil_sigma_B is not None:
        x_BCHW = _blur(x_BCHW, partial(pil_blur_matrix, draws.pil_sigma_B))
    if draws.sigma_B is not None:
        x_BCHW = _blur(x_BCHW, partial(gaussian_blur_matrix, draws.sigma_B, reach=draws.reach))
    if draws.constant_blur_B is not None:
        blurred_BCHW = _blur(x_BCHW, partial(_constant_matrices, len(x_BCHW), device=x_BCHW.device))
        x_BCHW = torch.where(per_picture(draws.constant_blur_B), blurred_BCHW, x_BCHW)
    return x_BCHW


def crop_and_flip(images_BCHW: Tensor, crop: CropDraws | None, flip_B: Tensor | None) -> Tensor:
    """Return the pictures cropped and flipped, in new contiguous memory even if nothing changes."""
    if crop is None:
        x_BCHW = images_BCHW.clone(memory_format=torch.contiguous_format)
        return x_BCHW if flip_B is None else torch.where(per_picture(flip_B), x_BCHW.flip(3), x_BCHW)
    B, _, H, W = images_BCHW.shape
    if H == W:
        y_BH, x_BW = _squares_source(crop, flip_B, size=H)
    else:
        y_BH = _crop_source(crop.top_B, crop.height_B, None, size=H)
        x_BW = _crop_source(crop.left_B, crop.width_B, flip_B, size=W)
    grid_BHW2 = torch.stack([x_BW[:, None, :].expand(B, H, W), y_BH[:, :, None].expand(B, H, W)], dim=3)
    x_BCHW = F.grid_sample(images_BCHW, grid_BHW2, mode="bilinear", padding_mode="border", align_corners=False)
    return x_BCHW.contiguous()


def _crop_source(start_B: Tensor, length_B: Tensor, mirror_B: Tensor | None, *, size: int) -> Tensor:
    """Return the positions on an axis from which the pixels of a crop are read, (B, size), from -1 to 1."""
    centre_BQ = torch.arange(0.5, size, device=start_B.device).expand(len(start_B), size)
    if mirror_B is not None:
        centre_BQ = torch.where(mirror_B[:, None], size - centre_BQ, centre_BQ)
    source_BQ = (centre_BQ * (length_B[:, None] / size)).sub_(0.5).clamp_min_(0)
    source_BQ = source_BQ.minimum((length_B - 1)[:, None]).add_(start_B[:, None])
    return source_BQ.mul_(2 / size).add_(1 / size - 1)  # for `grid_sample`


def _squares_source(crop: CropDraws, flip_B: Tensor | None, *, size: int) -> tuple[Tensor, Tensor]:
    """Return `_crop_source` of the rows and the columns of square pictures, both at once."""
    box_4B = torch.stack([crop.left_B, crop.top_B, crop.width_B, crop.height_B])
    start_2B1, length_2B1 = box_4B[:2, :, None], box_4B[2:, :, None]
    centre_S = torch.arange(0.5, size, device=crop.left_B.device)
    centre_BS = centre_S.expand(len(crop.left_B), size)
    column_BS = centre_BS if flip_B is None else torch.where(flip_B[:, None], size - centre_S, centre_S)
    # Positions in pixels, with edge pixels of the box repeated, as in `trainer.views.resampling.crop_matrix`.
    source_2BS = (torch.stack([column_BS, centre_BS]) * (length_2B1 / size)).sub_(0.5).clamp_min_(0)
    source_2BS = source_2BS.minimum(length_2B1 - 1).add_(start_2B1)
    x_BS, y_BS = source_2BS.mul_(2 / size).add_(1 / size - 1).unbind()
    return y_BS, x_BS


def _constant_matrices(num: int, *, size: int, device: torch.device) -> Tensor:
    return constant_blur_matrix(size=size, device=device).expand(num, -1, -1)


def change_colours(
    x_BCHW: Tensor, jitter: JitterDraws | None, gray_B: Tensor | None, *, luma_C: Tensor, identity_CC: Tensor
) -> Tensor:
    """Return the pictures after `trainer.views.colour.jitter_colour_` and grayscale, either of which may be None."""
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


def pil_blur_matrix(sigma_B: Tensor, *, size: int) -> Tensor:
    """Return the matrices of `trainer.views.resampling.pil_blur_matrix`, up to rounding.

    A box of `reach` pixels to either side gives the pixels up to distance d the weight d + reach + 1 together, but at
    least 0 and at most 2 reach + 1. The weight of one pixel is a difference, and the edge pixels get all that is left.
    """
    square_B = sigma_B.square()
    whole_B = torch.div(torch.sqrt(4 * square_B + 1).sub_(1), 2, rounding_mode="floor")
    next_B = whole_B + 1
    fraction_B = (whole_B + next_B) * (whole_B * next_B - square_B)
    fraction_B /= torch.addcmul(2 * square_B, next_B, next_B, value=-6)
    end_B11 = (next_B + fraction_B)[:, None, None]
    number_E = torch.arange(size + 1, device=sigma_B.device, dtype=sigma_B.dtype)
    distance_QE = number_E - number_E[1:, None]  # from pixel Q to the pixel before edge E
    distance_QE[:, 0] = -torch.inf
    distance_QE[:, -1] = torch.inf
    weight_BQE = (distance_QE + end_B11).div_(2 * end_B11 - 1).clamp_(0, 1)
    box_BQP = weight_BQE.diff(dim=2)
    return box_BQP @ box_BQP @ box_BQP


def _blur(x_BCHW: Tensor, matrix_of: Callable[..., Tensor]) -> Tensor:
    """Return `rows @ channel @ columns.T` for each picture; `matrix_of` returns the (B, size, size) matrices."""
    B, C, H, W = x_BCHW.shape
    columns_BQP = matrix_of(size=W)
    rows_BQP = columns_BQP if H == W else matrix_of(size=H)
    rows_first_BHCW = x_BCHW.transpose(1, 2).reshape(B, H, C * W)
    x_BHCW = torch.bmm(rows_BQP, rows_first_BHCW).view(B, H * C, W)
    return torch.bmm(x_BHCW, columns_BQP.mT).view(B, H, C, W).transpose(1, 2).contiguous()
