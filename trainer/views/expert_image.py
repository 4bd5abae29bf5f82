"""Expert views of pictures: crop, flip, colour jitter, grayscale and blur of a whole batch at once, or any of them.

The default policy is that of contrastive learning (Chen et al. 2020) in the strength that "Feature Dropout" (Tamkin et
al. 2022) used; `huang_views` has those of Huang et al. (2023), who compare the transforms alone and composed. Every
operation has the meaning of torchvision's transform of the same name, in floating point: nothing is rounded to 256
levels between operations, as a chain of PIL pictures is.

What makes it fast: crop, blur and flip are linear along rows and columns, so each is a (size, size) matrix for every
sample, and the batch needs four batched matrix products instead of gathers. On a CPU, rows that are made of few others
are summed from those alone, and pictures without blur are left out. Brightness, contrast and
saturation are one formula with other coefficients, so a random order costs six cheap passes and a single change of hue.
An operation that the config switches off is neither drawn nor computed, and changes no draw of the others.

Legend: B samples, C = 3 channels, H rows, W columns, P pixels of an axis before an operation, Q after it, T rows that
one row is made of, S samples of a batch that something happens to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from data_pipeline.core.counter_rng import DrawKeys, uniform
from data_pipeline.core.schema import PositiveShare, Schema, Share

Aspect = Annotated[float, Field(ge=0.01, le=100)]
Sigma = Annotated[float, Field(ge=0.01, le=1_000)]  # pixels; twice its square divides

HUANG_LETTERS = "abcde"  # crop, blur, grayscale, jitter, flip: the letters of the paper's tables
CROP_ATTEMPTS = 10
CONSTANT_BLUR_REACH = 3  # pixels to either side
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
    """The crop's share of the area (None: no crop) and its aspect (width / height, log-uniform), the strengths of
    torchvision's ColorJitter, the blur, and the probability of each operation, of which 0 switches it off.

    A "pil" blur, as published by Tamkin et al. (2022), is what PIL's GaussianBlur computes, without its rounding. A
    "gaussian" one has the weights of a true Gaussian at whole pixels, which blurs less below a sigma of 0.5. Both have
    a sigma in pixels, uniform in `blur_sigma`. The "constant" one is PIL's with radius 1: the published code of Huang
    et al. (2023) draws a radius of 1.28 to 1.92 for pictures of 32 pixels, but rounds it down.
    """

    kind: Literal["expert_image"] = "expert_image"
    area: tuple[PositiveShare, PositiveShare] | None = (0.2, 1.0)
    aspect: tuple[Aspect, Aspect] = (3 / 4, 4 / 3)
    jitter_probability: Share = 0.8
    brightness: Share = 0.4
    contrast: Share = 0.4
    saturation: Share = 0.4
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    grayscale_probability: Share = 0.2
    blur_probability: Share = 0.5
    blur: Literal["pil", "gaussian", "constant"] = "pil"
    blur_sigma: tuple[Sigma, Sigma] = (0.1, 2.0)
    flip_probability: Share = 0.5

    @model_validator(mode="after")
    def _ranges_ascend(self) -> Self:
        area = (1.0, 1.0) if self.area is None else self.area
        for name, (low, high) in {"area": area, "aspect": self.aspect, "blur_sigma": self.blur_sigma}.items():
            if not 0 < low <= high:
                raise ValueError(f"{name} must be two ascending positive numbers, got {low} and {high}")
        if area[1] > 1:
            raise ValueError(f"area is a share of the picture, at most 1, got {area[1]}")
        return self

    @property
    def jitters(self) -> bool:
        return self.jitter_probability > 0 and any((self.brightness, self.contrast, self.saturation, self.hue))


def huang_views(letters: str, *, strength: float = 0.5, jitter_probability: float = 0.8) -> ExpertImageConfig:
    """The policy of some of the transforms that Huang et al. (2023) compare, named by their letters, in any order.

    a: crop of 0.08 to 1 of the area; b: blur with probability 0.5, constant as in the published code; c: grayscale with
    probability 0.2; d: colour jitter, of which `strength` multiplies the strengths 0.8, 0.8, 0.8 and 0.2; e: flip with
    probability 0.5. They happen in the order a, e, d, c, b. The paper's table of colour strengths has the letters "ad",
    the jitter probability 1, and the strengths 1, 1/2, 1/4 and 1/8.

    Raises:
        ValueError: other letters, a letter twice or none at all; a strength that is not above 0 and at most 1.25.
    """
    if not letters or len(set(letters)) < len(letters) or not set(letters) <= set(HUANG_LETTERS):
        raise ValueError(f'the views must be one or more letters of "{HUANG_LETTERS}", each once, got "{letters}"')
    if not 0 < strength <= 1.25:
        raise ValueError(f"the strength of the colour jitter must be above 0 and at most 1.25, got {strength}")
    return ExpertImageConfig(
        area=(0.08, 1.0) if "a" in letters else None,
        jitter_probability=jitter_probability if "d" in letters else 0.0,
        brightness=0.8 * strength,
        contrast=0.8 * strength,
        saturation=0.8 * strength,
        hue=0.2 * strength,
        grayscale_probability=0.2 if "c" in letters else 0.0,
        blur_probability=0.5 if "b" in letters else 0.0,
        blur="constant",
        flip_probability=0.5 if "e" in letters else 0.0,
    )


# The picture itself, twice.
NO_VIEWS: Final = ExpertImageConfig(
    area=None, jitter_probability=0.0, grayscale_probability=0.0, blur_probability=0.0, flip_probability=0.0
)


@dataclass(frozen=True)
class CropDraws:
    """The crop boxes, (B,) each, in whole pixels, float32."""

    top_B: Tensor
    left_B: Tensor
    height_B: Tensor
    width_B: Tensor


@dataclass(frozen=True)
class JitterDraws:
    """What happens to the colours.

    Attributes:
        factor_B4: factor of brightness, contrast and saturation (1: unchanged), shift of hue in turns (0: unchanged).
        order_B4: int64, which of the four happens first, second, third, fourth.
    """

    factor_B4: Tensor
    order_B4: Tensor


@dataclass(frozen=True)
class ExpertDraws:
    """All that is random in one view of each sample; None for an operation that is switched off.

    Attributes:
        crop, jitter: see there.
        flip_B, gray_B: bool.
        pil_sigma_B, sigma_B: of PIL's blur and of the Gaussian one, in pixels; 0 for a picture without blur.
        constant_blur_B: bool. Of these three at most one is not None.
    """

    crop: CropDraws | None
    flip_B: Tensor | None
    jitter: JitterDraws | None
    gray_B: Tensor | None
    pil_sigma_B: Tensor | None
    sigma_B: Tensor | None
    constant_blur_B: Tensor | None


def check_image_size(*, height: int, width: int) -> None:
    """Raises `ValueError` unless pictures of that size are square."""
    if height != width:
        raise ValueError(
            f"expert image views need square pictures, got {height} x {width} pixels; build them with --image-size"
        )


class ExpertImage(nn.Module):
    """`policy(images_BCHW, keys, masks_BHW) -> views_BCHW`; no parameters, and draws that depend on `keys` alone."""

    def __init__(self, config: ExpertImageConfig) -> None:
        super().__init__()
        self.config = config

    @torch.no_grad()
    def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """One view of each picture: (B, 3, S, S) float32 in [0, 1] to the same, not normalised. Not for autocast.

        The masks are those of any view policy; an expert ignores them.

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

    crop = flip_B = jitter = gray_B = pil_sigma_B = sigma_B = constant_blur_B = None
    if config.area is not None:
        height_B, width_B = _draw_crop_size(config.area, config.aspect, u["area"], u["aspect"], size=size)
        top_B = torch.floor(u["place"][:, 0] * (size - height_B + 1))
        left_B = torch.floor(u["place"][:, 1] * (size - width_B + 1))
        crop = CropDraws(top_B=top_B, left_B=left_B, height_B=height_B, width_B=width_B)
    if config.flip_probability:
        flip_B = u["flip"][:, 0] < config.flip_probability
    if config.jitters:
        change_B4 = (2 * u["jitter_factors"] - 1) * (u["jitter"] < config.jitter_probability)
        brightness_B, contrast_B, saturation_B, hue_B = change_B4.unbind(dim=1)
        factors = [1 + config.brightness * brightness_B, 1 + config.contrast * contrast_B]
        factors += [1 + config.saturation * saturation_B, config.hue * hue_B]
        order_B4 = u["jitter_order"].argsort(dim=1, stable=True)
        jitter = JitterDraws(factor_B4=torch.stack(factors, dim=1), order_B4=order_B4)
    if config.grayscale_probability:
        gray_B = u["grayscale"][:, 0] < config.grayscale_probability
    if config.blur_probability:
        blurred_B = u["blur"][:, 0] < config.blur_probability
        drawn_sigma_B = _between(config.blur_sigma, u["sigma"])[:, 0] * blurred_B
        match config.blur:
            case "pil":
                pil_sigma_B = drawn_sigma_B
            case "gaussian":
                sigma_B = drawn_sigma_B
            case "constant":
                constant_blur_B = blurred_B
    return ExpertDraws(
        crop=crop,
        flip_B=flip_B,
        jitter=jitter,
        gray_B=gray_B,
        pil_sigma_B=pil_sigma_B,
        sigma_B=sigma_B,
        constant_blur_B=constant_blur_B,
    )


