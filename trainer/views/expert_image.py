"""Expert views of pictures: crop, colour jitter, grayscale, blur and flip of a whole batch at once.

The policy and its order are those of contrastive learning (Chen et al. 2020) in the strength that "Feature Dropout"
(Tamkin et al. 2022) used. Every operation has the meaning of torchvision's transform of the same name, in floating
point: nothing is rounded to 256 levels between operations, as a chain of PIL pictures is.

What makes it fast: crop, blur and flip are linear along rows and columns, so each is a (size, size) matrix for every
sample, and the batch needs four batched matrix products instead of gathers. Brightness, contrast and saturation are one
formula with other coefficients, so a random order costs six cheap passes and a single change of hue.

Legend: B samples, C = 3 channels, H rows, W columns, P pixels of an axis before an operation, Q after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from data_pipeline.counter_rng import DrawKeys, uniform
from data_pipeline.schema import Schema

Probability = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0, le=1)]

CROP_ATTEMPTS = 10
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as PIL; torchvision's tensors use 0.2989

_DRAWS = {
    "area": CROP_ATTEMPTS,
    "aspect": CROP_ATTEMPTS,
    "place": 2,
    "jitter": 1,
    "jitter_order": 4,
    "jitter_factors": 4,
    "grayscale": 1,
    "blur": 1,
    "sigma": 1,
    "flip": 1,
}
_PURPOSE = 0


class ExpertImageConfig(Schema):
    """The published policy: the crop's share of the area and its aspect (width / height, log-uniform), the strengths of
    torchvision's ColorJitter, the blur's sigma in pixels (uniform), and the probability of each operation.
    """

    kind: Literal["expert_image"] = "expert_image"
    area: tuple[float, float] = (0.2, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    jitter_probability: Probability = 0.8
    brightness: Strength = 0.4
    contrast: Strength = 0.4
    saturation: Strength = 0.4
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    grayscale_probability: Probability = 0.2
    blur_probability: Probability = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    flip_probability: Probability = 0.5

    @model_validator(mode="after")
    def _ranges_ascend(self) -> Self:
        for name, (low, high) in {"area": self.area, "aspect": self.aspect, "blur_sigma": self.blur_sigma}.items():
            if not 0 < low <= high:
                raise ValueError(f"{name} must be two ascending positive numbers, got {low} and {high}")
        if self.area[1] > 1:
            raise ValueError(f"area is a share of the picture, at most 1, got {self.area[1]}")
        return self


@dataclass(frozen=True)
class ExpertDraws:
    """All that is random in one view of each sample.

    Attributes:
        top_B, left_B, height_B, width_B: the crop box in whole pixels, float32.
        factor_B4: factor of brightness, contrast and saturation (1: unchanged), shift of hue in turns (0: unchanged).
        order_B4: int64, which of the four happens first, second, third, fourth.
        gray_B: bool.
        sigma_B: of the blur, in pixels; 0 where there is none.
        flip_B: bool.
    """

    top_B: Tensor
    left_B: Tensor
    height_B: Tensor
    width_B: Tensor
    factor_B4: Tensor
    order_B4: Tensor
    gray_B: Tensor
    sigma_B: Tensor
    flip_B: Tensor


class ExpertImage(nn.Module):
    """`policy(images_BCHW, keys) -> views_BCHW`; it has no parameters and its draws depend on `keys` alone."""

    def __init__(self, config: ExpertImageConfig) -> None:
        super().__init__()
        self.config = config

    @torch.no_grad()
    def forward(self, images_BCHW: Tensor, keys: DrawKeys) -> Tensor:
        """One view of each picture: (B, 3, S, S) float32 in [0, 1] to the same, not normalised. Not for autocast.

        Raises:
            ValueError: the pictures are not square RGB.
        """
        _, C, H, W = images_BCHW.shape
        if C != 3 or H != W:
            raise ValueError(f"expert image views need square RGB pictures, got {C} channels of {H} x {W} pixels")
        return apply_draws(images_BCHW, draw(self.config, keys, size=H))


def draw(config: ExpertImageConfig, keys: DrawKeys, *, size: int) -> ExpertDraws:
    """Draw one view's parameters for each key, for pictures of (size, size) pixels."""
    numbers = torch.split(uniform(keys, sum(_DRAWS.values()), purpose=_PURPOSE), list(_DRAWS.values()), dim=1)
    u = dict(zip(_DRAWS, numbers, strict=True))

    height_B, width_B = _draw_crop_size(config, u["area"], u["aspect"], size=size)
    top_B = torch.floor(u["place"][:, 0] * (size - height_B + 1))
    left_B = torch.floor(u["place"][:, 1] * (size - width_B + 1))

    change_B4 = (2 * u["jitter_factors"] - 1) * (u["jitter"] < config.jitter_probability)
    brightness_B, contrast_B, saturation_B, hue_B = change_B4.unbind(dim=1)
    factors = [1 + config.brightness * brightness_B, 1 + config.contrast * contrast_B]
    factors += [1 + config.saturation * saturation_B, config.hue * hue_B]

    sigma_B1 = _between(config.blur_sigma, u["sigma"]) * (u["blur"] < config.blur_probability)
    return ExpertDraws(
        top_B=top_B,
        left_B=left_B,
        height_B=height_B,
        width_B=width_B,
        factor_B4=torch.stack(factors, dim=1),
        order_B4=u["jitter_order"].argsort(dim=1, stable=True),
        gray_B=u["grayscale"][:, 0] < config.grayscale_probability,
        sigma_B=sigma_B1[:, 0],
        flip_B=u["flip"][:, 0] < config.flip_probability,
    )


