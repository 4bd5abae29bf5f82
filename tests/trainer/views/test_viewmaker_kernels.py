"""The viewmaker's kernels: their code for an H100, run on a CPU and looked at; on tensors without data; on a GPU."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from benchmarks.kernels import (
    GPU,
    KernelCounter,
    _autocast_of_a_gpu,
    _to_gpu_without_data,
    backward_without_a_gpu,
    launched_by,
)
from data_pipeline.core.counter_rng import DrawKeys
from tests.old_versions import needs_gpu_tensors_without_data
from tests.trainer.machine_code import CAPABILITIES, assert_in_registers, compiled_for_an_h100, on_the_cpu
from trainer import triton_works
from trainer.views import viewmaker, viewmaker_kernels
from trainer.views.viewmaker import Viewmaker, ViewmakerConfig

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


EPS = 1e-5
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
# Of a map: the first layer's, an inner one's with 136 channels, odd ones, and more pixels than a tile has.
SHAPES = [(2, 4, 12, 8), (1, 136, 8, 8), (3, 24, 5, 7), (2, 40, 16, 24)]
# Of a layer: whether it has a residual and noise, its border, and whether that repeats the edge.
FORMS = [(False, False, 4, False), (False, True, 1, False), (True, False, 1, True), (True, True, 1, False)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    values = torch.randn(shape) * scale + 3
    return values.to(dtype).contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values


def assert_near(found: Tensor, expected: Tensor, rtol: float, case: object = "", least: float = 0) -> None:
    """The distance is at most `rtol` of the norm of what is expected, or of `least`."""
    away = float((found.detach().double() - expected).norm()) / max(float(expected.detach().norm()), least)
    assert away <= rtol, f"{case}: {away:.1e} away"


NORMS = [
    (shape, number, dtype, mean, *form)
    for number, shape in enumerate(SHAPES)
    for dtype, mean in [(torch.float32, 0), *([(torch.float32, 1000), (torch.bfloat16, 0)] if number == 0 else [])]
    for form in FORMS
]


def compare_a_norm(
    shape: tuple[int, int, int, int],
    num_filled: int,
    dtype: torch.dtype,
    mean: int,
    with_residual: bool,
    with_noise: bool,
    border: int,
    repeat_edge: bool,
) -> None:
    """Compare output and all gradients with torch in float64; the last channels are only filled."""
    torch.manual_seed(num_filled)
    B, C, H, W = shape
    C -= num_filled
    y, residual = drawn(*shape, dtype=dtype), drawn(B, shape[1], H + 2, W + 2, dtype=dtype)
    y += mean
    y[:, C:] = residual[:, C:] = 0
    noise = torch.rand(B, H, W) if with_noise else None
    given = [y, torch.rand(C) + 0.5, torch.randn(C), residual]
    leaves = [each.detach().requires_grad_() for each in given]
    affine_B2C = torch.stack(leaves[1:3]).expand(B, 2, C)
    found, stats = viewmaker_kernels.normalise(
        leaves[0], affine_B2C, leaves[3] if with_residual else None, noise, EPS, border, repeat_edge
    )
    assert found.dtype == dtype
    assert found.shape[1] % 8 == 0
    assert found.is_contiguous(memory_format=torch.channels_last)
    # Contiguous, because for one sample torch's gradients of other layouts are wrong.
    parts = [each[:, :C].contiguous() if each.dim() == 4 else each for each in given]
    exact = [each.detach().double().requires_grad_() for each in parts]
    expected = F.instance_norm(exact[0], weight=exact[1], bias=exact[2], eps=EPS)
    grad = drawn(*found.shape, dtype=dtype)
    exact_grad = grad[:, :C].double().contiguous()
    if with_residual:
        expected = expected + exact[3][..., 1:-1, 1:-1]
    else:  # rounding may move a value over 0
        expected, exact_grad = expected.relu(), exact_grad * (found[:, :C] > 0)
    mode = "replicate" if repeat_edge else "reflect"
    expected = F.pad(expected, (border,) * 4, mode=mode)
    rtol = 1e-4 if mean else ROUNDING[dtype]
    # Sums with images in the border are rounded before their mean, 3 deviations here, is subtracted.
    of_gradient = 5e-3 if mean else max(1e-5, rtol if dtype == torch.float32 else 4 * rtol)
    assert_near(found[:, :C], expected.detach(), rtol)
    assert_near(stats[:, 0], exact[0].detach().mean((2, 3)), 1e-6)
    extra = found[:, C:].clone()
    if noise is not None:
        assert_near(extra[:, 0], F.pad(noise[:, None], (border,) * 4, mode=mode)[:, 0], ROUNDING[dtype])
        extra[:, 0] = 0
    assert not extra.any()
    torch.autograd.backward(found, grad)
    torch.autograd.backward(expected, exact_grad)
    for leaf, other in zip(leaves[: 3 + with_residual], exact, strict=False):
        assert leaf.grad is not None
        assert other.grad is not None
        assert_near(leaf.grad[:, :C] if leaf.dim() == 4 else leaf.grad, other.grad, of_gradient)
    assert leaves[0].grad is not None
    assert not leaves[0].grad[:, C:].any()  # a norm hands on nothing of what is only filled


@pytest.mark.pinned
@pytest.mark.parametrize("case", NORMS)
def test_a_norm_and_its_gradients_are_those_of_torch_in_float64(case: Any) -> None:
    with on_the_cpu():
        compare_a_norm(*case)


@pytest.mark.pinned
@pytest.mark.parametrize("dtype", [*ROUNDING])
def test_filled_weights_those_that_upsample_and_all_gradients_are_those_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(6, 4, 9, False), (8, 16, 3, False), (13, 9, 3, True), (3, 8, 3, True), (40, 41, 3, False)]
    weights = [drawn(*shape[:3], shape[2]).requires_grad_() for shape in shapes]
    norms = [torch.randn(size, requires_grad=True) for size in (5, 5, 9, 9)]
    upsamples = [is_up for *_, is_up in shapes]
    with on_the_cpu():
        found, affine = viewmaker_kernels.prepared(weights, upsamples, norms, 3, dtype)
    for weight, is_up, own in zip(weights, upsamples, found, strict=True):
        num_out, num_in, size, _ = case = weight.shape
        exact = weight.detach().double().requires_grad_()
        expected = exact
        if is_up:
            expected = F.conv_transpose2d(exact.flatten(0, 1)[:, None], torch.ones(1, 1, 2, 2).double())
            expected = expected.view(num_out, num_in, size + 1, size + 1).flip(2, 3)
        assert own.dtype == dtype
        assert own.is_contiguous(memory_format=torch.channels_last)
        assert own.shape == (-(-num_out // 8) * 8, -(-num_in // 8) * 8, *expected.shape[2:])
        assert_near(own[:num_out, :num_in], expected.detach(), ROUNDING[dtype], case)
        assert own.count_nonzero() == own[:num_out, :num_in].count_nonzero()
        grad = drawn(*own.shape, dtype=dtype)
        with on_the_cpu():
            (gradient,) = torch.autograd.grad(own, weight, grad, retain_graph=True)
        (of_exact,) = torch.autograd.grad(expected, exact, grad[:num_out, :num_in].double())
        assert gradient.stride() == weight.stride()  # otherwise, the gradient of a parameter is a copy
        assert_near(gradient, of_exact, 2e-6, (case, "gradient"))
    for number, own in enumerate(affine):
        weight, bias = norms[2 * number : 2 * number + 2]
        assert torch.equal(own, torch.stack([weight, bias]).expand(3, -1, -1))
        grads = torch.autograd.grad(own, [weight, bias], torch.ones_like(own), retain_graph=True)
        assert all(torch.equal(each, torch.full_like(weight, 3)) for each in grads)


@pytest.mark.pinned
@pytest.mark.parametrize("size", [8, 24])  # the second has more entries than a program reads at once
def test_perturbations_also_of_zeros_and_their_gradients_are_those_of_torch_in_float64(size: int) -> None:
    r = drawn(3, 3, size, size) - 3
    r[1] = 0
    grad, results = drawn(3, 3, size, size), []
    for own in (r.requires_grad_(), r.detach().double().requires_grad_()):
        with on_the_cpu() as launches:
            delta = viewmaker.project(own, budget=0.05)
            torch.autograd.backward(delta, grad.to(own.dtype))
        assert launches.call_count == (2 if own.dtype == torch.float32 else 0)
        results.append((delta, own.grad))
    for found, expected in zip(*results, strict=True):
        assert found is not None
        assert expected is not None
        assert_near(found, expected.detach(), 2e-6)


def network(channels: int, width: int, dtype: torch.dtype) -> Viewmaker:
    torch.manual_seed(0)
    config = ViewmakerConfig(base_width=width, num_res_blocks=2, clamp=False)
    network = Viewmaker(config, image_channels=channels).to(dtype)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape).to(dtype), alpha=0.1)
    return network


def passed(network: Viewmaker, x: Tensor, target: Tensor) -> list[Tensor]:
    """Return views and the gradients of pictures and parameters."""
    x = x.detach().requires_grad_()
    keys = DrawKeys(seed=0, epoch=0, index_B=torch.arange(len(x)), view=0)
    views = network(x, keys)
    torch.autograd.backward((views * target).sum())
    return [views.detach(), *(each.grad for each in (x, *network.parameters()) if each.grad is not None)]


@pytest.mark.pinned
@pytest.mark.parametrize(
    ("channels", "width", "form"), [(3, 6, "plain"), (1, 8, "plain"), (3, 6, "checkpointed"), (3, 6, "compiled")]
)
def test_a_viewmaker_also_recomputed_or_compiled_into_one_graph_is_that_of_float64(
    channels: int, width: int, form: str
) -> None:
    exact, ours = network(channels, width, torch.float64), network(channels, width, torch.float32)
    torch.manual_seed(1)
    x, target = torch.rand(2, channels, 12, 16), torch.randn(2, channels, 12, 16)
    expected = passed(exact, x.double(), target.double())
    if form == "checkpointed":
        ours.checkpointing = 2
    elif form == "compiled":
        ours.compile_layers(backend="aot_eager", fullgraph=True)
        with on_the_cpu():
            passed(ours, x, target)
        ours.zero_grad()
    with on_the_cpu() as launches:
        found = passed(ours, x, target)
    num_layers = 3 + 2 * 2 + 2
    forwards = 2 if form == "checkpointed" else 1
    # A norm for each layer, with its gradient, two draws of noise, weights and budget with their gradients.
    assert launches.call_count == (1 + forwards) * num_layers + 2 + 4
    assert len(found) == len(expected)
    # The shift of a norm before another norm has no effect, so its gradient is a rounding error.
    least = max(float(each.norm()) for each in expected[2:]) / 100
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_near(one, other, 1e-4, number, 0 if number < 2 else least)
        assert other.any() or not one.any(), number


@pytest.mark.pinned
def test_noise_is_that_of_a_cpu_bit_for_bit() -> None:
    plain = DrawKeys(seed=3, epoch=1, index_B=torch.tensor([0, 7, 2**40]), view=1)
    both = dataclasses.replace(plain, view=0).two_views()
    for keys in (plain, both, dataclasses.replace(both, recorded_epoch=torch.tensor(5))):
        for height, width in [(8, 8), (40, 52)]:
            expected = viewmaker.draw_noise(keys, height, width, layers=range(1, 4))
            with on_the_cpu() as launches:
                assert torch.equal(viewmaker.draw_noise(keys, height, width, layers=range(1, 4)), expected)
            assert launches.call_count == 1


@pytest.mark.pinned
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_before_their_first_use_right_kernels_pass_and_wrong_ones_do_not(capability: int) -> None:
    right = viewmaker_kernels._normalise_gradient

    def wrong(grad: Tensor, *others: Any) -> Any:
        return right(1.1 * grad, *others)

    with on_the_cpu(capability):
        for dtype in ROUNDING:
            viewmaker._try_out(viewmaker_kernels, dtype)
        with (
            mock.patch.object(viewmaker_kernels, "_normalise_gradient", wrong),
            pytest.raises(ValueError, match="its results are not those of torch"),
        ):
            viewmaker._try_out(viewmaker_kernels, torch.float32)


# Of the published network: the layer before the last convolution, one of 64 channels, and a residual block with noise.
LAYERS = [
    {"H": 32, "W": 32, "C": 32, "IN": 32, "OUT": 32, "BORDER": 4, "REPEAT": 0},
    {"H": 16, "W": 16, "C": 64, "IN": 64, "OUT": 64, "BORDER": 1, "REPEAT": 1},
    {"H": 8, "W": 8, "C": 129, "IN": 136, "OUT": 136, "BORDER": 1, "REPEAT": 0},
]
CASES = [
    *[("normalise", layer, flag) for layer in LAYERS for flag in (False, True)],
    *[("normalise_gradient", layer, flag) for layer in LAYERS for flag in (False, True)],
]


@pytest.mark.slow
@pytest.mark.pinned
@pytest.mark.parametrize(("name", "layer", "relu"), CASES)
def test_compiled_for_an_h100_kernels_read_and_write_16_bytes_at_once_and_spill_nothing(
    name: str, layer: dict[str, int], relu: bool, tmp_path: Path
) -> None:
    kernel = getattr(viewmaker_kernels, f"_{name}_kernel")
    form = {"RELU": relu} if "gradient" in name else dict.fromkeys(("residual_ptr", "noise_ptr") if relu else ())
    constants: dict[str, Any] = {**layer, **form, "ROWS": 64, "TILE": 32}
    half = {f"{each}_ptr" for each in ("y", "residual", "out", "grad", "inner", "grad_y")}
    binary = compiled_for_an_h100(kernel, half, constants, num_warps=8)
    assert re.search(r"(ld\.global|cp\.async\.c[ag]\.shared\.global).*(v4\.b32|0x10)", binary["ptx"])
    assert "st.global.v4.b32" in binary["ptx"]
    assert not re.search(r"[ls]t\.global\.b16", binary["ptx"])
    assert_in_registers(binary, tmp_path, most=128)  # two programs of 256 threads on each processor


@pytest.mark.slow
@pytest.mark.pinned
@pytest.mark.parametrize("with_gradient", [False, True])
def test_compiled_for_an_h100_kernels_of_weights_and_budget_spill_nothing(with_gradient: bool, tmp_path: Path) -> None:
    """Of three layers, one of which is filled and one of which upsamples; and of pictures of 3,072 entries."""
    layers = (
        (32, 9, 4, 32, 9, 8, 0, 0),
        (129, 3, 129, 136, 3, 136, 10368, 20736),
        (64, 3, 131, 64, 4, 136, 160137, 187200),
    )
    of_budget = {"SIZE": 3072} | ({} if with_gradient else {"grad_ptr": None})
    for kernel, half, constants in (
        (viewmaker_kernels._spend_kernel, (), of_budget),
        (viewmaker_kernels._fill_kernel, ("target_ptr",), {"LAYERS": layers}),
    ):
        binary = compiled_for_an_h100(kernel, half, {**constants, "BLOCK": 1024}, num_warps=4)
        assert_in_registers(binary, tmp_path, most=128)


class Walk(KernelCounter):  # type: ignore[no-untyped-call]
    """Counts the launches of a pass, and notes maps of `num_samples` samples in half precision in another layout."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self._num_samples = num_samples
        self.maps: list[str] = []
        self.elsewhere: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = super().__torch_dispatch__(func, types, args, kwargs)
        for result in tree_leaves([results, args]):
            if self._is_map(result):
                self.maps.append(str(func))
                if not result.is_contiguous(memory_format=torch.channels_last):
                    self.elsewhere.append(f"{func} {tuple(result.shape)} {result.stride()}")
        return results

    def _is_map(self, value: Any) -> bool:
        """Return whether something is a square map of the network, not a picture or perturbation of few channels."""
        is_on_gpu = isinstance(value, Tensor) and value.is_cuda and value.dtype == torch.bfloat16
        is_map = is_on_gpu and value.dim() == 4 and len(value) == self._num_samples and value.shape[1] >= 8
        return is_map and value.shape[2] == value.shape[3]