def apply_draws(images_BCHW: Tensor, draws: ExpertDraws) -> Tensor:
    """The views that `draws` describe: crop, flip, jitter, grayscale, blur.

    A flip last of all, as in the default policy's source, is the same: it commutes with all but the crop. A blur
    commutes with grayscale, but not with the jitter, which clamps; where it can, a CPU joins the blur from column to
    column to the crop.

    (B, 3, S, S) float32 in [0, 1] to the same, in memory of its own.
    """
    blurs_while_cropping = draws.crop is not None and draws.jitter is None and images_BCHW.device.type == "cpu"
    blurred_columns_B = draws.constant_blur_B if blurs_while_cropping else None
    x_BCHW = _crop_and_flip(images_BCHW, draws.crop, draws.flip_B, blurred_columns_B)
    if draws.jitter is not None:
        jitter_colour_(x_BCHW, draws.jitter.factor_B4, draws.jitter.order_B4)
    if draws.gray_B is not None:
        x_BCHW.lerp_(luma(x_BCHW), _per_picture(draws.gray_B.to(x_BCHW.dtype)))
    if draws.pil_sigma_B is not None:
        x_BCHW = blur_(x_BCHW, draws.pil_sigma_B, pil_blur_matrix)
    if draws.sigma_B is not None:
        x_BCHW = blur_(x_BCHW, draws.sigma_B, gaussian_blur_matrix)
    if draws.constant_blur_B is not None:
        constantly_ = constant_blur_rows_ if blurs_while_cropping else constant_blur_
        x_BCHW = constantly_(x_BCHW, draws.constant_blur_B)
    return x_BCHW


