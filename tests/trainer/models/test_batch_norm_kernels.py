"""The kernels of batch norm: in the interpreter of Triton on a CPU, compiled for an H100 without one, and on a GPU."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.trainer.code_of_kernels import assert_in_registers, compiled_for_an_h100, run_in_the_interpreter
from trainer import triton_works
from trainer.models import batch_norm, batch_norm_kernels
from trainer.models.batch_norm import SynchronizedBatchNorm2d, grouped_statistics

FORMS = [(False, False), (False, True), (True, True)]  # with a residual; with a ReLU
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.process
@pytest.mark.parametrize("check", ["numbers", "a_network", "ranks"])
def test_in_the_interpreter_kernels_are_as_torch_in_float64(check: str, tmp_path: Path) -> None:
    run = functools.partial(run_in_the_interpreter, "tests.trainer.models.interpreted_kernels", check)
    arguments = [(rank, str(tmp_path / "store")) for rank in "01"] if check == "ranks" else [()]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda of_rank: run(*of_rank), arguments))


@pytest.mark.slow
@pytest.mark.pinned
@pytest.mark.parametrize("name", ["statistics", "normalise", "sums", "gradient"])
def test_compiled_for_an_h100_kernels_read_16_bytes_at_once_ahead_of_time_and_spill_nothing(
    name: str, tmp_path: Path
) -> None:
    kernel = getattr(batch_norm_kernels, f"_{name}_kernel")
    half = {f"{each}_ptr" for each in ("x", "residual", "out", "grad", "grad_x", "grad_residual")}
    for residual, relu in FORMS:
        flags = {"RESIDUAL": residual, "RELU": relu}
        constants = {flag: value for flag, value in flags.items() if flag in kernel.arg_names}
        tile = {"TILE_ROWS": 32, "TILE_CHANNELS": 64}
        binary = compiled_for_an_h100(kernel, half, tile | constants, num_warps=8)
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^,]+, [^,]+, (\w+)", binary["ptx"])
        assert copies
        assert set(copies) == {"0x10"}
        assert not re.search(r"[ls]t\.(global|shared)\.b16", binary["ptx"])
        assert_in_registers(binary, tmp_path, most=80)  # three programs of 256 threads on each processor


def test_where_triton_does_not_compile_torch_goes_on_and_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_works, "_found", {})
    monkeypatch.setattr(triton_works, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    failing = mock.Mock(side_effect=RuntimeError("Failed to find C compiler.\nPlease specify via CC"))
    monkeypatch.setattr(batch_norm_kernels, "launch", failing)
    x, residual = (torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last) for _ in range(2))
    norms = [SynchronizedBatchNorm2d(3) for _ in range(3)]
    with grouped_statistics(2):
        found = [norm(x, residual, relu=True) for norm in norms]
    expected = F.relu(torch.cat([torch.nn.BatchNorm2d(3)(each) for each in x.chunk(2)]) + residual)
    torch.testing.assert_close(found[0], expected)
    (said,) = caplog.messages
    assert said.endswith("does not work here: Failed to find C compiler. Please specify via CC")


def drawn_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Return input, residual and gradient (channels_last), weight and bias."""
    torch.manual_seed(0)
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    maps = [torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=layout) for _ in range(3)]
    return [*maps, torch.rand(shape[1], device="cuda") + 0.5, torch.randn(shape[1], device="cuda")]


def passed(given: list[Tensor], *, residual: bool, relu: bool) -> list[Tensor]:
    """Return output, gradients and running statistics of two groups."""
    norm = SynchronizedBatchNorm2d(given[0].shape[1]).to(given[0].device, given[3].dtype)
    norm.load_state_dict({"weight": given[3], "bias": given[4]}, strict=False)
    leaves = [each.detach().requires_grad_() for each in given[: 1 + residual]]
    with mock.patch.object(norm, "_check_input_dim"), grouped_statistics(2):
        out = norm(leaves[0], leaves[1] if residual else None, relu)
    torch.autograd.backward(out, given[2])
    tensors = [out.detach(), *[each.grad for each in (*leaves, norm.weight, norm.bias)]]
    return [each for each in (*tensors, norm.running_mean, norm.running_var) if each is not None]