def apply_draws(images_BCHW: Tensor, draws: ExpertDraws) -> Tensor:
    """The views that `draws` describe. The flip, last in the policy, commutes with all but the crop and is part of it.

    (B, 3, S, S) float32 in [0, 1] to the same.
    """
    size = images_BCHW.shape[-1]
    rows_BQP = crop_matrix(draws.top_B, draws.height_B, size=size)
    columns_BQP = crop_matrix(draws.left_B, draws.width_B, size=size, mirror_B=draws.flip_B)
    x_BCHW = apply_matrices(images_BCHW, rows_BQP, columns_BQP)
    jitter_colour_(x_BCHW, draws.factor_B4, draws.order_B4)
    x_BCHW.lerp_(luma(x_BCHW), _per_picture(draws.gray_B.to(x_BCHW.dtype)))
    blur_BQP = blur_matrix(draws.sigma_B, size=size)
    return apply_matrices(x_BCHW, blur_BQP, blur_BQP)


def crop_matrix(start_B: Tensor, length_B: Tensor, *, size: int, mirror_B: Tensor | None = None) -> Tensor:
    """(B, size, size) weights that stretch pixels start .. start + length - 1 of an axis over the whole of it.

    Bilinear with half-pixel centres and the edge pixels repeated. A crop is never larger than its picture, so the axis
    is only ever stretched, where torchvision's and PIL's antialiasing changes nothing. `mirror_B` (bool) reverses it.
    """
    pixel_P = torch.arange(size, device=start_B.device, dtype=start_B.dtype)
    centre_BQ = (pixel_P + 0.5) * (length_B / size)[:, None] - 0.5
    source_BQ = centre_BQ.clamp_min(0).minimum((length_B - 1)[:, None]) + start_B[:, None]
    if mirror_B is not None:
        source_BQ = torch.where(mirror_B[:, None], source_BQ.flip(1), source_BQ)
    return (source_BQ[:, :, None] - pixel_P).abs_().neg_().add_(1).clamp_min_(0)


def blur_matrix(sigma_B: Tensor, *, size: int) -> Tensor:
    """(B, size, size) weights of a Gaussian along one axis, edge pixels repeated; the identity where sigma is 0.

    The true Gaussian, as far as float32 sees it: PIL's `GaussianBlur(radius=sigma)` approximates it by box filters.
    """
    distance_P = torch.arange(size, device=sigma_B.device, dtype=sigma_B.dtype)
    exponent_BP = distance_P.square() * (-0.5 / sigma_B.clamp_min(1e-3).square())[:, None]
    # exp(-20) is under float32's resolution of a sum of 1; subnormal weights would slow the products a hundredfold.
    weight_BP = exponent_BP.clamp_min(-20).exp_() * (exponent_BP > -20)
    weight_BP = weight_BP / (2 * weight_BP.sum(dim=1, keepdim=True) - weight_BP[:, :1])
    both_sides_BD = torch.cat([weight_BP.flip(1)[:, :-1], weight_BP], dim=1)
    matrix_BQP = both_sides_BD.unfold(1, size, 1).flip(1)
    beyond_BQ = weight_BP.flip(1).cumsum(dim=1)
    matrix_BQP[:, :, 0] = beyond_BQ.flip(1)
    matrix_BQP[:, :, -1] = beyond_BQ
    return matrix_BQP


def apply_matrices(x_BCHW: Tensor, rows_BQP: Tensor, columns_BQP: Tensor) -> Tensor:
    """Each sample's `rows @ channel @ columns.T`."""
    B, C, H, W = x_BCHW.shape
    across_BCHW = torch.bmm(x_BCHW.reshape(B, C * H, W), columns_BQP.mT).view(B, C, H, W)
    return torch.matmul(rows_BQP[:, None], across_BCHW)


