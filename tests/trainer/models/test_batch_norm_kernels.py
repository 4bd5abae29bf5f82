"""The kernels of batch norm: their code for an H100, run on a CPU and looked at, and on a GPU."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gloo import run_ranks
from tests.trainer.machine_code import CAPABILITIES, assert_in_registers, compiled_for_an_h100, on_the_cpu
from trainer import triton_works
from trainer.distributed.collectives import rank
from trainer.models import batch_norm, batch_norm_kernels
from trainer.models.batch_norm import SynchronizedBatchNorm2d, grouped_statistics
from trainer.models.resnet import BasicBlock, resnet_trunk
from trainer.models.trunk import ConvolutionalTrunk

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


EPS = 1e-5
FORMS = ("plain", "relu", "residual")
FLAGS = [(False, False), (False, True), (True, True)]  # of the forms: with a residual; with a ReLU
# What a ResNet of small pictures has at a small batch; then odd numbers, one row, one channel, one pixel, no map.
SHAPES = [(2, 64, 32, 32), (2, 128, 16, 16), (2, 256, 8, 8), (2, 512, 4, 4)]
ODD_SHAPES = [(6, 3, 5, 7), (1, 70, 3, 3), (2, 1, 4, 4), (8, 8, 1, 1), (6, 130)]


@contextmanager
def few_programs(most: int = 4, *, capability: int = 90) -> Iterator[None]:
    """Run kernels on the CPU, with so few programs in a launch that each goes through several tiles."""
    with on_the_cpu(capability), mock.patch.object(batch_norm_kernels, "_NUM_PROGRAMS", most):
        yield


@dataclass(frozen=True)
class Given:
    """The inputs of a norm of S groups, and the gradient of its output."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor
    grad: Tensor
    num_groups: int
    relu: bool

    @classmethod
    def drawn(cls, shape: tuple[int, ...], dtype: torch.dtype, num_groups: int, *, form: str) -> Given:
        torch.manual_seed(0)
        layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        x, residual, grad = (torch.randn(shape).to(dtype).contiguous(memory_format=layout) for _ in range(3))
        groups = torch.arange(1, 1 + num_groups).repeat_interleave(shape[0] // num_groups)
        x.mul_(groups.view(-1, *(1,) * (len(shape) - 1))).add_(3)
        weight, bias = torch.rand(shape[1]) + 0.5, torch.randn(shape[1])
        return cls(x, residual if form == "residual" else None, weight, bias, grad, num_groups, form != "plain")

    def by_kernels(self) -> list[Tensor]:
        """Return output, running statistics and all gradients."""
        running = torch.zeros_like(self.weight), torch.ones_like(self.weight)
        counted = (*running, torch.zeros((), dtype=torch.int64), 0.1)
        out, stats_N = batch_norm_kernels.normalised(
            self.x, self.residual, self.weight, self.bias, counted, EPS, self.num_groups, self.relu, None
        )
        assert out.dtype == self.x.dtype
        assert out.stride() == self.x.stride()
        kept = None if self.residual is None else out
        grad_x, grad_residual, (grad_weight, grad_bias) = batch_norm_kernels.gradients(
            self.grad, self.x, kept, self.weight, self.bias, stats_N, EPS, self.num_groups, self.relu, None
        )
        gradients = [grad_x, grad_weight, grad_bias, *([] if grad_residual is None else [grad_residual])]
        return [out, *running, *gradients]

    def in_float64(self, out: Tensor) -> list[Tensor]:
        """Return the same by torch. The ReLU passes the gradient where `out` does: rounding may move a value over 0."""
        mean, var = torch.zeros_like(self.weight).double(), torch.ones_like(self.weight).double()
        leaves = [each.double().requires_grad_() for each in (self.x, self.weight, self.bias)]
        x, weight, bias = leaves
        parts = [F.batch_norm(each, mean, var, weight, bias, True, 0.1, EPS) for each in x.chunk(self.num_groups)]
        expected, grad = torch.cat(parts), self.grad.double()
        if self.residual is not None:
            leaves.append(self.residual.double().requires_grad_())
            expected = expected + leaves[-1]
        if self.relu:
            grad = grad * (out > 0)
        torch.autograd.backward(expected, grad)
        gradients = [each.grad for each in leaves if each.grad is not None]
        return [expected.detach().relu() if self.relu else expected.detach(), mean, var, *gradients]


def assert_near(found: list[Tensor], expected: list[Tensor], *, rtol: float) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        away = (one.double() - other.double()).norm() / other.double().norm()
        assert away <= rtol, f"result {number} is {away:.1e} away"


CASES = [
    *((shape, FORMS[number % 3], torch.float32) for number, shape in enumerate(SHAPES)),
    *((shape, form, torch.float32) for shape in ODD_SHAPES for form in FORMS),
    *(((6, 40, 5, 5), form, torch.bfloat16) for form in ("relu", "residual")),
]


@pytest.mark.pinned
@pytest.mark.parametrize(("shape", "form", "dtype"), CASES)
def test_outputs_gradients_and_statistics_are_those_of_torch_in_float64(
    shape: tuple[int, ...], form: str, dtype: torch.dtype
) -> None:
    half = dtype == torch.bfloat16  # outputs and their gradients have the error of one rounding
    num_groups = 3 if half else 1 if shape[0] == 1 or form == "relu" else 2
    given = Given.drawn(shape, dtype, num_groups, form=form)
    with few_programs():
        found = given.by_kernels()
    expected = given.in_float64(found[0])
    assert_near(found, expected, rtol=2.0**-8 if half else 2e-6)
    assert_near(found[1:3], expected[1:3], rtol=1e-6)
    assert_near(found[4:6], expected[4:6], rtol=1e-5 if half else 2e-6)


@pytest.mark.pinned
@pytest.mark.parametrize("name", ["far", "outlier"])
def test_large_means_and_unlike_first_values_do_not_cancel(name: str) -> None:
    """Means of 1,000 standard deviations; and first values of a tile that are unlike all others."""
    given = Given.drawn((4, 8, 32, 32), torch.float32, 1, form="plain")
    given.x[: 1 if name == "outlier" else 4] += 1000
    with few_programs():
        found = given.by_kernels()
    assert_near(found, given.in_float64(found[0]), rtol=1e-4)
    unbiased = (found[2] - 0.9) / 0.1
    assert_near([unbiased], [given.x.double().var((0, 2, 3))], rtol=1e-5)


@pytest.mark.pinned
def test_a_gradient_is_the_slope_of_the_output_between_two_near_inputs() -> None:
    given = Given.drawn((4, 8, 6, 6), torch.float32, 2, form="plain")
    with few_programs():
        grad_x = given.by_kernels()[3]
        for seed in range(3):
            towards = torch.randn(given.x.shape, generator=torch.Generator().manual_seed(seed))
            values = []
            for sign in (1, -1):
                near = Given(given.x + sign * 1e-2 * towards, None, given.weight, given.bias, given.grad, 2, False)
                values.append((near.by_kernels()[0].double() * given.grad).sum())
            slope = (values[0] - values[1]) / 2e-2
            assert abs(slope - (grad_x * towards).sum()) <= 1e-3 * grad_x.norm() * towards.norm() / 10, seed


def network() -> ConvolutionalTrunk:
    torch.manual_seed(0)
    trunk = resnet_trunk(BasicBlock, (1, 1), form="small", width=16)  # torch needs as many channels on a CPU
    trunk.synchronize_batch_norm()
    return trunk.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def passed_through(trunk: nn.Module, views_BCHW: Tensor) -> list[Tensor]:
    """Return the map, gradients and buffers of a pass of both views together."""
    with grouped_statistics(2):
        map_BCHW = trunk(views_BCHW.contiguous(memory_format=torch.channels_last))
    torch.autograd.backward(map_BCHW.square().sum())
    gradients = [parameter.grad for parameter in trunk.parameters() if parameter.grad is not None]
    return [map_BCHW.detach(), *gradients, *trunk.buffers()]


@pytest.mark.pinned
@pytest.mark.parametrize(("form", "calls"), [("checkpointed", 12), ("compiled", 6)])
def test_recomputed_or_compiled_into_one_graph_a_network_is_as_with_torchs_layers(form: str, calls: int) -> None:
    views_BCHW = torch.rand(8, 3, 8, 8)
    expected = passed_through(network().double(), views_BCHW.double())
    trunk = network()
    if form == "checkpointed":
        trunk.checkpointing = 1
    else:
        trunk.compile(backend="aot_eager", fullgraph=True)
    original = batch_norm_kernels.normalised
    with few_programs(1), mock.patch.object(batch_norm_kernels, "normalised", wraps=original) as counted:
        found = passed_through(trunk, views_BCHW)
    assert counted.call_count == calls
    assert_near(found, expected, rtol=1e-4)


def of_a_rank(number: int, parts: list[Tensor], residuals: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Return output and gradients of one rank, (S, B, ...), then its part of the parameters' gradients and buffers."""
    norm = SynchronizedBatchNorm2d(3).to(parts[number].dtype)
    leaves = [each[number].clone().requires_grad_() for each in (parts, residuals)]
    rows = [each.flatten(0, 1).contiguous(memory_format=torch.channels_last) for each in leaves]
    with grouped_statistics(2):
        out = norm(rows[0], rows[1], relu=True).view(parts[number].shape)
    torch.autograd.backward(out, grads[number])
    found = [out.detach(), *leaves, norm.weight, norm.bias]
    kept = [norm.running_mean, norm.running_var]
    return [found[0], *[each.grad for each in found[1:] if each.grad is not None], *[s for s in kept if s is not None]]


def of_two_ranks(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    number = rank()
    given = [[(r + 1) * torch.randn(2, size, 3, 5, 4) + 20 for r, size in enumerate(sizes)] for _ in range(3)]
    given[1] = [each - 20 for each in given[1]]
    with few_programs(), mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as messages:
        found = of_a_rank(number, *given)
    assert messages.call_count == 2
    for place in (3, 4):
        dist.all_reduce(found[place])
    with mock.patch.object(batch_norm, "is_distributed", return_value=False):
        expected = of_a_rank(0, *[[torch.cat(each, 1).double()] for each in given])
    own = slice(sum(sizes[:number]), sum(sizes[: number + 1]))
    assert_near(found[:3], [each[:, own] for each in expected[:3]], rtol=1e-5)
    assert_near(found[3:], expected[3:], rtol=1e-5)


@pytest.mark.pinned
@pytest.mark.ranks
def test_two_ranks_with_other_numbers_of_rows_are_as_one_process_and_each_way_takes_one_message() -> None:
    run_ranks(of_two_ranks, 2, (2, 5))


@pytest.mark.pinned
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_before_their_first_use_right_kernels_pass_and_wrong_ones_do_not(capability: int) -> None:
    right = batch_norm_kernels.gradients

    def wrong(grad: Tensor, *others: Any, **settings: Any) -> Any:
        return right(1.1 * grad, *others, **settings)

    with few_programs(capability=capability):
        for dtype in triton_works.DTYPES:
            batch_norm._try_out(batch_norm_kernels, dtype)
        with (
            mock.patch.object(batch_norm_kernels, "gradients", wrong),
            pytest.raises(ValueError, match=r"not those of torch \(they are 10% away\)"),
        ):
            batch_norm._try_out(batch_norm_kernels, torch.float32)


@pytest.mark.slow
@pytest.mark.pinned
@pytest.mark.parametrize("name", ["statistics", "normalise", "sums", "gradient"])
def test_compiled_for_an_h100_kernels_read_16_bytes_at_once_ahead_of_time_and_spill_nothing(
    name: str, tmp_path: Path
) -> None:
    kernel = getattr(batch_norm_kernels, f"_{name}_kernel")
    half = {f"{each}_ptr" for each in ("x", "residual", "out", "grad", "grad_x", "grad_residual")}
    for residual, relu in FLAGS:
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
        *[(shape, torch.bfloat16, *form) for shape in [(64, 64, 32, 32), (64, 512, 4, 4), (10, 130)] for form in FLAGS],
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