def walked(*, channels: int, size: int) -> Walk:
    """Return what a published viewmaker launches for one forward and backward pass, on tensors without data."""
    network, num = Viewmaker(ViewmakerConfig(clamp=False), image_channels=channels), 24
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with FakeTensorMode(), _autocast_of_a_gpu(), torch.autocast("cuda", torch.bfloat16):
        _to_gpu_without_data(network)
        keys = DrawKeys(seed=0, epoch=0, index_B=torch.empty(num, dtype=torch.int64, device=GPU), view=0)
        images = torch.empty(num, channels, size, size, device=GPU)
        walk = Walk(num)
        with walk, launched_by(walk.count_triton):
            walk.phase = "views"
            deltas = network.deltas(images, keys)
            walk.phase = "backward"
            with torch.autocast("cuda", enabled=False):
                backward_without_a_gpu((deltas * deltas).sum())
    return walk


@needs_gpu_tensors_without_data
@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 64)])
def test_every_map_stays_channels_last_on_a_gpu(channels: int, size: int) -> None:
    walk = walked(channels=channels, size=size)
    assert walk.elsewhere == []
    assert {"aten.convolution.default", "aten.convolution_backward.default"} <= set(walk.maps)
    launches = walk.launches["views"] + walk.launches["backward"]
    num_layers = 11  # with a norm; a twelfth convolution has none
    assert launches["_normalise_kernel"] == launches["_normalise_gradient_kernel"] == num_layers
    assert walk.total <= 96