def jitter_colour_(x_BCHW: Tensor, factor_B4: Tensor, order_B4: Tensor) -> Tensor:
    """torchvision's ColorJitter, in place, with a factor and an order for each sample (see `ExpertDraws`).

    Of the four operations three are blends. Hue is changed once; the blends that come before it in a sample's order are
    done before, the others after, and a blend out of turn has the factor 1.
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
    """`factor * x + (1 - factor) * reference`, clamped to [0, 1], in place.

    The reference is black (BRIGHTNESS), the picture's mean luma (CONTRAST) or each pixel's own luma (SATURATION).
    """
    reference_B1HW = luma(x_BCHW)
    mean_B = reference_B1HW.mean(dim=(1, 2, 3)) * (1 - factor_B) * (operation_B == CONTRAST)
    reference_B1HW.mul_(_per_picture((1 - factor_B) * (operation_B == SATURATION))).add_(_per_picture(mean_B))
    return x_BCHW.mul_(_per_picture(factor_B)).add_(reference_B1HW).clamp_(0, 1)


def luma(x_BCHW: Tensor) -> Tensor:
    """(B, 1, H, W) brightness as the eye weighs it."""
    red, green, blue = LUMA
    return (x_BCHW[:, :1] * red).add_(x_BCHW[:, 1:2], alpha=green).add_(x_BCHW[:, 2:], alpha=blue)


def shift_hue_(x_BCHW: Tensor, turns_B: Tensor) -> Tensor:
    """Turn the hue by `turns` of the colour circle in HSV, in place; value and saturation stay as they are.

    Keeping those two means that the largest and the smallest channel keep their values; only where each channel lies
    between the two is computed anew, a trapezoid over the hue. The hue is counted in sixths of a turn from red, from -3
    to 3. Its size has one formula in all six sectors, |hue| = (most - 2 least + green + blue - red) / (most - least):
    say green > red > blue, then it is 2 - (red - least) / (most - least). Its sign is that of green - blue.
    """
    red_BHW, green_BHW, blue_BHW = x_BCHW.unbind(dim=1)
    least_BHW = torch.minimum(green_BHW, blue_BHW).minimum(red_BHW)
    span_BHW = torch.maximum(green_BHW, blue_BHW).maximum(red_BHW)

    hue_BHW = (green_BHW + blue_BHW).sub_(red_BHW).add_(span_BHW).sub_(least_BHW, alpha=2)
    span_BHW -= least_BHW
    hue_BHW /= span_BHW.clamp_min(1e-8)  # a grey pixel has no hue: whatever comes out is multiplied by its span, 0
    hue_BHW.copysign_(green_BHW.sub_(blue_BHW)).add_(6 * turns_B[:, None, None])
    hue_BHW.sub_(torch.round(hue_BHW / 6), alpha=6)

    torch.abs(hue_BHW, out=red_BHW).neg_().add_(2)
    torch.add(hue_BHW, 1, out=green_BHW).abs_().sub_(1)
    torch.sub(hue_BHW, 1, out=blue_BHW).abs_().sub_(1)
    return x_BCHW.clamp_(0, 1).mul_(span_BHW[:, None]).add_(least_BHW[:, None])


def _draw_crop_size(
    config: ExpertImageConfig, area_BT: Tensor, aspect_BT: Tensor, *, size: int
) -> tuple[Tensor, Tensor]:
    """(height_B, width_B): of T attempts the first whose box fits in the picture; the whole picture if none does."""
    area_BT = size**2 * _between(config.area, area_BT)
    aspect_BT = torch.exp(_between((math.log(config.aspect[0]), math.log(config.aspect[1])), aspect_BT))
    width_BT = torch.round(torch.sqrt(area_BT * aspect_BT))
    height_BT = torch.round(torch.sqrt(area_BT / aspect_BT))
    fits_BT = (width_BT.minimum(height_BT) > 0) & (width_BT.maximum(height_BT) <= size)
    first_B1 = fits_BT.to(torch.uint8).argmax(dim=1, keepdim=True)
    any_B = fits_BT.any(dim=1)
    height_B, width_B = (
        torch.where(any_B, side_BT.gather(1, first_B1)[:, 0], float(size)) for side_BT in (height_BT, width_BT)
    )
    return height_B, width_B


def _between(limits: tuple[float, float], u: Tensor) -> Tensor:
    low, high = limits
    return low + (high - low) * u


def _per_picture(x_B: Tensor) -> Tensor:
    return x_B[:, None, None, None]