def crop_matrix(start_B: Tensor, length_B: Tensor, *, size: int, mirror_B: Tensor | None = None) -> Tensor:
    """(B, size, size) weights that stretch pixels start .. start + length - 1 of an axis over the whole of it.

    Bilinear with half-pixel centres and the edge pixels repeated. A crop is never larger than its picture, so the axis
    is only ever stretched, where torchvision's and PIL's antialiasing changes nothing. `mirror_B` (bool) reverses it.
    """
    source_BQ = _crop_source(start_B, length_B, size=size)
    if mirror_B is not None:
        source_BQ = torch.where(mirror_B[:, None], source_BQ.flip(1), source_BQ)
    pixel_P = torch.arange(size, device=start_B.device, dtype=start_B.dtype)
    return (source_BQ[:, :, None] - pixel_P).abs_().neg_().add_(1).clamp_min_(0)


def crop_taps(start_B: Tensor, length_B: Tensor, *, size: int) -> tuple[Tensor, Tensor]:
    """The two pixels that each row of `crop_matrix` weighs, (B, size, 2) int64, and their weights.

    At the last pixel of the axis, which has no next one, the second weight is 0.
    """
    source_BQ = _crop_source(start_B, length_B, size=size)
    tap_BQT = torch.stack([source_BQ.floor(), source_BQ.floor() + 1], dim=2)
    weight_BQT = (source_BQ[:, :, None] - tap_BQT).abs_().neg_().add_(1)
    return tap_BQT.clamp_max_(size - 1).long(), weight_BQT


