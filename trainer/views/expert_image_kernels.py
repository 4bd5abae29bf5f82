# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Expert views of pictures on a GPU, in three kernels of Triton: the draws; crop, flip and colours; PIL's blur.

A program makes the view of one picture, some pixels after the other. Contrast needs the mean luma of the whole picture.
So a program computes all pixels twice: up to contrast for the mean, then to the end. Nothing is stored in between, and
a picture can have any size.

The results are those of `ExpertImage.apply_draws` up to rounding.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys
from trainer.triton_works import launch
from trainer.views.colour import CONTRAST, HUE, LUMA, SATURATION
from trainer.views.resampling import blur, pil_blur_matrix

_LARGEST_BLURRED: Final = 32  # pixels of a side: larger matrices do not fit the registers of a program
_PIXELS: tl.constexpr = tl.constexpr(512)  # of a picture that the threads of a program compute at once
_CONTRAST: tl.constexpr = tl.constexpr(CONTRAST)
_SATURATION: tl.constexpr = tl.constexpr(SATURATION)
_HUE: tl.constexpr = tl.constexpr(HUE)
_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_RED: tl.constexpr = tl.constexpr(LUMA[0])
_GREEN: tl.constexpr = tl.constexpr(LUMA[1])
_BLUE: tl.constexpr = tl.constexpr(LUMA[2])


@triton.jit
def _mix(x):
    """Hash as `data_pipeline.core.counter_rng` does."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(key, first, NUM: tl.constexpr):
    """Return numbers `first` to `first + NUM - 1` of `data_pipeline.core.counter_rng.uniform`."""
    counter = (first + 1 + tl.arange(0, NUM)).to(tl.uint64)
    return (_mix(key + counter * _GOLDEN) >> 40).to(tl.float32) * (1 / 16777216)


@triton.jit
def _key(index_ptr, is_next_ptr, epoch_ptr, seed, epoch, view, purpose, row):
    """Return the key of a row's numbers."""
    if epoch_ptr is not None:
        epoch = tl.load(epoch_ptr)
    if is_next_ptr is not None:
        view += tl.load(is_next_ptr + row).to(tl.int32)
    state = _mix(_mix(seed.to(tl.uint64) + _GOLDEN) + epoch.to(tl.uint64) + _GOLDEN)
    state = _mix(_mix(state + view.to(tl.uint64) + _GOLDEN) + purpose + _GOLDEN)
    return _mix(state + tl.load(index_ptr + row).to(tl.uint64))


