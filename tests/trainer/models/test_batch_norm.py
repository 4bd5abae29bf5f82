from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from data_pipeline.core.errors import UserError
from tests.gloo import run_ranks
from trainer import triton_works
from trainer.distributed.collectives import rank
from trainer.distributed.engines.ddp_engine import DDPEngine
from trainer.models import Encoder, Normalization, ResNetConfig, TimmConfig, batch_norm, build_encoder
from trainer.models.activation_checkpointing import Checkpointing, run_blocks
from trainer.models.batch_norm import (
    SplitBatchNorm2d,
    SynchronizedBatchNorm2d,
    check_splits,
    grouped_statistics,
    replace_batch_norm,
    share_running_statistics,
)
from trainer.models.trunk import ConvolutionalTrunk
from trainer.optim.optimizers import SGDConfig


def by_parts(x: Tensor, weight: Tensor, bias: Tensor, *, num_groups: int = 1) -> tuple[Tensor, Tensor]:
    """Return output and statistics, (2 S C + 1,), as on several ranks of CPUs."""
    running = torch.zeros_like(weight), torch.ones_like(weight), torch.zeros((), dtype=torch.int64)
    return batch_norm._forward(x, None, weight, bias, *running, 0.1, 1e-5, num_groups, False)


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
    share_running_statistics(norm)
    gradients = {"grad_x": x.grad, "grad_weight": norm.weight.grad, "grad_bias": norm.bias.grad}
    return {"out": out.detach(), **gradients, **norm.state_dict(), "eval": norm.eval()(x).detach()}