def _crop_source(start_B: Tensor, length_B: Tensor, *, size: int) -> Tensor:
    """(B, size) places on the axis, in pixels, that a crop's pixels are read from."""
    pixel_Q = torch.arange(size, device=start_B.device, dtype=start_B.dtype)
    centre_BQ = (pixel_Q + 0.5) * (length_B / size)[:, None] - 0.5
    return centre_BQ.clamp_min(0).minimum((length_B - 1)[:, None]) + start_B[:, None]


def gaussian_blur_matrix(sigma_B: Tensor, *, size: int) -> Tensor:
    """Return the (B, size, size) weights of a Gaussian along one axis; the identity for a sigma of 0.

    The weights are those of the true Gaussian at whole pixels, as far as float32 sees it. Edge pixels are repeated.
    """
    distance_P = torch.arange(size, device=sigma_B.device, dtype=sigma_B.dtype)
    exponent_BP = distance_P.square() * (-0.5 / sigma_B.clamp_min(1e-3).square())[:, None]
    # exp(-20) is under float32's resolution of a sum of 1; subnormal weights would slow the products a hundredfold.
    weight_BP = exponent_BP.clamp_min(-20).exp_() * (exponent_BP > -20)
    return _matrix_of_filter(weight_BP / (2 * weight_BP.sum(dim=1, keepdim=True) - weight_BP[:, :1]))


def pil_blur_matrix(sigma_B: Tensor, *, size: int) -> Tensor:
    """Return the (B, size, size) weights of PIL's `GaussianBlur(radius=sigma)` along one axis; the identity for 0.

    PIL takes three box filters, each with a third of the Gaussian's variance (Gwosdek et al. 2011). A box reaches a
    whole number of pixels and a fraction of the next one to either side. Edge pixels are repeated, anew for each box.
    """
    variance_B = sigma_B.square() / 3
    whole_B = torch.floor((torch.sqrt(12 * variance_B + 1) - 1) / 2)
    fraction_B = (2 * whole_B + 1) * (whole_B * (whole_B + 1) - 3 * variance_B)
    fraction_B /= 6 * (variance_B - (whole_B + 1).square())
    reach_B1 = (whole_B + fraction_B)[:, None]
    distance_P = torch.arange(size, device=sigma_B.device, dtype=sigma_B.dtype)
    weight_BP = (reach_B1 + 1 - distance_P).clamp_min_(0)
    weight_BP[:, :-1].clamp_max_(1)  # the last one stands for all greater distances, too: the edge pixel has them
    box_BQP = _matrix_of_filter(weight_BP / (2 * reach_B1 + 1))
    return box_BQP @ box_BQP @ box_BQP


def _matrix_of_filter(weight_BP: Tensor) -> Tensor:
    """Return the (B, P, P) weights of a symmetric filter with repeated edge pixels, given the weight of each distance.

    `weight_BP` (B, P): the last one is that of all distances from P - 1 on. P is at least 2.
    """
    size = weight_BP.shape[1]
    both_sides_BD = torch.cat([weight_BP.flip(1)[:, :-1], weight_BP], dim=1)
    matrix_BQP = both_sides_BD.unfold(1, size, 1).flip(1)
    beyond_BQ = weight_BP.flip(1).cumsum(dim=1)
    matrix_BQP[:, :, 0] = beyond_BQ.flip(1)
    matrix_BQP[:, :, -1] = beyond_BQ
    return matrix_BQP