@triton.jit(do_not_specialize=["seed", "epoch", "view"])
def _draw_kernel(
    index_ptr, is_next_ptr, epoch_ptr, seed, epoch, view, box_ptr, flip_ptr, factor_ptr, order_ptr, gray_ptr, sigma_ptr,
    H: tl.constexpr, W: tl.constexpr, AREA: tl.constexpr, ASPECT: tl.constexpr, MIDDLE: tl.constexpr,
    STRENGTHS: tl.constexpr, SIGMA: tl.constexpr, CHANCES: tl.constexpr,
):  # fmt: skip
    """Draw the view of one picture as `trainer.views.expert_image.draw` does; None for what is not wanted.

    AREA, ASPECT (logarithms) and SIGMA are limits. CHANCES are of flip, jitter, grayscale and blur.
    """
    picture = tl.program_id(0)
    key = _key(index_ptr, is_next_ptr, epoch_ptr, seed, epoch, view, 0, picture)
    one, two, four = tl.arange(0, 1), tl.arange(0, 2), tl.arange(0, 4)
    if box_ptr is not None:
        attempt = tl.arange(0, 16)
        area = H * W * (AREA[0] + (AREA[1] - AREA[0]) * _uniform(key, 0, 16))
        aspect = tl.exp(ASPECT[0] + (ASPECT[1] - ASPECT[0]) * _uniform(key, 10, 16))
        height = tl.floor(tl.sqrt_rn(tl.div_rn(area, aspect)) + 0.5)
        width = tl.floor(tl.sqrt_rn(area * aspect) + 0.5)
        fits = (attempt < 10) & (height > 0) & (width > 0) & (height <= H) & (width <= W)
        first = tl.min(tl.where(fits, attempt, 16), 0)
        height = tl.sum(tl.where(attempt == first, height, 0.0), 0)
        width = tl.sum(tl.where(attempt == first, width, 0.0), 0)
        side = tl.where(two == 0, height, width)
        start = tl.floor(_uniform(key, 20, 2) * (tl.where(two == 0, H, W) - side + 1))
        if first == 16:  # none fits
            start = tl.where(two == 0, MIDDLE[0], MIDDLE[1])
            side = tl.where(two == 0, MIDDLE[2], MIDDLE[3])
        tl.store(box_ptr + 4 * picture + two, start)
        tl.store(box_ptr + 4 * picture + 2 + two, side)
    if flip_ptr is not None:
        tl.store(flip_ptr + picture + one, _uniform(key, 34, 1) < CHANCES[0])
    if factor_ptr is not None:
        strength = tl.where(four == 0, STRENGTHS[0], tl.where(four == 1, STRENGTHS[1], STRENGTHS[2]))
        strength = tl.where(four == 3, STRENGTHS[3], strength)
        factor = tl.where(_uniform(key, 22, 1) < CHANCES[1], (2 * _uniform(key, 27, 4) - 1) * strength, 0.0)
        tl.store(factor_ptr + 4 * picture + four, factor + tl.where(four < 3, 1.0, 0.0))
        this, other = _uniform(key, 23, 4)[:, None], _uniform(key, 23, 4)[None, :]
        earlier = (other < this) | ((other == this) & (four[None, :] < four[:, None]))
        tl.store(order_ptr + 4 * picture + tl.sum(earlier.to(tl.int32), 1), four.to(tl.int64))
    if gray_ptr is not None:
        tl.store(gray_ptr + picture + one, _uniform(key, 31, 1) < CHANCES[2])
    if sigma_ptr is not None:
        sigma = SIGMA[0] + (SIGMA[1] - SIGMA[0]) * _uniform(key, 33, 1)
        tl.store(sigma_ptr + picture + one, tl.where(_uniform(key, 32, 1) < CHANCES[3], sigma, 0.0))


@triton.jit
def _source(place, start, length, SIZE: tl.constexpr):
    """Return the two pixels of an axis between which a pixel of a crop is read, and the share of the second one."""
    source = (place + 0.5) * tl.div_rn(length, SIZE * 1.0) - 0.5
    source = tl.minimum(tl.maximum(source, 0.0), length - 1) + start
    first = source.to(tl.int32)
    return first, tl.minimum(first + 1, SIZE - 1), source - first


@triton.jit
def _read(x_ptr, above, below, down, left, right, across):
    x = tl.load(x_ptr + above + left)
    upper = x + (tl.load(x_ptr + above + right) - x) * across
    x = tl.load(x_ptr + below + left)
    return upper + (x + (tl.load(x_ptr + below + right) - x) * across - upper) * down


@triton.jit
def _cropped(x_ptr, second, third, box_ptr, flip_ptr, pixel, H: tl.constexpr, W: tl.constexpr):
    """Return three channels of these pixels after crop and flip; all places are inside the picture."""
    row, column = pixel // W, pixel % W
    if flip_ptr is not None:
        column = tl.where(tl.load(flip_ptr), W - 1 - column, column)
    top, left = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    height, width = tl.full((), H, tl.float32), tl.full((), W, tl.float32)
    if box_ptr is not None:
        top, left = tl.load(box_ptr), tl.load(box_ptr + 1)
        height, width = tl.load(box_ptr + 2), tl.load(box_ptr + 3)
    above, below, down = _source(row, top, height, H)
    before, after, across = _source(column, left, width, W)
    red = _read(x_ptr, above * W, below * W, down, before, after, across)
    green = _read(x_ptr + second, above * W, below * W, down, before, after, across)
    return red, green, _read(x_ptr + third, above * W, below * W, down, before, after, across)


@triton.jit
def _luma(red, green, blue):
    return red * _RED + green * _GREEN + blue * _BLUE


