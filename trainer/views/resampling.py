"""Crop, flip and blur of a batch of pictures, with amounts for each picture.

All three are linear along rows and columns, so each is a (size, size) matrix for every sample. The batch needs a few
batched matrix products instead of gathers. Of the rows, only the few with a weight above 0 are added up, and pictures
without blur are left out. This is the form for CPUs; see `trainer.views.few_kernels` for GPUs.

Legend: B samples, C channels, H rows, W columns, P pixels of an axis before an operation, Q after it, T rows that add
up to one row, S samples of a batch that are blurred.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CONSTANT_BLUR_REACH = 3  # pixels to either side


@dataclass(frozen=True)
class CropDraws:
    """The boxes of crops in whole pixels, (B,) float32 each."""

    top_B: Tensor
    left_B: Tensor
    height_B: Tensor
    width_B: Tensor


def crop_matrix(start_B: Tensor, length_B: Tensor, *, size: int, mirror_B: Tensor | None = None) -> Tensor:
    """Return (B, size, size) weights that stretch pixels start .. start + length - 1 of an axis over the whole axis.

    They are bilinear with half-pixel centres, and edge pixels are repeated. A crop is never larger than its picture, so
    the antialiasing of torchvision and PIL would change nothing. `mirror_B` (bool) reverses the axis.
    """
    source_BQ = _crop_source(start_B, length_B, size=size)
    if mirror_B is not None:
        source_BQ = torch.where(mirror_B[:, None], source_BQ.flip(1), source_BQ)
    pixel_P = torch.arange(size, device=start_B.device, dtype=start_B.dtype)
    return (source_BQ[:, :, None] - pixel_P).abs_().neg_().add_(1).clamp_min_(0)


def crop_taps(start_B: Tensor, length_B: Tensor, *, size: int) -> tuple[Tensor, Tensor]:
    """Return the two pixels with weights in each row of `crop_matrix`, (B, size, 2) int64, and their weights.

    For the last pixel of the axis, the second weight is 0.
    """
    source_BQ = _crop_source(start_B, length_B, size=size)
    tap_BQT = torch.stack([source_BQ.floor(), source_BQ.floor() + 1], dim=2)
    weight_BQT = (source_BQ[:, :, None] - tap_BQT).abs_().neg_().add_(1)
    return tap_BQT.clamp_max_(size - 1).long(), weight_BQT


def _crop_source(start_B: Tensor, length_B: Tensor, *, size: int) -> Tensor:
    """Return the positions on the axis, in pixels, from which the pixels of a crop are read, (B, size)."""
    pixel_Q = torch.arange(size, device=start_B.device, dtype=start_B.dtype)
    centre_BQ = (pixel_Q + 0.5) * (length_B / size)[:, None] - 0.5
    return centre_BQ.clamp_min(0).minimum((length_B - 1)[:, None]) + start_B[:, None]


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
    """
    variance_B = sigma_B.square() / 3
    whole_B = torch.floor((torch.sqrt(12 * variance_B + 1) - 1) / 2)
    fraction_B = (2 * whole_B + 1) * (whole_B * (whole_B + 1) - 3 * variance_B)
    fraction_B /= 6 * (variance_B - (whole_B + 1).square())
    reach_B1 = (whole_B + fraction_B)[:, None]
    distance_P = torch.arange(size, device=sigma_B.device, dtype=sigma_B.dtype)
    weight_BP = (reach_B1 + 1 - distance_P).clamp_min_(0)
    weight_BP[:, :-1].clamp_max_(1)  # the last weight also covers all greater distances, which fall on the edge pixel
    box_BQP = _matrix_of_filter(weight_BP / (2 * reach_B1 + 1))
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


def constant_blur_matrix(*, size: int, device: torch.device | None = None) -> Tensor:
    """Return the (size, size) weights of PIL's `GaussianBlur(radius=1)` along one axis.

    PIL applies three box filters, whose variances add up to the variance of the Gaussian. For radius 1 the box is 3/2
    pixels wide and has the weights 1/6, 2/3, 1/6. Each box repeats the edge pixels again.
    """
    identity_QP = torch.eye(size, device=device)
    pixel_Q = torch.arange(size, device=device)
    above_QP, below_QP = identity_QP[(pixel_Q - 1).clamp_min(0)], identity_QP[(pixel_Q + 1).clamp_max(size - 1)]
    box_QP = (4 * identity_QP + above_QP + below_QP) / 6
    return box_QP @ box_QP @ box_QP


def band_taps(matrix_QP: Tensor, *, reach: int) -> tuple[Tensor, Tensor]:
    """Return the pixels within `reach` of each row, (Q, T) int64, and their weights in a square matrix.

    A pixel beyond the edge is replaced by the edge pixel with the weight 0.
    """
    size, device = len(matrix_QP), matrix_QP.device
    tap_QT = torch.arange(size, device=device)[:, None] + torch.arange(-reach, reach + 1, device=device)
    is_pixel_QT = (tap_QT >= 0) & (tap_QT < size)
    tap_QT.clamp_(0, size - 1)
    return tap_QT, matrix_QP.gather(1, tap_QT) * is_pixel_QT


