"""Check the kernels of batch norm on a CPU, in the interpreter of Triton, against torch in float64.

    TRITON_INTERPRET=1 python -m tests.trainer.models.interpreted_kernels CHECK [RANK STORE]

Triton reads the variable when it is imported, so this is a process of its own; `test_batch_norm_kernels.py` starts it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from triton.runtime import interpreter

from trainer import triton_works
from trainer.models import batch_norm, batch_norm_kernels
from trainer.models.batch_norm import SynchronizedBatchNorm2d, grouped_statistics
from trainer.models.resnet import BasicBlock, resnet_trunk
from trainer.models.trunk import ConvolutionalTrunk

EPS = 1e-5
FORMS = ("plain", "relu", "residual")
# What a ResNet of small pictures has at a small batch; then odd numbers, one row, one channel, one pixel, no map.
SHAPES = [(2, 64, 32, 32), (2, 128, 16, 16), (2, 256, 8, 8), (2, 512, 4, 4)]
ODD_SHAPES = [(6, 3, 5, 7), (1, 70, 3, 3), (2, 1, 4, 4), (8, 8, 1, 1), (6, 130)]


def with_exact_bounds() -> None:
    """Let the interpreter of Triton take bounds of a loop from a NumPy that makes no number of an array of one."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


@contextmanager
def on_the_cpu(num_programs: int = 4) -> Iterator[None]:
    """Let kernels take tensors of a CPU, with so few programs in a launch that each goes through several tiles."""
    with (
        mock.patch.object(triton_works, "DEVICE", "cpu"),
        mock.patch.object(batch_norm_kernels, "_NUM_PROGRAMS", num_programs),
    ):
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


def assert_near(found: list[Tensor], expected: list[Tensor], *, rtol: float, case: object) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        away = (one.double() - other.double()).norm() / other.double().norm()
        assert away <= rtol, f"{case}: result {number} is {away:.1e} away"


def check_forms() -> None:
    """All forms in float32; in fewer bits, outputs and gradients have the error of one rounding."""
    cases = [(shape, FORMS[number % 3]) for number, shape in enumerate(SHAPES)]
    for shape, form in [*cases, *itertools.product(ODD_SHAPES, FORMS)]:
        given = Given.drawn(shape, torch.float32, 1 if shape[0] == 1 or form == "relu" else 2, form=form)
        found = given.by_kernels()
        assert_near(found, given.in_float64(found[0]), rtol=2e-6, case=(shape, form))
    for form in ("relu", "residual"):
        given = Given.drawn((6, 40, 5, 5), torch.bfloat16, 3, form=form)
        found = given.by_kernels()
        expected = given.in_float64(found[0])
        assert_near(found, expected, rtol=2.0**-8, case=("bfloat16", form))
        assert_near(found[1:3], expected[1:3], rtol=1e-6, case=("bfloat16", form, "statistics"))
        assert_near(found[4:6], expected[4:6], rtol=1e-5, case=("bfloat16", form, "parameters"))


def check_large_means() -> None:
    """Means of 1,000 standard deviations; and first values of a tile that are unlike all others."""
    for name in ("far", "outlier"):
        given = Given.drawn((4, 8, 32, 32), torch.float32, 1, form="plain")
        if name == "far":
            given.x.add_(1000)
        else:
            given.x[0] += 1000
        found = given.by_kernels()
        assert_near(found, given.in_float64(found[0]), rtol=1e-4, case=name)
        unbiased = (found[2] - 0.9) / 0.1
        assert_near([unbiased], [given.x.double().var((0, 2, 3))], rtol=1e-5, case=(name, "variance"))


def check_differences() -> None:
    """A gradient is the slope of the output between two near inputs."""
    given = Given.drawn((4, 8, 6, 6), torch.float32, 2, form="plain")
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


def passed(trunk: nn.Module, views_BCHW: Tensor) -> list[Tensor]:
    """Return the map, gradients and buffers of a pass of both views together."""
    with grouped_statistics(2):
        map_BCHW = trunk(views_BCHW.contiguous(memory_format=torch.channels_last))
    torch.autograd.backward(map_BCHW.square().sum())
    gradients = [parameter.grad for parameter in trunk.parameters() if parameter.grad is not None]
    return [map_BCHW.detach(), *gradients, *trunk.buffers()]


def check_a_network() -> None:
    """Recomputed in the backward pass, or compiled into one graph, a network is as with torch's layers."""
    views_BCHW = torch.rand(8, 3, 8, 8)
    expected = passed(network().double(), views_BCHW.double())
    for form in ("checkpointed", "compiled"):
        trunk = network()
        if form == "checkpointed":
            trunk.checkpointing = 1
        else:
            trunk.compile(backend="aot_eager", fullgraph=True)
        original = batch_norm_kernels.normalised
        with on_the_cpu(1), mock.patch.object(batch_norm_kernels, "normalised", wraps=original) as calls:
            found = passed(trunk, views_BCHW)
        assert calls.call_count == {"checkpointed": 12, "compiled": 6}[form]
        assert_near(found, expected, rtol=1e-4, case=form)


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


def check_ranks(rank: str, store: str) -> None:
    """Two ranks with different numbers of rows are as one process with all rows; each way takes one message."""
    torch.manual_seed(0)
    number, sizes = int(rank), (2, 5)
    given = [[(r + 1) * torch.randn(2, size, 3, 5, 4) + 20 for r, size in enumerate(sizes)] for _ in range(3)]
    given[1] = [each - 20 for each in given[1]]
    whole = [[torch.cat(each, 1).double()] for each in given]
    expected = of_a_rank(0, *whole)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=len(sizes))
    with on_the_cpu(), mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as messages:
        found = of_a_rank(number, *given)
    assert messages.call_count == 2
    own = slice(sum(sizes[:number]), sum(sizes[: number + 1]))
    assert_near(found[:3], [each[:, own] for each in expected[:3]], rtol=1e-5, case="rows")
    for place in (3, 4):
        dist.all_reduce(found[place])
    assert_near(found[3:], expected[3:], rtol=1e-5, case="parameters")
    dist.destroy_process_group()  # a thread of gloo that still runs at the exit aborts the process


def check_the_trial() -> None:
    """Before their first use on a GPU, right kernels pass and wrong ones do not."""
    for dtype in (torch.bfloat16, torch.float32):
        batch_norm._try_out(batch_norm_kernels, dtype)
    right = batch_norm_kernels.gradients

    def wrong(grad: Tensor, *others: Any, **settings: Any) -> Any:
        return right(1.1 * grad, *others, **settings)

    with (
        mock.patch.object(batch_norm_kernels, "gradients", wrong),
        pytest.raises(ValueError, match=r"not those of torch \(they are 10% away\)"),
    ):
        batch_norm._try_out(batch_norm_kernels, torch.float32)


def check_numbers() -> None:
    with on_the_cpu():
        check_the_trial()
        check_forms()
        check_large_means()
        check_differences()


CHECKS: dict[str, Callable[..., None]] = {
    "numbers": check_numbers,
    "a_network": check_a_network,
    "ranks": check_ranks,
}

if __name__ == "__main__":
    with_exact_bounds()
    CHECKS[sys.argv[1]](*sys.argv[2:])