@needs_a_gpu
def test_on_a_gpu_kernels_are_as_torch_in_float64() -> None:
    with torch.device("cuda"):
        for case in NORMS:
            compare_a_norm(*case)


def passed_on_a_gpu(network: Viewmaker, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return deltas and the parameters' gradients, under autocast if `dtype` is half."""
    network = network.to("cuda", torch.promote_types(dtype, torch.float32))
    network.zero_grad()
    keys = DrawKeys(seed=0, epoch=0, index_B=torch.arange(len(x), device="cuda"), view=0)
    with torch.autocast("cuda", dtype=dtype, enabled=dtype.itemsize == 2):
        deltas = network.deltas(x.to("cuda", network.out.weight.dtype), keys)
    torch.autograd.backward((deltas * x.cuda().roll(1, 0)).sum())
    return [deltas.detach(), *(each.grad.clone() for each in network.parameters() if each.grad is not None)]


@needs_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 64)])
def test_on_a_gpu_a_viewmaker_is_as_near_to_float64_as_with_torchs_layers(
    channels: int, size: int, dtype: torch.dtype
) -> None:
    network = Viewmaker(ViewmakerConfig(clamp=False), image_channels=channels)
    x = torch.rand(16, channels, size, size, generator=torch.Generator().manual_seed(0))
    found, again = (passed_on_a_gpu(network, x, dtype) for _ in range(2))
    assert all(map(torch.equal, found, again))
    with mock.patch.object(triton_works, "DTYPES", ()):
        plain = passed_on_a_gpu(network, x, dtype)
        exact = passed_on_a_gpu(network, x, torch.float64)
    for number, (one, other, expected) in enumerate(zip(found, plain, exact, strict=True)):
        assert (one - expected).norm() <= 2 * (other - expected).norm() + 1e-3 * expected.norm(), number