@triton.jit
def _with_hue(red, green, blue, turns):
    """Do what `trainer.views.colour.shift_hue_` does, which explains it."""
    least = tl.minimum(tl.minimum(red, green), blue)
    span = tl.maximum(tl.maximum(red, green), blue) - least
    hue = tl.abs(green + blue - red + span - least) / tl.maximum(span, 1e-8)
    hue = tl.where(green < blue, -hue, hue) + 6 * turns
    hue -= 6 * tl.floor(hue / 6 + 0.5)
    red = tl.clamp(2 - tl.abs(hue), 0.0, 1.0) * span + least
    green = tl.clamp(tl.abs(hue + 1) - 1, 0.0, 1.0) * span + least
    return red, green, tl.clamp(tl.abs(hue - 1) - 1, 0.0, 1.0) * span + least


@triton.jit
def _jittered(red, green, blue, factor_ptr, order_ptr, mean, num_turns):
    """Apply the first changes of the picture's order. `mean` is its mean luma before a change of contrast."""
    for turn in tl.range(0, 4):
        if turn < num_turns:
            operation = tl.load(order_ptr + turn)
            factor = tl.load(factor_ptr + operation)
            if operation == _HUE:
                red, green, blue = _with_hue(red, green, blue, factor)
            else:
                reference = tl.where(operation == _SATURATION, _luma(red, green, blue), 0.0)
                reference = (1 - factor) * tl.where(operation == _CONTRAST, mean, reference)
                red, green = (
                    tl.clamp(red * factor + reference, 0.0, 1.0),
                    tl.clamp(green * factor + reference, 0.0, 1.0),
                )
                blue = tl.clamp(blue * factor + reference, 0.0, 1.0)
    return red, green, blue