def constant_blur_matrix(*, size: int, device: torch.device | None = None) -> Tensor:
    """(size, size) weights of PIL's `GaussianBlur(radius=1)` along one axis.

    PIL takes three box filters whose variances add up to that of the Gaussian. For radius 1 the box is 3/2 pixels wide
    and has the weights 1/6, 2/3, 1/6; edge pixels are repeated, anew for each of the three.
    """
    identity_QP = torch.eye(size, device=device)
    pixel_Q = torch.arange(size, device=device)
    above_QP, below_QP = identity_QP[(pixel_Q - 1).clamp_min(0)], identity_QP[(pixel_Q + 1).clamp_max(size - 1)]
    box_QP = (4 * identity_QP + above_QP + below_QP) / 6
    return box_QP @ box_QP @ box_QP


def band_taps(matrix_QP: Tensor, *, reach: int) -> tuple[Tensor, Tensor]:
    """The pixels within `reach` of each row's own, (Q, T) int64, and their weights in a square matrix.

    A tap beyond the edge is the edge pixel with the weight 0.
    """
    size, device = len(matrix_QP), matrix_QP.device
    tap_QT = torch.arange(size, device=device)[:, None] + torch.arange(-reach, reach + 1, device=device)
    is_pixel_QT = (tap_QT >= 0) & (tap_QT < size)
    tap_QT.clamp_(0, size - 1)
    return tap_QT, matrix_QP.gather(1, tap_QT) * is_pixel_QT


def apply_matrices(x_BCHW: Tensor, rows_BQP: Tensor, columns_BQP: Tensor) -> Tensor:
    """Each sample's `rows @ channel @ columns.T`."""
    return torch.matmul(rows_BQP[:, None], apply_to_columns(x_BCHW, columns_BQP))


def apply_to_columns(x_BCHW: Tensor, columns_BQP: Tensor) -> Tensor:
    """Each sample's `channel @ columns.T`."""
    B, C, H, W = x_BCHW.shape
    return torch.bmm(x_BCHW.reshape(B, C * H, W), columns_BQP.mT).view(B, C, H, W)


def sum_rows(x_BCHW: Tensor, tap_BQT: Tensor, weight_BQT: Tensor) -> Tensor:
    """Row q of the result is the sum over t of `weight[q, t]` times row `tap[q, t]`: `rows @ channel` for few weights.

    Equal to that product to the last bits of float32. A processor does not multiply the zeros of the matrix.
    """
    B, C, H, W = x_BCHW.shape
    _, Q, T = tap_BQT.shape  # of one sample, where all have the same
    first_BC11 = torch.arange(0, B * C * H, H, device=x_BCHW.device).view(B, C, 1, 1)
    row_XT = (tap_BQT[:, None] + first_BC11).view(-1, T)
    weight_XT = weight_BQT[:, None].expand(B, C, Q, T).reshape(-1, T)
    y_XW = F.embedding_bag(row_XT, x_BCHW.reshape(-1, W), per_sample_weights=weight_XT, mode="sum")
    return y_XW.view(B, C, Q, W)


def blur_(x_BCHW: Tensor, sigma_B: Tensor, matrix_of: Callable[..., Tensor]) -> Tensor:
    """Blur each picture with a sigma of its own, 0: not at all; on a CPU in place.

    `matrix_of` is `pil_blur_matrix` or `gaussian_blur_matrix`. A CPU leaves pictures without blur out, with the same
    bits as a result. Elsewhere all are multiplied: to know which ones need not be would mean to wait for the device.
    """
    size = x_BCHW.shape[-1]
    if x_BCHW.device.type != "cpu":
        matrix_BQP = matrix_of(sigma_B, size=size)
        return apply_matrices(x_BCHW, matrix_BQP, matrix_BQP)
    some_S = sigma_B.nonzero()[:, 0]
    matrix_SQP = matrix_of(sigma_B[some_S], size=size)
    return x_BCHW.index_copy_(0, some_S, apply_matrices(x_BCHW.index_select(0, some_S), matrix_SQP, matrix_SQP))


