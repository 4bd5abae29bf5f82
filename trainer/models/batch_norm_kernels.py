# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Kernels in Triton for batch norm on a GPU, with an optional sum with a residual and a ReLU after it.

A tensor is read as rows of C channels: the pixels of maps in channels_last, or a matrix. S equal groups of rows have
statistics of their own. Inputs and outputs are bfloat16 or float32; sums and statistics are float32.

A program owns a part of the rows of one group, for some channels. It writes one partial result, and a second kernel
combines them in a fixed order. So the same inputs give the same bits. No result depends on the number of processors.

The second pass goes through the rows backward, because the L2 cache of a GPU holds those that were read last.

Statistics are one float32 vector, which can be sent to other ranks: mean and variance for each group, (S, 2, C), and
the number of values. Shapes: N = 2 S C + 1 numbers of such a vector, P parts of the rows of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.triton_works import launch

_TILE: Final = 2048  # values that the threads of a program read at once: 16 bytes each in bfloat16
_NUM_WARPS: Final = 8
_MOST_CHANNELS: Final = 64  # of a tile: 128 bytes of a row in bfloat16
_NUM_PROGRAMS: Final = 512  # of a launch: four for each of the 132 processors of an H100 or H200
_COMBINED_CHANNELS: Final = 8  # of a program that combines parts


def _split(x: Tensor, num_groups: int) -> tuple[int, Callable[..., None]]:
    """Return into how many parts the rows of a group are cut, and a function that launches a kernel on all parts."""
    channels = x.shape[1]
    rows = x.numel() // (channels * num_groups)
    tile_channels = min(_MOST_CHANNELS, triton.next_power_of_2(channels))
    tile_rows = _TILE // tile_channels
    wanted = max(1, _NUM_PROGRAMS // (triton.cdiv(channels, tile_channels) * num_groups))
    part_rows = triton.cdiv(triton.cdiv(rows, tile_rows), wanted) * tile_rows
    programs = (triton.cdiv(rows, part_rows), triton.cdiv(channels, tile_channels), num_groups)

    def run(kernel: Any, *arguments: Any, **constants: Any) -> None:
        tile = {"TILE_ROWS": tile_rows, "TILE_CHANNELS": tile_channels, "num_warps": _NUM_WARPS}
        launch(kernel, programs, *arguments, rows, channels, part_rows, **constants, **tile)

    return programs[0], run


STAGES: tl.constexpr = tl.constexpr(4)
_LOOSE: Final = ["rows", "part_rows"]  # one kernel for all their values


@triton.jit
def _own_rows(rows, channels, part_rows, TILE_ROWS: tl.constexpr, TILE_CHANNELS: tl.constexpr):
    """Return the group of this program, its channels, its first place, and its numbers of rows and tiles."""
    group = tl.program_id(2)
    begin = tl.program_id(0) * part_rows
    channel = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)
    num_rows = tl.minimum(part_rows, rows - begin)
    start = (group.to(tl.int64) * rows + begin) * channels
    return group, channel, start, num_rows, tl.cdiv(num_rows, TILE_ROWS)


@triton.jit
def _tile(number, channel, num_rows, channels, TILE_ROWS: tl.constexpr):
    """Return the places of a tile's values behind the first value of the program, and which of them there are."""
    row = number * TILE_ROWS + tl.arange(0, TILE_ROWS)
    return row[:, None] * channels + channel[None, :], (row < num_rows)[:, None] & (channel < channels)[None, :]


