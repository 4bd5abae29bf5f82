"""Check the kernels of the viewmaker on a CPU, in the interpreter of Triton, against torch in float64.

    TRITON_INTERPRET=1 python -m tests.trainer.views.interpreted_viewmaker CHECK

Triton reads the variable when it is imported, so this is a process of its own; `test_viewmaker_kernels.py` starts it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.counter_rng import DrawKeys
from trainer import triton_works
from trainer.triton_works import launch
from trainer.views import viewmaker, viewmaker_kernels
from trainer.views.viewmaker import Viewmaker, ViewmakerConfig

EPS = 1e-5
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
# Of a map: the first layer's, an inner one's with 136 channels, odd ones, and more pixels than a tile has.
SHAPES = [(2, 4, 12, 8), (1, 136, 8, 8), (3, 24, 5, 7), (2, 40, 16, 24)]
# Of a layer: whether it has a residual and noise, its border, and whether that repeats the edge.
FORMS = [(False, False, 4, False), (False, True, 1, False), (True, False, 1, True), (True, True, 1, False)]


@contextmanager
def on_the_cpu() -> Iterator[mock.Mock]:
    """Let kernels take tensors of a CPU; yields what counts their launches."""
    counted = mock.patch.object(viewmaker_kernels, "launch", wraps=launch)
    with mock.patch.object(triton_works, "DEVICE", "cpu"), counted as launches:
        yield launches


def drawn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    values = torch.randn(shape) * scale + 3
    return values.to(dtype).contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values


def assert_near(found: Tensor, expected: Tensor, rtol: float, case: object, least: float = 0) -> None:
    """The distance is at most `rtol` of the norm of what is expected, or of `least`."""
    away = float((found.detach().double() - expected).norm()) / max(float(expected.detach().norm()), least)
    assert away <= rtol, f"{case}: {away:.1e} away"


def check_norms() -> None:
    """Output and all gradients: with a ReLU or a residual, with and without noise, each border, and filled channels."""
    for number, shape in enumerate(SHAPES):
        others = [(torch.float32, 1000), (torch.bfloat16, 0)] if number == 0 else []
        for dtype, mean in [(torch.float32, 0), *others]:
            for with_residual, with_noise, border, repeat_edge in FORMS:
                torch.manual_seed(number)
                B, C, H, W = shape
                C -= number  # so many channels are only filled
                case = shape, dtype, mean, with_residual, with_noise, border, repeat_edge
                y, residual = drawn(*shape, dtype=dtype), drawn(B, shape[1], H + 2, W + 2, dtype=dtype)
                if mean:
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
                assert_near(found[:, :C], expected.detach(), rtol, case)
                assert_near(stats[:, 0], exact[0].detach().mean((2, 3)), 1e-6, case)
                extra = found[:, C:].clone()
                if noise is not None:
                    bordered = F.pad(noise[:, None], (border,) * 4, mode=mode)[:, 0]
                    assert_near(extra[:, 0], bordered, ROUNDING[dtype], case)
                    extra[:, 0] = 0
                assert not extra.any(), case
                torch.autograd.backward(found, grad)
                torch.autograd.backward(expected, exact_grad)
                for leaf, other in zip(leaves[: 3 + with_residual], exact, strict=False):
                    assert leaf.grad is not None
                    assert other.grad is not None
                    own = leaf.grad[:, :C] if leaf.dim() == 4 else leaf.grad
                    assert_near(own, other.grad, of_gradient, case)
                assert leaves[0].grad is not None
                assert not leaves[0].grad[:, C:].any(), case  # a norm hands on nothing of what is only filled


def check_weights() -> None:
    """Filled weights, the kernels of those that upsample, and all gradients."""
    torch.manual_seed(0)
    shapes = [(6, 4, 9, False), (8, 16, 3, False), (13, 9, 3, True), (3, 8, 3, True), (40, 41, 3, False)]
    weights = [drawn(*shape[:3], shape[2]).requires_grad_() for shape in shapes]
    norms = [torch.randn(size, requires_grad=True) for size in (5, 5, 9, 9)]
    for dtype in ROUNDING:
        upsamples = [is_up for *_, is_up in shapes]
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
            (gradient,) = torch.autograd.grad(own, weight, grad, retain_graph=True)
            (of_exact,) = torch.autograd.grad(expected, exact, grad[:num_out, :num_in].double())
            assert gradient.stride() == weight.stride()  # otherwise, the gradient of a parameter is a copy
            assert_near(gradient, of_exact, 2e-6, (case, "gradient"))
        for number, own in enumerate(affine):
            weight, bias = norms[2 * number : 2 * number + 2]
            assert torch.equal(own, torch.stack([weight, bias]).expand(3, -1, -1))
            grads = torch.autograd.grad(own, [weight, bias], torch.ones_like(own), retain_graph=True)
            assert all(torch.equal(each, torch.full_like(weight, 3)) for each in grads)


def check_budget() -> None:
    """Perturbations and their gradients, of more entries than a program reads at once, and of zeros."""
    for size in (8, 24):
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
            assert_near(found, expected.detach(), 2e-6, size)


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


def check_network() -> None:
    """A whole viewmaker of pictures, of spectrograms; recomputed in the backward pass, and compiled into one graph."""
    for channels, width, form in [(3, 6, "plain"), (1, 8, "plain"), (3, 6, "checkpointed"), (3, 6, "compiled")]:
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
        assert launches.call_count == (1 + forwards) * num_layers + 2 + 4, (form, launches.call_count)
        assert len(found) == len(expected)
        # The shift of a norm before another norm has no effect, so its gradient is a rounding error.
        least = max(float(each.norm()) for each in expected[2:]) / 100
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_near(one, other, 1e-4, (channels, form, number), 0 if number < 2 else least)
            assert other.any() or not one.any(), (channels, form, number)


def check_noise() -> None:
    """The numbers of a CPU, bit for bit."""
    plain = DrawKeys(seed=3, epoch=1, index_B=torch.tensor([0, 7, 2**40]), view=1)
    both = dataclasses.replace(plain, view=0).two_views()
    for keys in (plain, both, dataclasses.replace(both, recorded_epoch=torch.tensor(5))):
        for height, width in [(8, 8), (40, 52)]:
            expected = viewmaker.draw_noise(keys, height, width, layers=range(1, 4))
            with on_the_cpu() as launches:
                assert torch.equal(viewmaker.draw_noise(keys, height, width, layers=range(1, 4)), expected)
            assert launches.call_count == 1


def check_the_trial() -> None:
    """Before their first use on a GPU, right kernels pass and wrong ones do not."""
    right = viewmaker_kernels._normalise_gradient

    def wrong(grad: Tensor, *others: Any) -> Any:
        return right(1.1 * grad, *others)

    with on_the_cpu():
        for dtype in ROUNDING:
            viewmaker._try_out(viewmaker_kernels, dtype)
        with (
            mock.patch.object(viewmaker_kernels, "_normalise_gradient", wrong),
            pytest.raises(ValueError, match="its results are not those of torch"),
        ):
            viewmaker._try_out(viewmaker_kernels, torch.float32)


CHECKS: dict[str, Callable[[], None]] = {
    "trial": check_the_trial,
    "noise": check_noise,
    "norms": check_norms,
    "weights": check_weights,
    "budget": check_budget,
    "network": check_network,
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
