"""The viewmaker's kernels: interpreted on a CPU, compiled for an H100, on tensors without data, and on a GPU."""

from __future__ import annotations

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
    triton_counted,
)
from data_pipeline.core.counter_rng import DrawKeys
from tests.old_versions import needs_gpu_tensors_without_data
from tests.trainer.code_of_kernels import assert_in_registers, compiled_for_an_h100, run_in_the_interpreter
from tests.trainer.views import interpreted_viewmaker
from trainer import triton_works
from trainer.views import viewmaker_kernels
from trainer.views.viewmaker import Viewmaker, ViewmakerConfig

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.process
@pytest.mark.parametrize("check", ["trial", "noise", "norms", "weights", "budget", "network"])
def test_in_the_interpreter_kernels_are_as_torch_in_float64(check: str) -> None:
    run_in_the_interpreter("tests.trainer.views.interpreted_viewmaker", check)


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
        with walk, triton_counted(walk):
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
        interpreted_viewmaker.check_norms()


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