@triton.jit(do_not_specialize=_LOOSE)
def _statistics_kernel(
    x_ptr, parts_ptr, rows, channels, part_rows, TILE_ROWS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write mean, variance and number of the values of each part."""
    group, channel, start, num_rows, num_tiles = _own_rows(rows, channels, part_rows, TILE_ROWS, TILE_CHANNELS)
    x_ptr += start
    # Each place of a tile sums the distances from its own first value. That cancels by at most the number of tiles,
    # whatever the values are; a mean of squares minus a squared mean would cancel for a large mean.
    place, exists = _tile(0, channel, num_rows, channels, TILE_ROWS)
    first = tl.load(x_ptr + place, exists, other=0.0).to(tl.float32)
    total = tl.zeros((TILE_ROWS, TILE_CHANNELS), tl.float32)
    squares = tl.zeros((TILE_ROWS, TILE_CHANNELS), tl.float32)
    for number in tl.range(1, num_tiles, num_stages=STAGES):
        place, exists = _tile(number, channel, num_rows, channels, TILE_ROWS)
        x = tl.load(x_ptr + place, exists, other=0.0).to(tl.float32)
        apart = tl.where(exists, x - first, 0.0)
        total += apart
        squares += apart * apart
    count = tl.cdiv(tl.maximum(num_rows - tl.arange(0, TILE_ROWS), 0), TILE_ROWS).to(tl.float32)[:, None]
    mean = total / tl.maximum(count, 1.0)
    squares -= mean * total
    near = tl.sum(first, 0) / tl.minimum(num_rows, TILE_ROWS)
    mean += first - near[None, :]
    away = tl.sum(mean * count, 0) / num_rows
    mean -= away[None, :]
    variance = tl.sum(squares + mean * mean * count, 0) / num_rows
    last = 2 * tl.num_programs(2) * channels  # the place of the number of values
    parts_ptr += tl.program_id(0) * (last + 1)
    mine = parts_ptr + 2 * group * channels + channel
    tl.store(mine, near + away, channel < channels)
    tl.store(mine + channels, variance, channel < channels)
    tl.store(parts_ptr + last, num_rows.to(tl.float32))


@triton.jit(do_not_specialize=["num_parts", "num_groups", "momentum"])
def _combine_kernel(
    parts_ptr, stats_ptr, running_mean_ptr, running_var_ptr, num_batches_ptr,
    momentum, num_parts, num_groups, channels,
    RUNNING: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Combine the statistics of parts as in Chan et al. 1983, and update the running statistics, group after group."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    part = tl.arange(0, PARTS)
    known = channel < channels
    exists = (part < num_parts)[:, None] & known[None, :]
    last = 2 * num_groups * channels  # the place of the number of values
    part_place = part * (last + 1)
    count = tl.load(parts_ptr + part_place + last, part < num_parts, other=0.0)
    total = tl.sum(count, 0)
    tl.store(stats_ptr + last, total)
    running_mean, running_var = 0.0, 0.0
    if RUNNING:
        tl.atomic_add(num_batches_ptr, num_groups.to(tl.int64), tl.program_id(0) == 0, sem="relaxed")
        running_mean = tl.load(running_mean_ptr + channel, known).to(tl.float32)
        running_var = tl.load(running_var_ptr + channel, known).to(tl.float32)
    share = (count / total)[:, None]
    for group in range(num_groups):
        place = 2 * group * channels + channel
        mean = tl.load(parts_ptr + part_place[:, None] + place[None, :], exists, other=0.0)
        variance = tl.load(parts_ptr + part_place[:, None] + (place + channels)[None, :], exists, other=0.0)
        near = tl.load(parts_ptr + place, known, other=0.0)  # the mean of the first part
        apart = tl.where(exists, mean - near[None, :], 0.0)
        away = tl.sum(apart * share, 0)
        apart -= away[None, :]
        mean_of_all = near + away
        variance_of_all = tl.sum((variance + apart * apart) * share, 0)
        tl.store(stats_ptr + place, mean_of_all, known)
        tl.store(stats_ptr + place + channels, variance_of_all, known)
        if RUNNING:
            running_mean += momentum * (mean_of_all - running_mean)
            running_var += momentum * (variance_of_all * (total / (total - 1)) - running_var)
    if RUNNING:
        tl.debug_barrier()  # all threads have loaded what one of them changes
        tl.store(running_mean_ptr + channel, running_mean, known)
        tl.store(running_var_ptr + channel, running_var, known)


@triton.jit
def _of_channels(stats_ptr, weight_ptr, group, channel, channels, eps):
    """Return mean, 1 / standard deviation and weight of the program's channels."""
    known = channel < channels
    place = stats_ptr + 2 * group * channels + channel
    mean = tl.load(place, known, other=0.0)
    variance = tl.load(place + channels, known, other=0.0)
    return mean, tl.rsqrt(variance + eps), tl.load(weight_ptr + channel, known, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=[*_LOOSE, "eps"])
def _normalise_kernel(
    x_ptr, residual_ptr, stats_ptr, weight_ptr, bias_ptr, out_ptr, eps, rows, channels, part_rows,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
):  # fmt: skip
    group, channel, start, num_rows, num_tiles = _own_rows(rows, channels, part_rows, TILE_ROWS, TILE_CHANNELS)
    mean, invstd, weight = _of_channels(stats_ptr, weight_ptr, group, channel, channels, eps)
    scale = (invstd * weight)[None, :]
    bias = tl.load(bias_ptr + channel, channel < channels, other=0.0).to(tl.float32)[None, :]
    x_ptr += start
    residual_ptr += start
    out_ptr += start
    for number in tl.range(0, num_tiles, num_stages=STAGES):
        place, exists = _tile(num_tiles - 1 - number, channel, num_rows, channels, TILE_ROWS)
        x = tl.load(x_ptr + place, exists, other=0.0).to(tl.float32)
        out = tl.fma(x - mean[None, :], scale, bias)
        if RESIDUAL:
            out += tl.load(residual_ptr + place, exists, other=0.0).to(tl.float32)
        if RELU:
            out = tl.where(out <= 0.0, 0.0, out)
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), exists)


