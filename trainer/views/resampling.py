"""Crop, flip and blur of a batch of pictures, with amounts for each picture.

A crop and a flip read each pixel from a position between pixels of the picture. A blur is linear along rows and
columns, so it is a (size, size) matrix for every sample.

Legend: B samples, C channels, H rows, W columns, P pixels of an axis before an operation, Q after it, S samples of a
batch that are blurred.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def crop_and_flip(images_BCHW: Tensor, box_B4: Tensor | None, flip_B: Tensor | None) -> Tensor:
    """Return the pictures cropped and flipped, in new contiguous memory even if nothing changes.

    `box_B4` is top, left, height and width of each crop, in whole pixels. The crop is bilinear with half-pixel centres,
    and edge pixels of the box are repeated. A crop is never larger than its picture, so the antialiasing of torchvision
    and PIL would change nothing.
    """
    if box_B4 is None:
        x_BCHW = images_BCHW.clone(memory_format=torch.contiguous_format)
        return x_BCHW if flip_B is None else torch.where(per_picture(flip_B), x_BCHW.flip(3), x_BCHW)
    B, _, H, W = images_BCHW.shape
    top_B, left_B, height_B, width_B = box_B4.unbind(1)
    y_BH, x_BW = _crop_source(top_B, height_B, size=H), _crop_source(left_B, width_B, size=W)
    if flip_B is not None:
        x_BW = torch.where(flip_B[:, None], x_BW.flip(1), x_BW)
    grid_BHW2 = torch.stack([x_BW[:, None, :].expand(B, H, W), y_BH[:, :, None].expand(B, H, W)], dim=3)
    x_BCHW = F.grid_sample(images_BCHW, grid_BHW2, mode="bilinear", padding_mode="border", align_corners=False)
    return x_BCHW.contiguous()


def _crop_source(start_B: Tensor, length_B: Tensor, *, size: int) -> Tensor:
    """Return the positions on an axis from which the pixels of a crop are read, (B, size), from -1 to 1."""
    centre_Q = torch.arange(0.5, size, dtype=start_B.dtype, device=start_B.device)
    source_BQ = (centre_Q * (length_B[:, None] / size)).sub_(0.5).clamp_min_(0)
    source_BQ = source_BQ.minimum(length_B[:, None] - 1).add_(start_B[:, None])
    return source_BQ.mul_(2 / size).add_(1 / size - 1)  # for `grid_sample`


def gaussian_blur_matrix(sigma_B: Tensor, *, size: int, reach: int | None = None) -> Tensor:
    """Return the (B, size, size) weights of a Gaussian along one axis; the identity for a sigma of 0.

    The weights are the values of the true Gaussian at whole pixels, to float32's precision. Edge pixels are repeated.
    With a `reach`, pixels farther away have the weight 0.
    """
    distance_P = torch.arange(size, device=sigma_B.device, dtype=sigma_B.dtype)
    exponent_BP = distance_P.square() * (-0.5 / sigma_B.clamp_min(1e-3).square())[:, None]
    # exp(-20) is below float32's resolution of a sum of 1. Subnormal weights would slow the products a hundredfold.
    weight_BP = exponent_BP.clamp_min(-20).exp_() * (exponent_BP > -20)
    if reach is not None:
        weight_BP[:, reach + 1 :] = 0
    return _matrix_of_filter(weight_BP / (2 * weight_BP.sum(dim=1, keepdim=True) - weight_BP[:, :1]))


def pil_blur_matrix(sigma_B: Tensor, *, size: int) -> Tensor:
    """Return the (B, size, size) weights of PIL's `GaussianBlur(radius=sigma)` along one axis; the identity for 0.

    PIL applies three box filters, each with a third of the Gaussian's variance (Gwosdek et al. 2011). A box covers, on
    either side, a whole number of pixels and a fraction of the next pixel. Each box repeats the edge pixels again.

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


def _matrix_of_filter(weight_BP: Tensor) -> Tensor:
    """Return the (B, P, P) weights of a symmetric filter with repeated edge pixels, from the weights of distances.

    The last entry of `weight_BP` (B, P) covers all distances from P - 1 on. P is at least 2.
    """
    size = weight_BP.shape[1]
    both_sides_BD = torch.cat([weight_BP.flip(1)[:, :-1], weight_BP], dim=1)
    matrix_BQP = both_sides_BD.unfold(1, size, 1).flip(1)
    beyond_BQ = weight_BP.flip(1).cumsum(dim=1)
    matrix_BQP[:, :, 0] = beyond_BQ.flip(1)
    matrix_BQP[:, :, -1] = beyond_BQ
    return matrix_BQP


def apply_matrices(x_BCHW: Tensor, rows_BQP: Tensor, columns_BQP: Tensor) -> Tensor:
    """Return `rows @ channel @ columns.T` for each sample; the matrices of one sample (B = 1) serve for all."""
    B, C, H, W = x_BCHW.shape
    across_BCHW = torch.bmm(x_BCHW.reshape(B, C * H, W), columns_BQP.mT.expand(B, -1, -1)).view(B, C, H, W)
    return torch.matmul(rows_BQP[:, None], across_BCHW)


def blur(x_BCHW: Tensor, sigma_B: Tensor, matrix_of: Callable[..., Tensor]) -> Tensor:
    """Return the pictures, each blurred with its own sigma, or all with the only one.

    `matrix_of` is `pil_blur_matrix` or `gaussian_blur_matrix`.
    """
    height, width = x_BCHW.shape[2:]
    columns_BQP = matrix_of(sigma_B, size=width)
    return apply_matrices(x_BCHW, columns_BQP if height == width else matrix_of(sigma_B, size=height), columns_BQP)


def blur_(x_BCHW: Tensor, sigma_B: Tensor, matrix_of: Callable[..., Tensor]) -> Tensor:
    """Do `blur` in place, and leave out pictures with a sigma of 0, which gives the same bits."""
    some_S = sigma_B.nonzero()[:, 0]
    sigma_S = sigma_B[some_S]
    if (sigma_S == sigma_S[:1]).all():  # one matrix blurs all, at twice the speed
        sigma_S = sigma_S[:1]
    return x_BCHW.index_copy_(0, some_S, blur(x_BCHW.index_select(0, some_S), sigma_S, matrix_of))


def per_picture(x_B: Tensor) -> Tensor:
    return x_B[:, None, None, None]
