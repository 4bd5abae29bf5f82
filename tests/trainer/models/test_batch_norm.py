from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from tests.gloo import run_ranks
from trainer.distributed.collectives import rank
from trainer.models.batch_norm import SynchronizedBatchNorm2d, synchronize_batch_norm, synchronized_batch_norm


def trained(norm: nn.BatchNorm2d, parts: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
    """Two steps in training mode on this rank's part, then one in eval mode: all that comes out."""
    norm = norm.to(grads[rank()].dtype)
    x = parts[rank()].clone().requires_grad_()
    norm(x.detach() + 1)
    out = norm(x)
    torch.autograd.backward(out, grads[rank()])
    assert x.grad is not None
    assert norm.weight.grad is not None
    assert norm.bias.grad is not None
    gradients = {"grad_x": x.grad, "grad_weight": norm.weight.grad, "grad_bias": norm.bias.grad}
    return {"out": out.detach(), **gradients, **norm.state_dict(), "eval": norm.eval()(x).detach()}


def synchronized(parts: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
    return trained(affine(SynchronizedBatchNorm2d(3)), parts, grads)


def affine(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, -0.5, 2.0]))
        norm.bias.copy_(torch.tensor([0.0, 0.3, -1.0]))
    return norm


@pytest.mark.parametrize("sizes", [[4, 4], [2, 5, 1, 3]])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"])
def test_equals_batch_norm_of_the_whole_batch(sizes: list[int], dtype: torch.dtype, rtol: float) -> None:
    torch.manual_seed(0)
    # The ranks' means and spreads differ, and the mean is far from 0: a mean of squares would lose half the digits.
    parts = [(20 + 3 * r + (r + 1) * torch.randn(size, 3, 5, 4)).to(dtype) for r, size in enumerate(sizes)]
    grads = [torch.randn_like(part) for part in parts]
    whole = [torch.cat(tensors).double() for tensors in (parts, grads)]
    expected = trained(affine(nn.BatchNorm2d(3)), whole[:1], whole[1:])
    by_rank = run_ranks(synchronized, len(sizes), parts, grads)
    assert expected["num_batches_tracked"] == 2
    for name, value in expected.items():
        results = [result[name].double() for result in by_rank]
        if name in {"out", "grad_x", "eval"}:
            results = [torch.cat(results)]
        elif name in {"grad_weight", "grad_bias"}:
            results = [torch.stack(results).sum(0)]
        for result in results:
            assert (result - value.double()).norm() <= rtol * value.double().norm(), name
    for name in ("running_mean", "running_var"):  # bit-equal on all ranks: buffers are never broadcast
        assert all(torch.equal(result[name], by_rank[0][name]) for result in by_rank)


def test_gradient_by_finite_differences() -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(size, dtype=torch.float64, requires_grad=True) for size in [(3, 2, 3, 2), (2,), (2,)]
    )
    assert torch.autograd.gradcheck(lambda *inputs: synchronized_batch_norm(*inputs, eps=1e-3)[0], (x, weight, bias))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_bfloat16_input_is_summed_in_float32(memory_format: torch.memory_format) -> None:
    x = (30 + torch.randn(64, 3, 16, 16)).bfloat16().contiguous(memory_format=memory_format)
    out, mean_C, unbiased_C = synchronized_batch_norm(x, torch.ones(3), torch.zeros(3), eps=1e-5)
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(mean_C, x.double().mean((0, 2, 3)).float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(unbiased_C, x.double().var((0, 2, 3)).float(), rtol=1e-4, atol=0)


def test_in_one_process_it_is_batch_norm_itself() -> None:
    parts = [torch.randn(5, 3, 4, 4)]
    grads = [torch.randn(5, 3, 4, 4)]
    expected = trained(affine(nn.BatchNorm2d(3)), parts, grads)
    for name, value in synchronized(parts, grads).items():
        assert torch.equal(value, expected[name]), name


def test_every_batch_norm_is_replaced_and_the_state_fits_before_and_after() -> None:
    def network() -> nn.Module:
        inner = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 1), bn=nn.BatchNorm2d(4, eps=1e-3, momentum=0.3)))
        return nn.Sequential(OrderedDict(bn=nn.BatchNorm2d(3), inner=inner))

    plain = network()
    plain(torch.randn(2, 3, 4, 4))
    twin = synchronize_batch_norm(network())
    twin.load_state_dict(plain.state_dict())
    norms = [module for module in twin.modules() if isinstance(module, nn.BatchNorm2d)]
    assert [type(norm) for norm in norms] == [SynchronizedBatchNorm2d] * 2
    assert (norms[1].eps, norms[1].momentum) == (1e-3, 0.3)
    network().load_state_dict(twin.state_dict())
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(twin.eval()(x), plain.eval()(x))
