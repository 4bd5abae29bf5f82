# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Kernels in Triton for the viewmaker on a GPU: noise, and instance norm with what follows it, in one launch each way.

Maps are channels_last, and have the mirrored border that the next convolution reads. The channels of a map are filled
up to a multiple of 8 with zeros, as tensor cores need them, so the weights of a norm tell how many channels there
really are. Sums and statistics are float32 and are added in a fixed order, so the same inputs give the same bits. A
launch is an operator of torch; its form for tensors without data is the same function, because `launch` does nothing
with them. Sizes are constants of a kernel, so each layer compiles its own.

Shapes: B samples, C channels, H rows, W columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys
from trainer.triton_works import launch
from trainer.views.expert_image_kernels import _key, _uniform

_TILE: Final = 2048  # values that the threads of a program read at once: 16 bytes each in bfloat16
_MOST_CHANNELS: Final = 32  # of a tile: two sectors of 32 bytes in bfloat16


def filled(channels: int) -> int:
    """Return the number of channels of a map in memory: the next multiple of 8."""
    return -(-channels // 8) * 8


def _launch(kernel: Any, samples: int, channels: int, *arguments: Any, **constants: Any) -> None:
    """Launch programs for samples and tiles of channels."""
    tile = min(_MOST_CHANNELS, triton.next_power_of_2(channels))
    programs = samples, triton.cdiv(channels, tile)
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
def _image(place, SIZE: tl.constexpr, BORDER: tl.constexpr, REPEAT: tl.constexpr, number: tl.constexpr):
    """Return a place (0) or its mirror image in the border before (1) or behind (2) it, and whether it exists."""
    if number == 0:
        return place + BORDER, place >= 0
    if number == 1:
        image = BORDER - REPEAT - place
        return image, (image >= 0) & (image < BORDER)
    image = BORDER + 2 * SIZE - 2 + REPEAT - place
    return image, (image >= BORDER + SIZE) & (image < 2 * BORDER + SIZE)


@triton.jit(do_not_specialize=["eps"])
def _normalise_kernel(
    y_ptr, weight_ptr, bias_ptr, residual_ptr, noise_ptr, out_ptr, stats_ptr, eps,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BORDER: tl.constexpr,
    REPEAT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    pixel = tl.arange(0, ROWS)
    known = channel < C  # the others are 0, and loaded too, so that 16 bytes are loaded at once
    filled = (channel < IN)[None, :]
    PIXELS: tl.constexpr = H * W
    OUT_PIXELS: tl.constexpr = (H + 2 * BORDER) * (W + 2 * BORDER)
    y_ptr += sample * PIXELS * IN + channel[None, :]
    out_ptr += sample * OUT_PIXELS * OUT + channel[None, :]
    # Distances from the mean of the first tile: a mean of squares minus a squared mean would cancel for a large mean.
    near = tl.sum(tl.load(y_ptr + pixel[:, None] * IN, (pixel < PIXELS)[:, None] & filled, other=0.0).to(tl.float32), 0)
    near /= PIXELS if PIXELS < ROWS else ROWS
    total = tl.zeros((ROWS, TILE), tl.float32)
    squares = tl.zeros((ROWS, TILE), tl.float32)
    for start in tl.range(0, PIXELS, ROWS, num_stages=3):
        exists = (start + pixel < PIXELS)[:, None] & filled
        y = tl.load(y_ptr + (start + pixel)[:, None] * IN, exists, other=0.0).to(tl.float32)
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
    for start in tl.range(0, OUT_PIXELS, ROWS, num_stages=2):
        there = start + pixel < OUT_PIXELS
        exists = there[:, None] & filled
        h = _inside((start + pixel) // (W + 2 * BORDER) - BORDER, H, REPEAT)
        w = _inside((start + pixel) % (W + 2 * BORDER) - BORDER, W, REPEAT)
        y = tl.load(y_ptr + (h * W + w)[:, None] * IN, exists, other=0.0).to(tl.float32)
        out = tl.fma(y - mean[None, :], scale[None, :], bias[None, :])
        if residual_ptr is not None:
            place = sample * ((H + 2) * (W + 2)) + (h + 1) * (W + 2) + w + 1  # a residual has a border of 1
            out += tl.load(residual_ptr + place[:, None] * IN + channel[None, :], exists, other=0.0).to(tl.float32)
        else:
            out = tl.where(out <= 0.0, 0.0, out)
        if noise_ptr is not None:
            noise = tl.load(noise_ptr + sample * PIXELS + h * W + w, there, other=0.0).to(tl.float32)
            out = tl.where((channel == C)[None, :], noise[:, None], out)
        stored = there[:, None] & (channel < OUT)[None, :]
        tl.store(out_ptr + (start + pixel)[:, None] * OUT, out.to(out_ptr.dtype.element_ty), stored)


@triton.jit
def _normalise_gradient_kernel(
    grad_ptr, y_ptr, weight_ptr, bias_ptr, stats_ptr, inner_ptr, grad_y_ptr, sums_ptr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BORDER: tl.constexpr,
    REPEAT: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write weight / std * (grad - mean of grad - normalised y * mean of grad * normalised y), and those two sums.

    `grad` is here the sum over a pixel and its images in the border, and 0 if the ReLU is. It is stored in `inner`,
    which is the gradient of the residual if there is no ReLU, and then has a border of zeros.
    """
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    pixel = tl.arange(0, ROWS)
    known = channel < C
    filled = (channel < IN)[None, :]
    PIXELS: tl.constexpr = H * W
    EDGE: tl.constexpr = 0 if RELU else 1  # the border of `inner`
    INNER_PIXELS: tl.constexpr = (H + 2 * EDGE) * (W + 2 * EDGE)
    mean = tl.load(stats_ptr + sample * 2 * C + channel, known, other=0.0)
    invstd = tl.load(stats_ptr + sample * 2 * C + C + channel, known, other=0.0)
    scale = invstd * tl.load(weight_ptr + channel, known, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, known, other=0.0).to(tl.float32)
    grad_ptr += sample * ((H + 2 * BORDER) * (W + 2 * BORDER)) * OUT + channel[None, :]
    y_ptr += sample * PIXELS * IN + channel[None, :]
    grad_y_ptr += sample * PIXELS * IN + channel[None, :]
    inner_ptr += sample * INNER_PIXELS * IN + channel[None, :]
    products = tl.zeros((ROWS, TILE), tl.float32)
    total = tl.zeros((ROWS, TILE), tl.float32)
    for start in tl.range(0, INNER_PIXELS, ROWS, num_stages=1):
        h = (start + pixel) // (W + 2 * EDGE) - EDGE
        w = (start + pixel) % (W + 2 * EDGE) - EDGE
        exists = ((h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None] & filled
        grad = tl.zeros((ROWS, TILE), tl.float32)
        for i in tl.static_range(3):
            row, has_row = _image(h, H, BORDER, REPEAT, i)
            for j in tl.static_range(3):
                column, has_column = _image(w, W, BORDER, REPEAT, j)
                place = (row * (W + 2 * BORDER) + column) * OUT
                loaded = exists & (has_row & has_column)[:, None]
                grad += tl.load(grad_ptr + place[:, None], loaded, other=0.0).to(tl.float32)
        apart = tl.load(y_ptr + (h * W + w)[:, None] * IN, exists, other=0.0).to(tl.float32) - mean[None, :]
        if RELU:
            grad = tl.where(tl.fma(apart, scale[None, :], bias[None, :]) <= 0.0, 0.0, grad)
        stored = (start + pixel < INNER_PIXELS)[:, None] & filled
        tl.store(inner_ptr + (start + pixel)[:, None] * IN, grad.to(inner_ptr.dtype.element_ty), stored)
        products += grad * apart
        total += grad
    product = tl.sum(products, 0) * invstd
    level = tl.sum(total, 0)
    sums_ptr += sample * 2 * C + channel
    tl.store(sums_ptr, product, known)
    tl.store(sums_ptr + C, level, known)
    level /= PIXELS
    slope = product * invstd / PIXELS
    tl.debug_barrier()  # what a thread stored in `inner`, another one reads
    for start in tl.range(0, PIXELS, ROWS, num_stages=2):
        exists = (start + pixel < PIXELS)[:, None] & filled
        place = ((start + pixel) // W + EDGE) * (W + 2 * EDGE) + (start + pixel) % W + EDGE
        grad = tl.load(inner_ptr + place[:, None] * IN, exists, other=0.0).to(tl.float32)
        apart = tl.load(y_ptr + (start + pixel)[:, None] * IN, exists, other=0.0).to(tl.float32) - mean[None, :]
        grad = (grad - level[None, :] - apart * slope[None, :]) * scale[None, :]
        tl.store(grad_y_ptr + (start + pixel)[:, None] * IN, grad.to(grad_y_ptr.dtype.element_ty), exists)


@_operator
def normalise(
    y: Tensor,
    affine_B2C: Tensor,
    residual: Tensor | None,
    noise_BHW: Tensor | None,
    eps: float,
    border: int,
    repeat_edge: bool,
) -> tuple[Tensor, Tensor]:
    """Normalise each channel of each sample; add the residual or, without one, take the ReLU; append the noise.

    The residual has a border of 1, which is not added. The border of the result mirrors it, without or with its edge.
    The weights and biases are the same for each sample, but have a gradient for each, which are summed elsewhere.
    Returns the map with filled channels, and mean and 1 / standard deviation (B, 2, C), which have no gradient.
    """
    (B, IN, H, W), C, (weight_C, bias_C) = y.shape, affine_B2C.shape[2], affine_B2C[0]
    out = _map(y, filled(C + (noise_BHW is not None)), H + 2 * border, W + 2 * border)
    stats = y.new_empty((B, 2, C), dtype=torch.float32)
    sizes = {"H": H, "W": W, "C": C, "IN": IN, "OUT": out.shape[1], "BORDER": border, "REPEAT": int(repeat_edge)}
    arguments = (y, weight_C, bias_C, residual, noise_BHW, out, stats, eps)
    _launch(_normalise_kernel, B, out.shape[1], *arguments, **sizes)
    return out, stats


@_operator
def _normalise_gradient(
    grad: Tensor,
    y: Tensor,
    affine_B2C: Tensor,
    stats: Tensor,
    relu: bool,
    border: int,
    repeat_edge: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `y`, of the residual, and of weights and biases, (B, 2, C)."""
    (B, IN, H, W), C, (weight_C, bias_C) = y.shape, affine_B2C.shape[2], affine_B2C[0]
    grad_y, sums = torch.empty_like(y), torch.empty_like(stats)
    inner = torch.empty_like(y) if relu else _map(y, IN, H + 2, W + 2)
    sizes = {"H": H, "W": W, "C": C, "IN": IN, "OUT": grad.shape[1], "BORDER": border, "REPEAT": int(repeat_edge)}
    arguments = (grad, y, weight_C, bias_C, stats, inner, grad_y, sums)
    _launch(_normalise_gradient_kernel, B, IN, *arguments, **sizes, RELU=relu)
    return grad_y, inner, sums


def _keep_maps(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, affine_B2C, residual, _, _, border, repeat_edge = inputs
    ctx.form = residual is None, border, repeat_edge
    ctx.save_for_backward(y, affine_B2C, output[1])
    ctx.mark_non_differentiable(output[1])


def _normalise_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grad = grad.contiguous(memory_format=torch.channels_last)
    grad_y, grad_residual, grad_affine_B2C = _normalise_gradient(grad, *ctx.saved_tensors, *ctx.form)
    has_residual = not ctx.form[0]
    return grad_y, grad_affine_B2C, grad_residual if has_residual else None, *[None] * 4


normalise.register_autograd(_normalise_backward, setup_context=_keep_maps)


@triton.jit
def _fill_kernel(source_ptr, target_ptr, LAYERS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the weights of all layers, (O, K, K, I) each, from those in another form; see `fill`.

    If K changes, each entry is the sum of up to four entries of the other form, which is flipped.
    """
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for n in tl.static_range(len(LAYERS)):
        if tl.program_id(0) == n:
            SO: tl.constexpr = LAYERS[n][0]
            SK: tl.constexpr = LAYERS[n][1]
            SI: tl.constexpr = LAYERS[n][2]
            TO: tl.constexpr = LAYERS[n][3]
            TK: tl.constexpr = LAYERS[n][4]
            TI: tl.constexpr = LAYERS[n][5]
            o, p, q, i = place // (TI * TK * TK), place // (TI * TK) % TK, place // TI % TK, place % TI
            total = tl.zeros((BLOCK,), tl.float32)
            for a in tl.static_range(1 if SK == TK else 2):
                for b in tl.static_range(1 if SK == TK else 2):
                    row = p if SK == TK else 3 - a - p
                    column = q if SK == TK else 3 - b - q
                    known = (o < SO) & (i < SI) & (row >= 0) & (row < SK) & (column >= 0) & (column < SK)
                    entry = LAYERS[n][6] + ((o * SK + row) * SK + column) * SI + i
                    total += tl.load(source_ptr + entry, known, other=0.0).to(tl.float32)
            tl.store(target_ptr + LAYERS[n][7] + place, total.to(target_ptr.dtype.element_ty), o < TO)


@_operator
def fill(source: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the weights of layers in another form, in one row of type `dtype`.

    sizes: O, K and I of each layer in the form of `source`, and then in that of the result. Entries that only one form
        has are 0. From K = 3 to K = 4 or back, see `upsample_convolve`.
    """
    layers, start, target_start = [], 0, 0
    for SO, SK, SI, TO, TK, TI in zip(*[iter(sizes)] * 6, strict=True):
        layers.append((SO, SK, SI, TO, TK, TI, start, target_start))
        start, target_start = start + SO * SK * SK * SI, target_start + TO * TK * TK * TI
    target = source.new_empty(target_start, dtype=dtype)
    most = max(TO * TK * TK * TI for *_, TO, TK, TI, _, _ in layers)
    launch(_fill_kernel, (len(layers), triton.cdiv(most, 1024)), source, target, LAYERS=tuple(layers), BLOCK=1024)
    return target


def _keep_sizes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    source, sizes, _ = inputs
    ctx.dtype, ctx.sizes = source.dtype, [sizes[n // 6 * 6 + (n + 3) % 6] for n in range(len(sizes))]


fill.register_autograd(lambda ctx, grad: (fill(grad, ctx.sizes, ctx.dtype), None, None), setup_context=_keep_sizes)


def prepared(
    weights: Sequence[Tensor], upsamples: Sequence[bool], norms: Sequence[Tensor], num_samples: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the filled weights of convolutions, and the parameters of norms for each sample, (B, 2, C).

    upsamples: whether each convolution upsamples, so that K = 3 becomes 4; see `upsample_convolve`.
    norms: weight and bias of each norm, one after the other.
    """
    rows, sizes, shapes = [], [], []
    for weight, is_up in zip(weights, upsamples, strict=True):
        num_out, num_in, size, _ = weight.shape
        rows.append(weight.permute(0, 2, 3, 1).flatten())
        shapes.append((filled(num_out), size + is_up, size + is_up, filled(num_in)))
        sizes += [num_out, size, num_in, filled(num_out), size + is_up, filled(num_in)]
    parts = fill(torch.cat(rows), sizes, dtype).split([math.prod(shape) for shape in shapes])
    of_layers = [part.view(shape).permute(0, 3, 1, 2) for part, shape in zip(parts, shapes, strict=True)]
    # Each sample's gradients are summed for all layers together.
    affine = torch.cat(list(norms)).expand(num_samples, -1).split([2 * len(each) for each in norms[::2]], dim=1)
    return of_layers, [each.unflatten(1, (2, -1)) for each in affine]


@triton.jit(do_not_specialize=["budget"])
def _spend_kernel(u_ptr, grad_ptr, out_ptr, budget, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * SIZE
    entry = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, SIZE, BLOCK):
        u = tl.load(u_ptr + start + first + entry, first + entry < SIZE, other=0.0)
        total += tl.abs(u)
        if grad_ptr is not None:
            product += u * tl.load(grad_ptr + start + first + entry, first + entry < SIZE, other=0.0)
    mean = tl.sum(total, 0) / SIZE + 1e-4
    slope = tl.sum(product, 0) / SIZE / mean
    for first in tl.range(0, SIZE, BLOCK):
        out = tl.load(u_ptr + start + first + entry, first + entry < SIZE, other=0.0)
        if grad_ptr is not None:
            grad = tl.load(grad_ptr + start + first + entry, first + entry < SIZE, other=0.0)
            out = grad - tl.where(out > 0, slope, tl.where(out < 0, -slope, 0.0))
        tl.store(out_ptr + start + first + entry, out * (budget / mean), first + entry < SIZE)


@_operator
def spend(u: Tensor, grad: Tensor | None, budget: float) -> Tensor:
    """Return budget * u / (mean |u| + 1e-4), with one mean for each sample; with `grad` of that, the gradient of u.

    All are float32 and channels_last.
    """
    out = torch.empty_like(u)
    launch(_spend_kernel, (len(u),), u, grad, out, budget, SIZE=u[0].numel(), BLOCK=1024, num_warps=4)
    return out


def _keep_budget(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, _, ctx.budget = inputs
    ctx.save_for_backward(u)


def _spend_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return spend(*ctx.saved_tensors, grad.contiguous(memory_format=torch.channels_last), ctx.budget), None, None


spend.register_autograd(_spend_backward, setup_context=_keep_budget)