def constant_blur_(x_BCHW: Tensor, blurred_B: Tensor) -> Tensor:
    """Blur some of the pictures as PIL's `GaussianBlur(radius=1)` does; on a CPU in place.

    A CPU leaves the others out, and elsewhere all are multiplied, as in `blur_`.
    """
    matrix_QP = constant_blur_matrix(size=x_BCHW.shape[-1], device=x_BCHW.device)
    if x_BCHW.device.type != "cpu":
        matrix_BQP = matrix_QP.expand(len(x_BCHW), -1, -1)
        return torch.where(_per_picture(blurred_B), apply_matrices(x_BCHW, matrix_BQP, matrix_BQP), x_BCHW)
    some_S = blurred_B.nonzero()[:, 0]
    across_SCHW = apply_to_columns(x_BCHW.index_select(0, some_S), matrix_QP.expand(len(some_S), -1, -1))
    return x_BCHW.index_copy_(0, some_S, _blur_rows(across_SCHW, matrix_QP))


def constant_blur_rows_(x_BCHW: Tensor, blurred_B: Tensor) -> Tensor:
    """The half of `constant_blur_` that goes from row to row, on a CPU, in place."""
    matrix_QP, some_S = constant_blur_matrix(size=x_BCHW.shape[-1]), blurred_B.nonzero()[:, 0]
    return x_BCHW.index_copy_(0, some_S, _blur_rows(x_BCHW.index_select(0, some_S), matrix_QP))


def _blur_rows(x_BCHW: Tensor, matrix_QP: Tensor) -> Tensor:
    tap_QT, weight_QT = band_taps(matrix_QP, reach=CONSTANT_BLUR_REACH)
    return sum_rows(x_BCHW, tap_QT[None], weight_QT[None])


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


def _crop_and_flip(
    images_BCHW: Tensor, crop: CropDraws | None, flip_B: Tensor | None, blurred_columns_B: Tensor | None = None
) -> Tensor:
    """A contiguous copy, even where there is nothing to do.

    A crop on a CPU can blur some pictures from column to column as it goes: the other half of `constant_blur_rows_`.
    """
    if crop is not None:
        size = images_BCHW.shape[-1]
        columns_BQP = crop_matrix(crop.left_B, crop.width_B, size=size, mirror_B=flip_B)
        if images_BCHW.device.type != "cpu":
            return apply_matrices(images_BCHW, crop_matrix(crop.top_B, crop.height_B, size=size), columns_BQP)
        if blurred_columns_B is not None:
            some_S = blurred_columns_B.nonzero()[:, 0]
            columns_SQP = constant_blur_matrix(size=size) @ columns_BQP.index_select(0, some_S)
            columns_BQP.index_copy_(0, some_S, columns_SQP)
        taps = crop_taps(crop.top_B, crop.height_B, size=size)
        return sum_rows(apply_to_columns(images_BCHW, columns_BQP), *taps)
    x_BCHW = images_BCHW.clone(memory_format=torch.contiguous_format)
    return x_BCHW if flip_B is None else x_BCHW.lerp_(x_BCHW.flip(3), _per_picture(flip_B.to(x_BCHW.dtype)))


def _draw_crop_size(
    area: tuple[float, float], aspect: tuple[float, float], area_BT: Tensor, aspect_BT: Tensor, *, size: int
) -> tuple[Tensor, Tensor]:
    """(height_B, width_B): of T attempts the first whose box fits in the picture; the whole picture if none does."""
    area_BT = size**2 * _between(area, area_BT)
    aspect_BT = torch.exp(_between((math.log(aspect[0]), math.log(aspect[1])), aspect_BT))
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