def synchronized(parts: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
    return trained(affine(SynchronizedBatchNorm2d(3)), parts, grads)


def split(num_splits: int, parts: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
    return trained(affine(SplitBatchNorm2d(3, num_splits=num_splits)), parts, grads)


class SplitByChannels(nn.BatchNorm2d):
    """As in the demonstration of MoCo on CIFAR: groups become channels of one batch norm, running buffers averaged.

    The groups there are of every S-th row, and here of neighbours.
    """

    num_splits = 1

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the base class's name
        if not self.training:
            return super().forward(input)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        num, (rows, *shape) = self.num_splits, input.shape
        folded = input.view(num, rows // num, *shape).transpose(0, 1).reshape(rows // num, num * shape[0], *shape[1:])
        mean, var = self.running_mean.repeat(num), self.running_var.repeat(num)
        weight, bias = self.weight.repeat(num), self.bias.repeat(num)
        out = F.batch_norm(folded, mean, var, weight, bias, training=True, momentum=0.1, eps=self.eps)
        self.running_mean.copy_(mean.view(num, -1).mean(0))
        self.running_var.copy_(var.view(num, -1).mean(0))
        self.num_batches_tracked.add_(1)
        return out.view(rows // num, num, *shape).transpose(0, 1).reshape(rows, *shape)


def affine(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, -0.5, 2.0]))
        norm.bias.copy_(torch.tensor([0.0, 0.3, -1.0]))
    return norm


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sizes", "dtype", "rtol"), [([4, 4], torch.float32, 1e-5), ([2, 5, 1, 3], torch.float64, 1e-12)], ids=["2", "4"]
)
def test_equals_batch_norm_of_the_whole_batch(sizes: list[int], dtype: torch.dtype, rtol: float) -> None:
    torch.manual_seed(0)
    # The ranks' means and spreads differ, and the mean is far from 0: a mean of squares would lose half the digits.
    parts = [(20 + 3 * r + (r + 1) * torch.randn(size, 3, 5, 4)).to(dtype) for r, size in enumerate(sizes)]
    grads = [torch.randn_like(part) for part in parts]
    whole = [torch.cat(tensors).double() for tensors in (parts, grads)]
    expected = trained(affine(nn.BatchNorm2d(3)), whole[:1], whole[1:])
    assert_ranks_give(expected, run_ranks(synchronized, len(sizes), parts, grads), rtol=rtol)


@pytest.mark.ranks
@pytest.mark.parametrize(("num_ranks", "num_splits"), [(1, 8), (4, 8)])
def test_split_batch_norm_equals_that_of_moco_on_any_number_of_ranks(num_ranks: int, num_splits: int) -> None:
    torch.manual_seed(0)
    x = 20 + torch.randn(16, 3, 5, 4, dtype=torch.float64) * torch.arange(1, 17)[:, None, None, None]
    grad = torch.randn_like(x)
    reference = affine(SplitByChannels(3))
    reference.num_splits = num_splits  # type: ignore[assignment]
    expected = trained(reference, [x], [grad])
    parts, grads = (list(tensor.chunk(num_ranks)) for tensor in (x, grad))
    assert_ranks_give(expected, run_ranks(split, num_ranks, num_splits, parts, grads), rtol=1e-12)


def test_batches_that_cannot_be_split_are_refused() -> None:
    norm = SplitBatchNorm2d(3, num_splits=4)
    with pytest.raises(ValueError, match="cannot cut 1 x 6 rows into 4 equal groups"):
        norm(torch.randn(6, 3, 2, 2))
    norm.eval()(torch.randn(6, 3, 2, 2))
    check_splits(8, global_batch_size=512, num_ranks=8)
    with pytest.raises(UserError, match="into 8 equal groups, but global_batch_size 100 is not a multiple"):
        check_splits(8, global_batch_size=100, num_ranks=1)
    for num_ranks in (3, 16):
        with pytest.raises(UserError, match=f"divides 8 groups, but there are {num_ranks}"):
            check_splits(8, global_batch_size=768, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("batch_norm", "kind"),
    [("synchronized", SynchronizedBatchNorm2d), ("local", nn.BatchNorm2d), ("split", SplitBatchNorm2d)],
)
def test_the_config_of_an_encoder_chooses_its_batch_norm(batch_norm: Any, kind: type[nn.Module]) -> None:
    numbers: dict[str, Any] = {"batch_norm_splits": 2, "mean": (0.5,) * 3, "std": (0.25,) * 3}
    encoder = build_encoder(ResNetConfig(kind="resnet10", width=4, batch_norm=batch_norm, **numbers))
    norms = [module for module in encoder.modules() if isinstance(module, nn.BatchNorm2d)]
    assert [type(norm) for norm in norms] == [kind] * 12
    assert all(norm.num_splits == 2 for norm in norms if isinstance(norm, SplitBatchNorm2d))
    assert encoder(torch.rand(4, 3, 8, 8)).shape == (4, 128)


def test_timm_has_no_split_batch_norm() -> None:
    with pytest.raises(UserError, match=r"batch_norm=split does not work with encoders of timm"):
        build_encoder(TimmConfig(name="resnet10t", batch_norm="split"))


def assert_ranks_give(expected: dict[str, Tensor], by_rank: list[dict[str, Tensor]], *, rtol: float) -> None:
    """Rows together, gradients of parameters summed, state alike on all."""
    assert expected["num_batches_tracked"] >= 2
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


def one_after_the_other(parts: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
    return trained_in_groups(affine(nn.BatchNorm2d(3)), parts, grads, lambda norm, x: torch.cat(list(map(norm, x))))


def together(checkpointing: Checkpointing, parts: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
    def forward(norm: nn.Module, x: list[Tensor]) -> Tensor:
        with grouped_statistics(len(x)):
            return run_blocks([norm], torch.cat(x), checkpointing=checkpointing)

    return trained_in_groups(affine(SynchronizedBatchNorm2d(3)), parts, grads, forward)


def trained_in_groups(
    norm: nn.BatchNorm2d,
    parts: list[Tensor],
    grads: list[Tensor],
    forward: Callable[[nn.Module, list[Tensor]], Tensor],
) -> dict[str, Tensor]:
    """Run a norm forward and backward on this rank's part, (S, B, C, H, W), which is S separate batches."""
    norm = norm.to(grads[rank()].dtype)
    x = parts[rank()].clone().requires_grad_()
    out = forward(norm, list(x)).view(x.shape)
    torch.autograd.backward(out, grads[rank()])
    assert x.grad is not None
    assert norm.weight.grad is not None
    assert norm.bias.grad is not None
    gradients = {"grad_x": x.grad.transpose(0, 1), "grad_weight": norm.weight.grad, "grad_bias": norm.bias.grad}
    return {"out": out.detach().transpose(0, 1), **gradients, **norm.state_dict()}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("checkpointing", "dtype", "rtol"), [("none", torch.float32, 1e-5), ("whole", torch.float64, 1e-12)]
)
def test_groups_that_go_together_are_as_batches_one_after_the_other(
    checkpointing: Checkpointing, dtype: torch.dtype, rtol: float
) -> None:
    torch.manual_seed(0)
    sizes = [2, 4]
    parts = [
        torch.stack([20 * s + 3 * r + (r + s) * torch.randn(size, 3, 5, 4) for s in (1, 2, 3)]).to(dtype)
        for r, size in enumerate(sizes)
    ]
    grads = [torch.randn_like(part) for part in parts]
    whole = [torch.cat(tensors, dim=1).double() for tensors in (parts, grads)]
    expected = one_after_the_other(whole[:1], whole[1:])
    assert expected["num_batches_tracked"] == 3
    assert_ranks_give(expected, run_ranks(together, 2, checkpointing, parts, grads), rtol=rtol)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_in_one_process_groups_are_batches_one_after_the_other(
    device: str, memory_format: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's batch norm on a CPU, and by its parts where kernels do not take float64, as on a GPU."""
    monkeypatch.setattr(triton_works, "DEVICE", "cuda" if device == "cpu" else "cpu")
    torch.manual_seed(0)
    together, apart = (SynchronizedBatchNorm2d(3).double() for _ in range(2))
    x = torch.randn(8, 3, 5, 4, dtype=torch.float64).contiguous(memory_format=memory_format)
    weight = torch.randn_like(x)
    outs = []
    for norm, num_groups in ((together, 2), (apart, 1)):
        own_x = x.clone().requires_grad_()
        with grouped_statistics(num_groups):
            out = torch.cat([norm(group) for group in own_x.chunk(2 // num_groups)])
        torch.autograd.backward((out * weight).sum())
        outs.append([out, own_x.grad, *(p.grad for p in norm.parameters()), *norm.buffers()])
    for found, expected in zip(*outs, strict=True):
        torch.testing.assert_close(found, expected)


@dataclass(frozen=True)
class Pass:
    """What a pass through an encoder leaves: embeddings, gradients, buffers, and the number of its messages."""

    tensors: list[Tensor]
    num_messages: int


def passed(encoder: nn.Module, views_BCHW: Tensor) -> Pass:
    engine = DDPEngine(encoder, optimizer=SGDConfig())
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as gather:
        out_BD = engine(views_BCHW, 2)
        engine.backward(out_BD.square().sum() * (1 + rank()))
    gradients = [parameter.grad for parameter in encoder.parameters() if parameter.grad is not None]
    return Pass([out_BD.detach(), *gradients, *encoder.buffers()], gather.call_count)


def encoder_of_two_norms() -> Encoder:
    stage = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    layers = OrderedDict(conv=nn.Conv2d(3, 2, 3), bn=nn.BatchNorm2d(2), relu=nn.ReLU(), stage=stage)
    trunk = ConvolutionalTrunk(layers, num_channels=4)
    trunk.synchronize_batch_norm()
    normalization = Normalization(mean=(0.5,) * 3, std=(0.2,) * 3)
    return Encoder(trunk, nn.Linear(4, 8), in_channels=3, normalization=normalization).double()


def plain_and_compiled(views_RBCHW: Tensor) -> tuple[Pass, Pass, int, list[str]]:
    """Return the two passes, the number of graphs, and the places where the compiler stopped; rank 0 compiles."""
    encoders = [encoder_of_two_norms() for _ in range(2)]
    encoders[1].load_state_dict(encoders[0].state_dict())
    if rank() == 0:
        encoders[1].compile(backend="aot_eager_decomp_partition")  # cuts forward from backward as inductor does
    plain, compiled = (passed(encoder, views_RBCHW[rank()]) for encoder in encoders)
    return plain, compiled, counters["stats"]["unique_graphs"], list(counters["graph_break"])


@pytest.mark.ranks
def test_a_compiled_encoder_is_one_graph_that_sends_the_same_messages() -> None:
    """One message each way for each norm, and one for the gradients."""
    num_norms = 2
    views_RBCHW = torch.rand(2, 4, 3, 8, 8, dtype=torch.float64)
    for number, (plain, compiled, num_graphs, stops) in enumerate(run_ranks(plain_and_compiled, 2, views_RBCHW)):
        assert (num_graphs, stops) == (1 if number == 0 else 0, [])
        for found, expected in zip(compiled.tensors, plain.tensors, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert compiled.num_messages == plain.num_messages == 2 * num_norms + 1


@pytest.mark.slow
@pytest.mark.parametrize(("num_groups", "dtype"), [(1, torch.float64), (2, torch.bfloat16)])
def test_the_operators_keep_the_rules_of_torch(num_groups: int, dtype: torch.dtype) -> None:
    """Parameters are float32 if the input is bfloat16."""
    torch.manual_seed(0)
    kept = torch.promote_types(dtype, torch.float32)
    x, weight, bias = torch.randn(4, 3, 2, 2, dtype=dtype), torch.rand(3, dtype=kept), torch.randn(3, dtype=kept)
    forward, backward = batch_norm._forward_operator, batch_norm._backward_operator
    running = torch.zeros_like(weight), torch.ones_like(weight), torch.zeros((), dtype=torch.int64)
    for residual, relu in ((None, False), (x + 1, True)):
        given = (x, residual, weight, bias, *running, 0.1, 1e-5, num_groups, relu)
        out, stats = forward(*given)
        activated = out if relu else None
        torch.library.opcheck(backward, (out, x, activated, weight, bias, stats, 1e-5, num_groups, relu))
        torch.library.opcheck(forward, given)


class AsOnCuda(TorchDispatchMode):
    """Checks what CUDA's kernels assert or rely on, and the CPU's do not look at."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.batch_norm_update_stats.default:
            assert args[1] is not args[2], "both are written"
        if func is torch.ops.aten.native_batch_norm_backward.default:
            self.num_calls += 1
            save_mean, save_invstd = args[5:7]
            assert save_mean is not None, "save_mean should always be defined"
            assert save_invstd is not None, "save_invstd should always be defined"
        return func(*args, **(kwargs or {}))


def test_going_backward_it_gives_cuda_what_its_kernel_asserts() -> None:
    x, weight, bias = torch.randn(4, 3, 2, 2), torch.ones(3), torch.zeros(3)
    with AsOnCuda() as calls:
        out, stats = by_parts(x, weight, bias, num_groups=2)
        batch_norm._backward(out, x, None, weight, bias, stats, 1e-5, 2, False)
    assert calls.num_calls == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_on_a_gpu_it_is_as_in_float64(dtype: torch.dtype, tolerance: float, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 5, 4).to(dtype).contiguous(memory_format=memory_format)
    weight, bias, grad = torch.rand(3) + 0.5, torch.randn(3), torch.randn(8, 3, 5, 4).to(dtype)
    answers = []
    for device, number in (("cuda", dtype), ("cpu", torch.float64)):
        parameters = number if number == torch.float64 else torch.float32
        given = [x.to(device, number), weight.to(device, parameters), bias.to(device, parameters)]
        norm = SynchronizedBatchNorm2d(3).to(device, parameters)
        norm.weight, norm.bias = (nn.Parameter(each) for each in given[1:])
        leaves = [given[0].requires_grad_(), norm.weight, norm.bias]
        with grouped_statistics(2):
            out = norm(leaves[0])
        torch.autograd.backward(out, grad.to(device, number))
        answers.append([out.detach(), *(each.grad for each in leaves)])
    for found, expected in zip(*answers, strict=True):
        assert found is not None
        assert expected is not None
        torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_bfloat16_input_is_summed_in_float32(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    x = (30 + torch.randn(64, 3, 16, 16)).bfloat16().contiguous(memory_format=memory_format)
    out, stats = by_parts(x, torch.ones(3), torch.zeros(3))
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous(memory_format=memory_format)
    mean_C, var_C = stats[:-1].view(2, 3)
    torch.testing.assert_close(mean_C, x.double().mean((0, 2, 3)).float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(var_C, x.double().var((0, 2, 3), correction=0).float(), rtol=1e-4, atol=0)


def test_in_one_process_it_is_batch_norm_itself() -> None:
    parts = [torch.randn(5, 3, 4, 4)]
    grads = [torch.randn(5, 3, 4, 4)]
    expected = trained(affine(nn.BatchNorm2d(3)), parts, grads)
    for name, value in synchronized(parts, grads).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("kind", "settings"), [(SynchronizedBatchNorm2d, {}), (SplitBatchNorm2d, {"num_splits": 2})], ids=["sync", "split"]
)
def test_every_batch_norm_is_replaced_and_the_state_fits_before_and_after(
    kind: type[nn.BatchNorm2d], settings: dict[str, Any]
) -> None:
    def network() -> nn.Module:
        inner = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 1), bn=nn.BatchNorm2d(4, eps=1e-3, momentum=0.3)))
        return nn.Sequential(OrderedDict(bn=nn.BatchNorm2d(3), inner=inner))

    plain = network()
    plain(torch.randn(2, 3, 4, 4))
    twin = replace_batch_norm(network(), kind, **settings)
    twin.load_state_dict(plain.state_dict())
    norms = [module for module in twin.modules() if isinstance(module, nn.BatchNorm2d)]
    assert [type(norm) for norm in norms] == [kind] * 2
    assert (norms[1].eps, norms[1].momentum) == (1e-3, 0.3)
    network().load_state_dict(twin.state_dict())
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(twin.eval()(x), plain.eval()(x))