@needs_a_gpu
def test_speed_on_a_gpu() -> None:
    """Print TB/s of each kernel, each tensor counted once, and the milliseconds of a pass with and without them."""
    kernels = viewmaker_kernels
    for C, H, border, repeat_edge in [(32, 32, 4, False), (128, 8, 1, False), (64, 16, 1, True)]:
        form = border, repeat_edge
        y = torch.randn(512, C, H, H, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)
        residual = F.pad(y, (1,) * 4, mode="reflect").contiguous(memory_format=torch.channels_last)
        affine = torch.rand(2, C, device="cuda").expand(len(y), -1, -1)
        out, stats = kernels.normalise(y, affine, None, None, 1e-5, *form)
        both, gradient = y.nbytes + out.nbytes, kernels._normalise_gradient
        calls: list[tuple[str, int, Callable[..., Any]]] = [
            ("ReLU", both, partial(kernels.normalise, y, affine, None, None, 1e-5, *form)),
            ("add", both + residual.nbytes, partial(kernels.normalise, y, affine, residual, None, 1e-5, *form)),
            ("ReLU, gradient", both + y.nbytes, partial(gradient, out, y, affine, stats, True, *form)),
            ("add, gradient", both + 2 * y.nbytes, partial(gradient, out, y, affine, stats, False, *form)),
        ]
        for name, num_bytes, call in calls:
            seconds = triton.testing.do_bench(call) / 1e3
            of = f"512x{C}x{H}x{H}, border {border}"
            print(f"viewmaker, {of}, norm and {name}: {num_bytes / seconds / 1e12:.2f} TB/s, {seconds * 1e6:.1f} us")
            assert seconds > 0
    network = Viewmaker(ViewmakerConfig(), image_channels=3)
    x = torch.rand(512, 3, 32, 32, device="cuda")
    for name, dtypes in {"kernels": (torch.bfloat16,), "torch's layers": ()}.items():
        with mock.patch.object(triton_works, "DTYPES", dtypes):
            milliseconds = triton.testing.do_bench(lambda: passed_on_a_gpu(network, x, torch.bfloat16))
        print(f"measured: viewmaker, forward and backward, 512 pictures, {name}: {milliseconds:.2f} ms")