@needs_a_gpu
@pytest.mark.parametrize(
    ("shape", "dtype", "residual", "relu"),
    [
        *[(shape, torch.bfloat16, *form) for shape in [(64, 64, 32, 32), (64, 512, 4, 4), (10, 130)] for form in FORMS],
        *[((6, 3, 5, 7), dtype, True, True) for dtype in (torch.bfloat16, torch.float32)],
        *[((6, 3, 5, 7), torch.float32, False, False), ((64, 64, 32, 32), torch.float32, True, True)],
    ],
)
def test_on_a_gpu_kernels_are_as_torch_in_float64_and_have_the_same_bits_again(
    shape: tuple[int, ...], dtype: torch.dtype, residual: bool, relu: bool
) -> None:
    given = drawn_on_a_gpu(shape, dtype)
    assert batch_norm._kernels(given[0], given[1], 2) is batch_norm_kernels
    found, again = (passed(given, residual=residual, relu=relu) for _ in range(2))
    assert all(map(torch.equal, found, again))
    expected = passed([each.double() for each in given], residual=residual, relu=relu)
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}[dtype]
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        # Rounding may move a value over the zero of the ReLU, and with it a gradient.
        flips = 1e-2 if relu and 0 < number < len(found) - 2 else 0
        assert (one - other).norm() <= (rounding + flips) * other.norm(), number


@needs_a_gpu
def test_on_a_gpu_kernels_can_be_recorded_and_compiled() -> None:
    given = drawn_on_a_gpu((16, 64, 8, 8), torch.bfloat16)
    norm = SynchronizedBatchNorm2d(64).cuda()
    expected = norm(*given[:2], relu=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = norm(*given[:2], relu=True)
    graph.replay()
    assert torch.equal(recorded, expected)
    assert torch.equal(torch.compile(norm, fullgraph=True)(*given[:2], relu=True), expected)


def timed(run: Callable[[], Any]) -> float:
    """Return the median seconds of a recorded call. 200 MB are written before each, so that no cache is warm."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(200 << 20, dtype=torch.uint8, device="cuda")
    seconds: list[float] = []
    for _ in range(21):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return sorted(seconds)[10]


def each_pass(shape: tuple[int, int, int, int]) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Yield each pass over two groups: its name, the tensors that it reads or writes, and a call."""
    x, residual, grad, weight, bias = drawn_on_a_gpu(shape, torch.bfloat16)
    settings = (1e-5, 2, True, None)
    running = torch.zeros_like(weight), torch.ones_like(weight)
    launches: list[tuple[Any, ...]] = []

    def forward(added: Tensor | None) -> tuple[Tensor, Tensor]:
        counted = (*running, torch.zeros((), dtype=torch.int64, device="cuda"), 0.1)
        return batch_norm_kernels.normalised(x, added, weight, bias, counted, *settings)

    def backward(out: Tensor | None, stats_N: Tensor) -> None:
        batch_norm_kernels.gradients(grad, x, out, weight, bias, stats_N, *settings)

    for name, added, passes in (("ReLU", None, (1, 2, 2, 3)), ("add, ReLU", residual, (1, 3, 4, 3))):
        out, stats_N = forward(added)
        kept = None if added is None else out
        yield f"forward, {name}", 3 if added is None else 4, functools.partial(forward, added)
        yield f"backward, {name}", 5 if added is None else 7, functools.partial(backward, kept, stats_N)
        launches.clear()
        record = mock.patch.object(
            batch_norm_kernels, "launch", lambda *given, **named: launches.append((given, named))
        )
        with record:
            forward(added)
            backward(kept, stats_N)
        of_maps = [each for each in launches if each[0][0] is not batch_norm_kernels._combine_kernel]
        for (given, named), num_tensors in zip(of_maps, passes, strict=True):
            call = functools.partial(triton_works.launch, *given, **named)
            yield f"{given[0].fn.__name__.strip('_')}, {name}", num_tensors, call
    cudnn = (weight, bias, *running, True, 0.1, 1e-5)
    halves = [list(each.half().chunk(2)) for each in (x, grad)]  # torch gives it no bfloat16
    yield "cuDNN forward, float16", 3, lambda: [torch.cudnn_batch_norm(each, *cudnn) for each in halves[0]]
    saved = [torch.cudnn_batch_norm(each, *cudnn) for each in halves[0]]
    backward_by_cudnn = torch.ops.aten.cudnn_batch_norm_backward
    yield (
        "cuDNN backward, float16",
        5,
        lambda: [
            backward_by_cudnn(one, other, weight, *running, *kept[1:3], 1e-5, kept[3])
            for one, other, kept in zip(*halves, saved, strict=True)
        ],
    )


@needs_a_gpu
@pytest.mark.parametrize("shape", [(512, 64, 32, 32), (512, 128, 16, 16), (512, 256, 8, 8), (512, 512, 4, 4)])
def test_speed_on_a_gpu(shape: tuple[int, int, int, int]) -> None:
    """The printed TB/s count each tensor once for each pass, as if nothing were cached."""
    for name, num_tensors, run in each_pass(shape):
        seconds = timed(run)
        speed = num_tensors * 2 * math.prod(shape) / seconds / 1e12
        print(f"batch norm, {'x'.join(map(str, shape))}, {name}: {speed:.2f} TB/s, {seconds * 1e6:.1f} us")
        assert seconds > 0