def apply_matrices(x_BCHW: Tensor, rows_BQP: Tensor, columns_BQP: Tensor) -> Tensor:
    """Return `rows @ channel @ columns.T` for each sample."""
    return torch.matmul(rows_BQP[:, None], apply_to_columns(x_BCHW, columns_BQP))


def apply_to_columns(x_BCHW: Tensor, columns_BQP: Tensor) -> Tensor:
    """Return `channel @ columns.T` for each sample."""
    B, C, H, W = x_BCHW.shape
    return torch.bmm(x_BCHW.reshape(B, C * H, W), columns_BQP.mT).view(B, C, H, W)


def sum_rows(x_BCHW: Tensor, tap_BQT: Tensor, weight_BQT: Tensor) -> Tensor:
    """Return `rows @ channel` for few weights: row q is the sum over t of `weight[q, t]` times row `tap[q, t]`.

    Equals the matrix product up to the last bits of float32, but does not multiply its zeros.
    """
    B, C, H, W = x_BCHW.shape
    _, Q, T = tap_BQT.shape  # B may be 1 if all samples have the same taps
    first_BC11 = torch.arange(0, B * C * H, H, device=x_BCHW.device).view(B, C, 1, 1)
    row_XT = (tap_BQT[:, None] + first_BC11).view(-1, T)
    weight_XT = weight_BQT[:, None].expand(B, C, Q, T).reshape(-1, T)
    y_XW = F.embedding_bag(row_XT, x_BCHW.reshape(-1, W), per_sample_weights=weight_XT, mode="sum")
    return y_XW.view(B, C, Q, W)


def blur_(x_BCHW: Tensor, sigma_B: Tensor, matrix_of: Callable[..., Tensor]) -> Tensor:
    """Blur each picture with its own sigma (0: no blur), in place.

    `matrix_of` is `pil_blur_matrix` or `gaussian_blur_matrix`. Leaves out pictures without blur, which gives the same
    bits.
    """
    some_S = sigma_B.nonzero()[:, 0]
    height, width = x_BCHW.shape[2:]
    columns_SQP = matrix_of(sigma_B[some_S], size=width)
    rows_SQP = columns_SQP if height == width else matrix_of(sigma_B[some_S], size=height)
    return x_BCHW.index_copy_(0, some_S, apply_matrices(x_BCHW.index_select(0, some_S), rows_SQP, columns_SQP))


def constant_blur_(x_BCHW: Tensor, blurred_B: Tensor) -> Tensor:
    """Blur the pictures in `blurred_B` like PIL's `GaussianBlur(radius=1)`, in place; leave out the others."""
    matrix_QP = constant_blur_matrix(size=x_BCHW.shape[-1])
    some_S = blurred_B.nonzero()[:, 0]
    across_SCHW = apply_to_columns(x_BCHW.index_select(0, some_S), matrix_QP.expand(len(some_S), -1, -1))
    return x_BCHW.index_copy_(0, some_S, _blur_rows(across_SCHW))


def constant_blur_rows_(x_BCHW: Tensor, blurred_B: Tensor) -> Tensor:
    """Blur the pictures in `blurred_B` along columns only, in place: one half of `constant_blur_`."""
    some_S = blurred_B.nonzero()[:, 0]
    return x_BCHW.index_copy_(0, some_S, _blur_rows(x_BCHW.index_select(0, some_S)))


def _blur_rows(x_BCHW: Tensor) -> Tensor:
    tap_QT, weight_QT = band_taps(constant_blur_matrix(size=x_BCHW.shape[2]), reach=CONSTANT_BLUR_REACH)
    return sum_rows(x_BCHW, tap_QT[None], weight_QT[None])


def crop_and_flip(
    images_BCHW: Tensor, crop: CropDraws | None, flip_B: Tensor | None, blurred_columns_B: Tensor | None = None
) -> Tensor:
    """Return the pictures cropped and flipped, in new contiguous memory even if nothing changes.

    The crop can also blur the pictures in `blurred_columns_B` along rows: the other half of `constant_blur_`.
    """
    if crop is not None:
        height, width = images_BCHW.shape[2:]
        columns_BQP = crop_matrix(crop.left_B, crop.width_B, size=width, mirror_B=flip_B)
        if blurred_columns_B is not None:
            some_S = blurred_columns_B.nonzero()[:, 0]
            columns_SQP = constant_blur_matrix(size=width) @ columns_BQP.index_select(0, some_S)
            columns_BQP.index_copy_(0, some_S, columns_SQP)
        taps = crop_taps(crop.top_B, crop.height_B, size=height)
        return sum_rows(apply_to_columns(images_BCHW, columns_BQP), *taps)
    x_BCHW = images_BCHW.clone(memory_format=torch.contiguous_format)
    return x_BCHW if flip_B is None else x_BCHW.lerp_(x_BCHW.flip(3), per_picture(flip_B.to(x_BCHW.dtype)))


def per_picture(x_B: Tensor) -> Tensor:
    return x_B[:, None, None, None]
