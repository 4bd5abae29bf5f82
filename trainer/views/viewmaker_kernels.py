# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Kernels in Triton for the viewmaker on a GPU: borders, and instance norm with what follows it, each in one launch.

Maps are channels_last. The channels of a map are filled up to a multiple of 8 with zeros, as tensor cores need them, so
the weights of a norm tell how many channels there really are. Sums and statistics are float32 and are added in a fixed
order, so the same inputs give the same bits. A launch is an operator of torch; its form for tensors without data is the
same function, because `launch` does nothing with them. Sizes are constants of a kernel, so each layer compiles its own.

Shapes: B samples, C channels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys
from trainer.triton_launch import launch
from trainer.views.expert_image_kernels import _key, _uniform

_TILE: Final = 2048  # values that the threads of a program read at once: 16 bytes each in bfloat16
_MOST_CHANNELS: Final = 32  # of a tile: two sectors of 32 bytes in bfloat16


def filled(channels: int) -> int:
    """Return the number of channels of a map in memory: the next multiple of 8."""
    return -(-channels // 8) * 8


def _launch(kernel: Any, rows: int, channels: int, *arguments: Any, of_samples: bool = False, **constants: Any) -> None:
    """Launch programs for tiles of pixels and channels, or with `of_samples` for samples and tiles of channels."""
    tile = min(_MOST_CHANNELS, triton.next_power_of_2(channels))
    programs = (rows if of_samples else triton.cdiv(rows, _TILE // tile), triton.cdiv(channels, tile))
    launch(kernel, programs, *arguments, **constants, ROWS=_TILE // tile, TILE=tile, num_warps=8)


def _map(like: Tensor, channels: int, height: int, width: int) -> Tensor:
    shape = len(like), channels, height, width
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _operator(function: Callable[..., Any]) -> Any:
    operator = torch.library.custom_op(f"viewmaker::{function.__name__.strip('_')}", function, mutates_args=())
    operator.register_fake(function)
    return operator


@triton.jit(do_not_specialize=["seed", "epoch", "view", "first"])
def _noise_kernel(
    index_ptr, is_next_ptr, epoch_ptr, seed, epoch, view, noise_ptr, first, pixels, PIXELS: tl.constexpr
):  # fmt: skip
    sample, layer, start = tl.program_id(0), tl.program_id(1), tl.program_id(2) * PIXELS
    key = _key(index_ptr, is_next_ptr, epoch_ptr, seed, epoch, view, (first + layer).to(tl.uint64), sample)
    noise_ptr += (layer * tl.num_programs(0) + sample).to(tl.int64) * pixels
    pixel = start + tl.arange(0, PIXELS)
    tl.store(noise_ptr + pixel, _uniform(key, start, PIXELS), pixel < pixels)


def noise(keys: DrawKeys, height: int, width: int, purposes: Sequence[int]) -> Tensor:
    """Return the numbers of `counter_rng.uniforms` for consecutive purposes, (L, B, H, W) float32."""
    index_B = keys.index_B
    noise_LBHW = index_B.new_empty((len(purposes), len(index_B), height, width), dtype=torch.float32)
    programs = len(index_B), len(purposes), triton.cdiv(height * width, 1024)
    given = (index_B, keys.is_next_B, keys.recorded_epoch, keys.seed, keys.epoch, keys.view)
    launch(_noise_kernel, programs, *given, noise_LBHW, purposes[0], height * width, PIXELS=1024, num_warps=4)
    return noise_LBHW


@triton.jit
def _inside(place, SIZE: tl.constexpr, REPEAT: tl.constexpr):
    """Return the place of which a place outside is the mirror image, with the edge (1) or without it (0)."""
    place = tl.where(place < 0, -REPEAT - place, place)
    return tl.where(place >= SIZE, 2 * SIZE - 2 + REPEAT - place, place)


@triton.jit
def _pad_kernel(
    x_ptr, out_ptr, num_pixels,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OUT: tl.constexpr, STEP_B: tl.constexpr, STEP_C: tl.constexpr,
    STEP_H: tl.constexpr, STEP_W: tl.constexpr, BORDER: tl.constexpr, REPEAT: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # of the output
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = (pixel < num_pixels)[:, None]
    w = _inside(pixel % (W + 2 * BORDER) - BORDER, W, REPEAT)
    pixel //= W + 2 * BORDER
    h = _inside(pixel % (H + 2 * BORDER) - BORDER, H, REPEAT)
    place = (pixel // (H + 2 * BORDER)).to(tl.int64) * STEP_B + h * STEP_H + w * STEP_W
    x = tl.load(x_ptr + place[:, None] + (channel * STEP_C)[None, :], exists & (channel < C)[None, :], other=0.0)
    out_ptr += tl.program_id(0).to(tl.int64) * ROWS * OUT
    tl.store(out_ptr + tl.arange(0, ROWS)[:, None] * OUT + channel[None, :], x, exists & (channel < OUT)[None, :])


@triton.jit
def _image(place, SIZE: tl.constexpr, BORDER: tl.constexpr, REPEAT: tl.constexpr, number: tl.constexpr):
    """Return a place (0) or its mirror image in the border before (1) or behind (2) it, and whether it exists."""
    if number == 0:
        return place + BORDER, place >= 0
    if number == 1:
        image = BORDER - REPEAT - place
        return image, (image >= 0) & (image < BORDER)
    image = BORDER + 2 * SIZE - 2 + REPEAT - place
    return image, (image >= BORDER + SIZE) & (image < 2 * BORDER + SIZE)


@triton.jit
def _fold_kernel(
    padded_ptr, x_ptr, num_pixels,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OUT: tl.constexpr, BORDER: tl.constexpr, REPEAT: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # without the border
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = (pixel < num_pixels)[:, None] & (channel < C)[None, :]
    w = pixel % W
    h = pixel // W % H
    first_row = (pixel // (H * W)).to(tl.int64) * (H + 2 * BORDER)
    total = tl.zeros((ROWS, TILE), tl.float32)
    for i in tl.static_range(3):
        row, has_row = _image(h, H, BORDER, REPEAT, i)
        for j in tl.static_range(3):
            column, has_column = _image(w, W, BORDER, REPEAT, j)
            place = ((first_row + row) * (W + 2 * BORDER) + column) * OUT
            loaded = exists & (has_row & has_column)[:, None]
            total += tl.load(padded_ptr + place[:, None] + channel[None, :], loaded, other=0.0).to(tl.float32)
    x_ptr += tl.program_id(0).to(tl.int64) * ROWS * C
    place = tl.arange(0, ROWS)[:, None] * C + channel[None, :]
    tl.store(x_ptr + place, total.to(x_ptr.dtype.element_ty), exists)


@_operator
def pad(x: Tensor, border: int, repeat_edge: bool) -> Tensor:
    """Return a map with a border that mirrors it, without or with its edge, and with filled channels.

    `x` has any strides. The border is narrower than the map.
    """
    B, C, H, W = x.shape
    out = _map(x, filled(C), H + 2 * border, W + 2 * border)
    steps: dict[str, Any] = dict(zip(("STEP_B", "STEP_C", "STEP_H", "STEP_W"), x.stride(), strict=True))
    num_pixels = B * out.shape[2] * out.shape[3]
    sizes: dict[str, Any] = {"C": C, "H": H, "W": W, "OUT": out.shape[1], "BORDER": border, "REPEAT": int(repeat_edge)}
    _launch(_pad_kernel, num_pixels, out.shape[1], x, out, num_pixels, **sizes, **steps)
    return out


@_operator
def fold(padded: Tensor, channels: int, border: int, repeat_edge: bool) -> Tensor:
    """Return the sum of each pixel and its images in the border, of the first channels: the gradient of `pad`."""
    B, filled_channels, H, W = padded.shape
    H, W = H - 2 * border, W - 2 * border
    x = _map(padded, channels, H, W)
    sizes: dict[str, Any] = {
        "C": channels,
        "H": H,
        "W": W,
        "OUT": filled_channels,
        "BORDER": border,
        "REPEAT": int(repeat_edge),
    }
    _launch(_fold_kernel, B * H * W, channels, padded, x, B * H * W, **sizes)
    return x


def _keep_form(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.channels, (ctx.border, ctx.repeat_edge) = inputs[0].shape[1], inputs[-2:]


def _pad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad = grad.contiguous(memory_format=torch.channels_last)
    return fold(grad, ctx.channels, ctx.border, ctx.repeat_edge), None, None


def _fold_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return pad(grad, ctx.border, ctx.repeat_edge), None, None, None


pad.register_autograd(_pad_backward, setup_context=_keep_form)
fold.register_autograd(_fold_backward, setup_context=_keep_form)


@triton.jit(do_not_specialize=["eps"])
def _normalise_kernel(
    y_ptr, weight_ptr, bias_ptr, residual_ptr, noise_ptr, out_ptr, stats_ptr, eps,
    PIXELS: tl.constexpr, C: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, RESIDUAL: tl.constexpr,
    NOISE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    pixel = tl.arange(0, ROWS)
    known = channel < C  # the others are 0, and loaded too, so that 16 bytes are loaded at once
    filled = (channel < IN)[None, :]
    inside = pixel[:, None] * IN + channel[None, :]
    y_ptr += sample * PIXELS * IN
    residual_ptr += sample * PIXELS * IN
    noise_ptr += sample * PIXELS
    out_ptr += sample * PIXELS * OUT
    # Distances from the mean of the first tile: a mean of squares minus a squared mean would cancel for a large mean.
    near = tl.sum(tl.load(y_ptr + inside, (pixel < PIXELS)[:, None] & filled, other=0.0).to(tl.float32), 0)
    near /= PIXELS if PIXELS < ROWS else ROWS
    total = tl.zeros((ROWS, TILE), tl.float32)
    squares = tl.zeros((ROWS, TILE), tl.float32)
    for start in tl.range(0, PIXELS, ROWS, num_stages=3):
        exists = (start + pixel < PIXELS)[:, None] & filled
        y = tl.load(y_ptr + start * IN + inside, exists, other=0.0).to(tl.float32)
        apart = tl.where(exists, y - near[None, :], 0.0)
        total += apart
        squares += apart * apart
    away = tl.sum(total, 0) / PIXELS
    mean = near + away
    invstd = tl.rsqrt(tl.sum(squares, 0) / PIXELS - away * away + eps)
    stats_ptr += sample * 2 * C + channel
    tl.store(stats_ptr, mean, known)
    tl.store(stats_ptr + C, invstd, known)
    scale = invstd * tl.load(weight_ptr + channel, known, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, known, other=0.0).to(tl.float32)
    for start in tl.range(0, PIXELS, ROWS, num_stages=3):
        there = start + pixel < PIXELS
        exists = there[:, None] & filled
        y = tl.load(y_ptr + start * IN + inside, exists, other=0.0).to(tl.float32)
        out = tl.fma(y - mean[None, :], scale[None, :], bias[None, :])
        if RESIDUAL:
            out += tl.load(residual_ptr + start * IN + inside, exists, other=0.0).to(tl.float32)
        else:
            out = tl.where(out <= 0.0, 0.0, out)
        if NOISE:
            noise = tl.load(noise_ptr + start + pixel, there, other=0.0).to(tl.float32)
            out = tl.where((channel == C)[None, :], noise[:, None], out)
        place = (start + pixel)[:, None] * OUT + channel[None, :]
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), there[:, None] & (channel < OUT)[None, :])


@triton.jit
def _before_relu(grad_ptr, y_ptr, exists, mean, scale, bias, RELU: tl.constexpr):
    """Return the gradient in front of the ReLU, and the distances from the mean."""
    apart = tl.load(y_ptr, exists, other=0.0).to(tl.float32) - mean[None, :]
    grad = tl.load(grad_ptr, exists, other=0.0).to(tl.float32)
    if RELU:
        grad = tl.where(tl.fma(apart, scale[None, :], bias[None, :]) <= 0.0, 0.0, grad)
    return grad, apart


@triton.jit
def _normalise_gradient_kernel(
    grad_ptr, y_ptr, weight_ptr, bias_ptr, stats_ptr, grad_y_ptr, sums_ptr,
    PIXELS: tl.constexpr, C: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, RELU: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write weight / std * (grad - mean of grad - normalised y * mean of grad * normalised y), and those two sums."""
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    pixel = tl.arange(0, ROWS)
    known = channel < C
    filled = (channel < IN)[None, :]
    mean = tl.load(stats_ptr + sample * 2 * C + channel, known, other=0.0)
    invstd = tl.load(stats_ptr + sample * 2 * C + C + channel, known, other=0.0)
    scale = invstd * tl.load(weight_ptr + channel, known, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, known, other=0.0).to(tl.float32)
    grad_ptr += sample * PIXELS * OUT + pixel[:, None] * OUT + channel[None, :]
    y_ptr += sample * PIXELS * IN + pixel[:, None] * IN + channel[None, :]
    grad_y_ptr += sample * PIXELS * IN + pixel[:, None] * IN + channel[None, :]
    products = tl.zeros((ROWS, TILE), tl.float32)
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in tl.range(0, PIXELS, ROWS, num_stages=2):
        exists = (start + pixel < PIXELS)[:, None] & filled
        grad, apart = _before_relu(grad_ptr + start * OUT, y_ptr + start * IN, exists, mean, scale, bias, RELU)
        products += grad * apart
        total += grad
    product = tl.sum(products, 0) * invstd
    level = tl.sum(total, 0)
    sums_ptr += sample * 2 * C + channel
    tl.store(sums_ptr, product, known)
    tl.store(sums_ptr + C, level, known)
    level /= PIXELS
    slope = product * invstd / PIXELS
    for start in tl.range(0, PIXELS, ROWS, num_stages=2):
        exists = (start + pixel < PIXELS)[:, None] & filled
        grad, apart = _before_relu(grad_ptr + start * OUT, y_ptr + start * IN, exists, mean, scale, bias, RELU)
        grad = (grad - level[None, :] - apart * slope[None, :]) * scale[None, :]
        tl.store(grad_y_ptr + start * IN, grad.to(grad_y_ptr.dtype.element_ty), exists)


@_operator
def normalise(
    y: Tensor, weight_C: Tensor, bias_C: Tensor, residual: Tensor | None, noise_BHW: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalise each channel of each sample; add the residual or, without one, take the ReLU; append the noise.

    Returns the map with filled channels, and mean and 1 / standard deviation (B, 2, C), which have no gradient.
    """
    (B, IN, H, W), C = y.shape, len(weight_C)
    out = _map(y, filled(C + (noise_BHW is not None)), H, W)
    stats = y.new_empty((B, 2, C), dtype=torch.float32)
    sizes = {"PIXELS": H * W, "C": C, "IN": IN, "OUT": out.shape[1]}
    flags = {"RESIDUAL": residual is not None, "NOISE": noise_BHW is not None}
    maps = [y if each is None else each for each in (residual, noise_BHW)]
    arguments = (y, weight_C, bias_C, *maps, out, stats, eps)
    _launch(_normalise_kernel, B, out.shape[1], *arguments, of_samples=True, **sizes, **flags)
    return out, stats


@_operator
def _normalise_gradient(
    grad: Tensor, y: Tensor, weight_C: Tensor, bias_C: Tensor, stats: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    B, IN, H, W = y.shape
    grad_y, sums = torch.empty_like(y), torch.empty_like(stats)
    sizes = {"PIXELS": H * W, "C": len(weight_C), "IN": IN, "OUT": grad.shape[1], "RELU": relu}
    arguments = (grad, y, weight_C, bias_C, stats, grad_y, sums)
    _launch(_normalise_gradient_kernel, B, IN, *arguments, of_samples=True, **sizes)
    return grad_y, sums


def _keep_maps(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, weight_C, bias_C, residual, *_ = inputs
    ctx.relu = residual is None
    ctx.save_for_backward(y, weight_C, bias_C, output[1])
    ctx.mark_non_differentiable(output[1])


def _normalise_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    y, weight_C, *others = ctx.saved_tensors
    grad = grad.contiguous(memory_format=torch.channels_last)
    grad_y, sums = _normalise_gradient(grad, y, weight_C, *others, ctx.relu)
    grad_weight_C, grad_bias_C = sums.sum(0).to(weight_C.dtype)
    return grad_y, grad_weight_C, grad_bias_C, None if ctx.relu else grad[:, : y.shape[1]], None, None


normalise.register_autograd(_normalise_backward, setup_context=_keep_maps)