@triton.jit
def _change_kernel(
    x_ptr, out_ptr, box_ptr, flip_ptr, factor_ptr, order_ptr, gray_ptr, channels,
    H: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write the crop, flip, colour jitter and grayscale of three channels of a picture; None for what is left out.

    If there are fewer channels, the last one is computed again, to the same values.
    """
    picture, channel = tl.program_id(0), 3 * tl.program_id(1)
    place = (picture.to(tl.int64) * channels + channel) * (H * W)
    x_ptr += place
    out_ptr += place
    second = tl.minimum(channels - channel - 1, 1) * (H * W)
    third = tl.minimum(channels - channel - 1, 2) * (H * W)
    if box_ptr is not None:
        box_ptr += 4 * picture
    if flip_ptr is not None:
        flip_ptr += picture
    mean = 0.0
    if factor_ptr is not None:
        factor_ptr += 4 * picture
        order_ptr += 4 * picture
        turn = tl.arange(0, 4)
        num_before = tl.sum(tl.where(tl.load(order_ptr + turn) == _CONTRAST, turn, 0), 0)
        total = tl.zeros((_PIXELS,), tl.float32)
        for start in tl.range(0, H * W, _PIXELS):
            pixel = tl.minimum(start + tl.arange(0, _PIXELS), H * W - 1)
            red, green, blue = _cropped(x_ptr, second, third, box_ptr, flip_ptr, pixel, H, W)
            red, green, blue = _jittered(red, green, blue, factor_ptr, order_ptr, 0.0, num_before)
            total += tl.where(start + tl.arange(0, _PIXELS) < H * W, _luma(red, green, blue), 0.0)
        mean = tl.sum(total, 0) / (H * W)
    for start in tl.range(0, H * W, _PIXELS):
        pixel = tl.minimum(start + tl.arange(0, _PIXELS), H * W - 1)
        red, green, blue = _cropped(x_ptr, second, third, box_ptr, flip_ptr, pixel, H, W)
        if factor_ptr is not None:
            red, green, blue = _jittered(red, green, blue, factor_ptr, order_ptr, mean, 4)
        if gray_ptr is not None and tl.load(gray_ptr + picture):
            red = _luma(red, green, blue)
            green = red
            blue = red
        entry = start + tl.arange(0, _PIXELS)
        tl.store(out_ptr + entry, red, entry < H * W)
        tl.store(out_ptr + second + entry, green, entry < H * W)
        tl.store(out_ptr + third + entry, blue, entry < H * W)


@triton.jit
def _pil_matrix(sigma, size, SIZE: tl.constexpr):
    """Return the weights of `trainer.views.resampling.pil_blur_matrix`, which explains them, (SIZE, SIZE)."""
    q, p = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    square = sigma * sigma
    whole = tl.floor((tl.sqrt(4 * square + 1) - 1) / 2)
    more = whole + 1
    end = more + (whole + more) * (whole * more - square) / (2 * square - 6 * more * more)
    upper = tl.where(p == size - 1, 1.0, tl.clamp((p - q + end) / (2 * end - 1), 0.0, 1.0))
    lower = tl.where(p == 0, 0.0, tl.clamp((p - q - 1 + end) / (2 * end - 1), 0.0, 1.0))
    box = tl.where(p < size, upper - lower, 0.0)
    return tl.dot(tl.dot(box, box, input_precision="ieee"), box, input_precision="ieee")


@triton.jit
def _blur_kernel(
    x_ptr, sigma_ptr, channels, H: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Blur a channel of a picture in place, unless its sigma is 0."""
    sigma = tl.load(sigma_ptr + tl.program_id(0) // channels)
    if sigma > 0:
        row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
        exists = (row < H) & (column < W)
        place = x_ptr + tl.program_id(0).to(tl.int64) * (H * W) + row * W + column
        x = tl.load(place, exists, other=0.0)
        x = tl.dot(_pil_matrix(sigma, H, ROWS), x, input_precision="ieee")
        x = tl.dot(x, tl.trans(_pil_matrix(sigma, W, COLUMNS)), input_precision="ieee")
        tl.store(place, x, exists)


def drawn(
    config: Any, keys: DrawKeys, *, height: int, width: int, aspect: tuple[float, float], sigma: tuple[float, float]
) -> dict[str, Tensor | None]:
    """Return the tensors of `ExpertDraws` by name for an `ExpertImageConfig`; None for what it switches off.

    `aspect` is in pixels.
    """
    jitter = config.jitter_probability if config.jitters else 0.0
    chances = (config.flip_probability, jitter, config.grayscale_probability, config.blur_probability)
    forms: dict[str, tuple[object, tuple[int, ...], torch.dtype]] = {
        "box_B4": (config.area, (4,), torch.float32),
        "flip_B": (chances[0], (), torch.bool),
        "factor_B4": (jitter, (4,), torch.float32),
        "order_B4": (jitter, (4,), torch.int64),
        "gray_B": (chances[2], (), torch.bool),
        "sigma_B": (chances[3], (), torch.float32),
    }
    draws = {
        name: keys.index_B.new_empty((len(keys.index_B), *form), dtype=dtype) if wanted else None
        for name, (wanted, form, dtype) in forms.items()
    }
    rows, columns = min(round(width / aspect[0]), height), min(round(height * aspect[1]), width)
    constants = {
        "H": height,
        "W": width,
        "AREA": config.area,
        "ASPECT": tuple(map(math.log, aspect)),
        "MIDDLE": tuple(map(float, ((height - rows) // 2, (width - columns) // 2, rows, columns))),
        "STRENGTHS": config.strengths,
        "SIGMA": sigma,
        "CHANCES": chances,
    }
    given = (keys.index_B, keys.is_next_B, keys.recorded_epoch, keys.seed, keys.epoch, keys.view)
    launch(_draw_kernel, (len(keys.index_B),), *given, *draws.values(), **constants, num_warps=1)
    return draws


def views(images_BCHW: Tensor, draws: Any) -> Tensor:
    """Return the views with the parameters of `ExpertDraws`, for float32 pictures, in new contiguous memory.

    Blurs by other matrices than PIL's, and of larger pictures than `_LARGEST_BLURRED`, are torch's.
    """
    B, C, H, W = images_BCHW.shape
    x_BCHW = images_BCHW.contiguous()
    views_BCHW = torch.empty_like(x_BCHW)
    changes = (draws.box_B4, draws.flip_B, draws.factor_B4, draws.order_B4, draws.gray_B)
    launch(_change_kernel, (B, triton.cdiv(C, 3)), x_BCHW, views_BCHW, *changes, C, H=H, W=W)
    if draws.sigma_B is None:
        return views_BCHW
    if draws.blur_matrix is not pil_blur_matrix or max(H, W) > _LARGEST_BLURRED:
        return blur(views_BCHW, draws.sigma_B, draws.blur_matrix)
    sides = {"ROWS": max(16, triton.next_power_of_2(H)), "COLUMNS": max(16, triton.next_power_of_2(W))}
    launch(_blur_kernel, (B * C,), views_BCHW, draws.sigma_B, C, H=H, W=W, **sides)
    return views_BCHW