@triton.jit
def _before_relu(
    grad_ptr, out_ptr, place, exists, x, mean, scale, bias, RESIDUAL: tl.constexpr, RELU: tl.constexpr
):  # fmt: skip
    """Return the gradient in front of the ReLU, which is 0 where the output is.

    The output is read only if it depends on a residual. Otherwise it is computed from x, as it was, in fewer bytes.
    """
    grad = tl.load(grad_ptr + place, exists, other=0.0).to(tl.float32)
    if RELU:
        if RESIDUAL:
            out = tl.load(out_ptr + place, exists, other=0.0)
        else:
            out = tl.fma(x - mean[None, :], scale[None, :], bias[None, :]).to(out_ptr.dtype.element_ty)
        grad = tl.where(out <= 0.0, 0.0, grad)
    return grad


@triton.jit(do_not_specialize=[*_LOOSE, "eps"])
def _sums_kernel(
    grad_ptr, x_ptr, out_ptr, stats_ptr, weight_ptr, bias_ptr, parts_ptr, grad_residual_ptr,
    eps, rows, channels, part_rows,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write sums of grad * normalised x and of grad over each part, and the gradient of the residual."""
    group, channel, start, num_rows, num_tiles = _own_rows(rows, channels, part_rows, TILE_ROWS, TILE_CHANNELS)
    mean, invstd, weight = _of_channels(stats_ptr, weight_ptr, group, channel, channels, eps)
    bias = tl.load(bias_ptr + channel, channel < channels, other=0.0).to(tl.float32)
    grad_ptr += start
    x_ptr += start
    out_ptr += start
    grad_residual_ptr += start
    products = tl.zeros((TILE_ROWS, TILE_CHANNELS), tl.float32)
    total = tl.zeros((TILE_ROWS, TILE_CHANNELS), tl.float32)
    for number in tl.range(0, num_tiles, num_stages=STAGES):
        place, exists = _tile(number, channel, num_rows, channels, TILE_ROWS)
        x = tl.load(x_ptr + place, exists, other=0.0).to(tl.float32)
        grad = _before_relu(grad_ptr, out_ptr, place, exists, x, mean, invstd * weight, bias, RESIDUAL, RELU)
        if RESIDUAL:
            tl.store(grad_residual_ptr + place, grad.to(grad_residual_ptr.dtype.element_ty), exists)
        products += grad * (x - mean[None, :])
        total += grad
    known = channel < channels
    mine = parts_ptr + (tl.program_id(0) * tl.num_programs(2) + group) * 2 * channels + channel
    tl.store(mine, tl.sum(products, 0) * invstd, known)
    tl.store(mine + channels, tl.sum(total, 0), known)


@triton.jit(do_not_specialize=[*_LOOSE, "eps"])
def _gradient_kernel(
    grad_ptr, x_ptr, stats_ptr, weight_ptr, bias_ptr, sums_ptr, own_sums_ptr, grad_x_ptr, grads_ptr,
    eps, rows, channels, part_rows,
    RELU: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write weight / std * (grad - mean of grad - normalised x * mean of grad * normalised x).

    The programs of the first rows also write this rank's gradients of weight and bias, which are sums over the groups.
    """
    group, channel, start, num_rows, num_tiles = _own_rows(rows, channels, part_rows, TILE_ROWS, TILE_CHANNELS)
    mean, invstd, weight = _of_channels(stats_ptr, weight_ptr, group, channel, channels, eps)
    known = channel < channels
    bias = tl.load(bias_ptr + channel, known, other=0.0).to(tl.float32)
    if (tl.program_id(0) == 0) & (group == 0):
        for half in range(2):
            place = half * channels + channel
            grads = tl.zeros((TILE_CHANNELS,), tl.float32)
            for number in range(tl.num_programs(2)):
                grads += tl.load(own_sums_ptr + 2 * number * channels + place, known, other=0.0)
            tl.store(grads_ptr + place, grads, known)
    values = tl.load(stats_ptr + 2 * tl.num_programs(2) * channels)
    sums_ptr += 2 * group * channels + channel
    slope = (invstd * tl.load(sums_ptr, known, other=0.0) / values)[None, :]
    level = (tl.load(sums_ptr + channels, known, other=0.0) / values)[None, :]
    scale = invstd * weight
    grad_ptr += start
    x_ptr += start
    grad_x_ptr += start
    for number in tl.range(0, num_tiles, num_stages=STAGES):
        place, exists = _tile(num_tiles - 1 - number, channel, num_rows, channels, TILE_ROWS)
        x = tl.load(x_ptr + place, exists, other=0.0).to(tl.float32)
        grad = _before_relu(grad_ptr, x_ptr, place, exists, x, mean, scale, bias, False, RELU)
        grad = (grad - level - (x - mean[None, :]) * slope) * scale[None, :]
        tl.store(grad_x_ptr + place, grad.to(grad_x_ptr.dtype.element_ty), exists)


def normalised(
    x: Tensor,
    residual: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor,
    running: tuple[Tensor, Tensor, Tensor, float],
    eps: float,
    num_groups: int,
    relu: bool,
    gather: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return the output, like `x`, and the statistics (N,) of each group.

    running: running mean and variance (C,) and the number of batches, to be updated in place, and their momentum.
    gather: a function from the statistics of this rank (1, N) to those of all ranks (R, N); None in one process.
    """
    num_parts, run = _split(x, num_groups)
    out = torch.empty_like(x)
    parts_PN = torch.empty((num_parts, 2 * num_groups * len(weight_C) + 1), device=x.device)
    stats_N = torch.empty_like(parts_PN[0])
    run(_statistics_kernel, x, parts_PN)
    if gather is not None:
        _combine(parts_PN, stats_N, num_groups, None)
        parts_PN = gather(stats_N[None])
    _combine(parts_PN, stats_N, num_groups, running)
    arguments = (x, x if residual is None else residual, stats_N, weight_C, bias_C, out, eps)
    run(_normalise_kernel, *arguments, RESIDUAL=residual is not None, RELU=relu)
    return out, stats_N


def _combine(
    parts_PN: Tensor, stats_N: Tensor, num_groups: int, running: tuple[Tensor, Tensor, Tensor, float] | None
) -> None:
    channels = len(stats_N) // (2 * num_groups)
    arguments = (parts_PN, stats_N, *(running or (*(stats_N,) * 3, 0.0)), len(parts_PN), num_groups, channels)
    constants = {"PARTS": triton.next_power_of_2(len(parts_PN)), "CHANNELS": _COMBINED_CHANNELS}
    programs = (triton.cdiv(channels, _COMBINED_CHANNELS),)
    launch(_combine_kernel, programs, *arguments, RUNNING=running is not None, **constants)


def gradients(
    grad: Tensor,
    x: Tensor,
    out: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor,
    stats_N: Tensor,
    eps: float,
    num_groups: int,
    relu: bool,
    reduce: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of x and of the residual, and of weight and bias (2, C).

    out: the output, if a residual was added before the ReLU; otherwise None.
    reduce: a function from sums of this rank to their sums over all ranks; None in one process.
    """
    grad = grad.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.contiguous_format)
    num_parts, run = _split(x, num_groups)
    grad_x = torch.empty_like(x)
    grad_residual = None if out is None else torch.empty_like(x)
    parts_PS2C = torch.empty((num_parts, num_groups, 2, len(weight_C)), device=x.device)
    of_channels = (stats_N, weight_C, bias_C)
    unused = x  # in place of what there is not
    arguments = (grad, x, unused if out is None else out, *of_channels, parts_PS2C)
    written = unused if grad_residual is None else grad_residual
    run(_sums_kernel, *arguments, written, eps, RESIDUAL=out is not None, RELU=relu)
    own_S2C = parts_PS2C.sum(0)
    sums_S2C = own_S2C if reduce is None else reduce(own_S2C)
    grads_2C = torch.empty_like(own_S2C[0])
    before_relu = grad if grad_residual is None else grad_residual
    results = (sums_S2C, own_S2C, grad_x, grads_2C)
    run(_gradient_kernel, before_relu, x, *of_channels, *results, eps, RELU=relu and grad_residual is None)
    return grad_x, grad_residual, grads_2C.to(weight_C.dtype)
