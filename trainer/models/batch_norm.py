"""Batch normalisation over the batch of all ranks, or over equal groups of it, on CPU and GPU.

`torch.nn.SyncBatchNorm` refuses CPU tensors. The synchronised batch norm here needs one collective in the forward pass
and one in the backward pass. Outputs, gradients and running statistics equal `torch.nn.BatchNorm2d` in one process on
the whole batch.

Split batch norm imitates several devices that each normalise their own part of a batch. It is used to train MoCo on one
device (He et al. 2020 show CIFAR with 8 splits, and Huang et al. 2023 use 8 too). Its groups are cut from the batch of
all ranks, so the result is equal on any number of ranks that divides the number of groups.

The two views of a batch can pass a network together, each with its own statistics (`grouped_statistics`). The results
are the same as one after the other, with half as many collectives and far fewer kernels.

Synchronised batch norm takes one of three ways to the same result:

- in one process on a CPU: torch's layers, group after group;
- on a GPU, on maps in channels_last or rows, not in float64: the kernels of `batch_norm_kernels`, also over ranks. The
  sum with a residual and the ReLU after it are part of them;
- otherwise, so over ranks of CPUs, in other layouts, and if Triton does not work here: torch's own kernels for parts of
  a batch norm.

Shapes: B rows of this rank, C channels, H by W pixels, R ranks, S groups of this rank, N = 2 S C + 1 statistics: mean
and variance of each group, and the number of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from data_pipeline.core.errors import UserError
from trainer.distributed.collectives import all_gather_rows, all_reduce_sum, is_distributed, world_size
from trainer.triton_works import check_near, kernels

_num_groups = [1]  # of each open `grouped_statistics`; shared by threads, because a backward pass has its own thread


_counts: list[list[tuple[Tensor, int]]] = []  # of each open `counted_together`: counters, and what to add to them


@contextmanager
def grouped_statistics(num_groups: int) -> Iterator[None]:
    """Inside the block, let synchronised batch norm treat `num_groups` equal runs of rows as separate batches.

    Outputs, gradients and running statistics are the same as with `num_groups` forward passes, one after the other.
    """
    _num_groups.append(num_groups)
    try:
        yield
    finally:
        _num_groups.pop()


@contextmanager
def counted_together() -> Iterator[None]:
    """Let all synchronised batch norms that run inside the block count their batches in one operation, at its end."""
    _counts.append([])
    try:
        yield
    finally:
        if counts := _counts.pop():
            counters, numbers = zip(*counts, strict=True)
            torch._foreach_add_(counters, numbers)


def reenter_groups() -> Callable[[], AbstractContextManager[None]]:
    """Return a factory that enters the present `grouped_statistics` again, for a later recomputation."""
    return partial(grouped_statistics, _num_groups[-1])


class SynchronizedBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` over the batch of all ranks in training mode, with the same parameters, buffers and names.

    Each run of rows in `grouped_statistics` is a separate batch, together with the same run on the other ranks. The
    gradients of weight and bias are this rank's part, like the gradient of every other parameter.
    """

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:  # noqa: A002  the base class's name
        """Return the normalised input; with `relu`, its ReLU after the sum with `residual`, if there is one.

        On a GPU, norm, sum and ReLU are one operation. Raises `ValueError` if there is a residual but no `relu`.
        """
        if residual is not None and not relu:
            raise ValueError("a residual is added in front of a ReLU; set relu")
        if not self.training:
            return _activated(super().forward(input), residual, relu)
        assert self.momentum is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self._check_input_dim(input)
        num_groups = _num_groups[-1]
        self._count(num_groups)
        if not (is_distributed() or _has_kernels(input, residual, num_groups)):
            settings = (self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum, self.eps)
            groups = [F.batch_norm(x_BCHW, *settings) for x_BCHW in input.chunk(num_groups)]
            return _activated(groups[0] if num_groups == 1 else torch.cat(groups), residual, relu)
        arguments = (input, residual, self.weight, self.bias, self.eps, num_groups, relu)
        if not torch.compiler.is_compiling():
            out_BCHW: Tensor = _SynchronizedBatchNorm.apply(*arguments, self)[0]  # type: ignore[no-untyped-call]
            return out_BCHW
        out_BCHW, stats_N = _forward_operator(*arguments)
        _update_running(self, stats_N.detach(), num_groups)
        return out_BCHW

    def _count(self, num_batches: int) -> None:
        assert self.num_batches_tracked is not None
        if _counts and not torch.compiler.is_compiling():
            _counts[-1].append((self.num_batches_tracked, num_batches))
        else:
            self.num_batches_tracked.add_(num_batches)


def normalise_and_activate(norm: nn.Module, x_BCHW: Tensor, residual_BCHW: Tensor | None = None) -> Tensor:
    """Return the ReLU of the normalised input, after its sum with `residual_BCHW`, if there is one.

    In training it is one operation on a GPU if `norm` is synchronised.
    """
    if isinstance(norm, SynchronizedBatchNorm2d) and norm.training:
        activated_BCHW: Tensor = norm(x_BCHW, residual_BCHW, relu=True)
        return activated_BCHW
    return _activated(norm(x_BCHW), residual_BCHW, True)


def _activated(out_BCHW: Tensor, residual_BCHW: Tensor | None, relu: bool) -> Tensor:
    if residual_BCHW is not None:
        out_BCHW += residual_BCHW
    return F.relu(out_BCHW, inplace=True) if relu else out_BCHW


class SynchronizedBatchNorm1d(SynchronizedBatchNorm2d):
    """`nn.BatchNorm1d` of rows (B, C) over the batch of all ranks in training mode."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  the base class's name
        if input.dim() != 2:
            raise ValueError(f"batch norm of a head expects rows (B, C), got {tuple(input.shape)}")


class SplitBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` that normalises each of `num_splits` groups of the global batch separately in training mode.

    The groups are equal runs of rows of the global batch. With R ranks, each rank has `num_splits` / R groups and needs
    no collective. Running statistics are the mean over the groups. A rank only knows its own groups, until every rank
    calls `share_running_statistics`.

    The forward pass raises `ValueError` if the number of ranks does not divide `num_splits`, or if the number of groups
    of a rank does not divide its rows.
    """

    def __init__(self, num_features: int, *, num_splits: int, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum)
        self.num_splits = num_splits

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the base class's name
        if not self.training:
            return super().forward(input)
        assert self.momentum is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        num_groups, left = divmod(self.num_splits, world_size())
        if left or len(input) % num_groups:
            raise ValueError(
                f"split batch norm cannot cut {world_size()} x {len(input)} rows into {self.num_splits} equal groups"
            )
        means_SC, vars_SC = (stat.repeat(num_groups, 1) for stat in (self.running_mean, self.running_var))
        parts = [
            F.batch_norm(
                part, mean_C, var_C, self.weight, self.bias, training=True, momentum=self.momentum, eps=self.eps
            )
            for part, mean_C, var_C in zip(input.chunk(num_groups), means_SC, vars_SC, strict=True)
        ]
        self.running_mean.copy_(means_SC.mean(0))
        self.running_var.copy_(vars_SC.mean(0))
        self.num_batches_tracked.add_(1)
        return torch.cat(parts)


def check_splits(num_splits: int, *, global_batch_size: int, num_ranks: int, forwards: int = 2) -> None:
    """Raise `UserError` if split batch norm on that many ranks cannot give the same result as in one process.

    `forwards` is 2 if the two views pass the encoder one after the other, and 1 if a rank's rows hold both views.
    """
    if global_batch_size % num_splits:
        raise UserError(
            f"encoder.batch_norm=split cuts a batch into {num_splits} equal groups, but global_batch_size "
            f"{global_batch_size} is not a multiple of that; change it, or encoder.batch_norm_splits"
        )
    most_ranks = num_splits if forwards == 2 else num_splits // 2
    if most_ranks % num_ranks:
        raise UserError(
            f"encoder.batch_norm=split needs a number of ranks that divides {most_ranks} groups, but there are "
            f"{num_ranks}; change it, or encoder.batch_norm_splits"
        )


def replace_batch_norm(module: nn.Module, kind: type[nn.BatchNorm2d], **settings: Any) -> nn.Module:
    """Replace every `nn.BatchNorm2d` inside `module` by a `kind` with these settings, in place.

    A state_dict fits before and after.
    """
    for name, child in module.named_children():
        if type(child) is nn.BatchNorm2d:
            twin = kind(child.num_features, eps=child.eps, momentum=child.momentum, **settings)
            twin.load_state_dict(child.state_dict())
            setattr(module, name, twin)
        else:
            replace_batch_norm(child, kind, **settings)
    return module


def depends_on_row_order(module: nn.Module) -> bool:
    """Return whether the output for a row in training mode depends on the order of the rows or on the rank."""
    return any(isinstance(m, _BatchNorm) and not isinstance(m, SynchronizedBatchNorm2d) for m in module.modules())


@torch.no_grad()
def share_running_statistics(module: nn.Module) -> None:
    """Give every rank the running statistics that a checkpoint holds.

    They are the mean over the ranks for split batch norms, which one process would have, and those of rank 0 for local
    ones. Synchronised batch norms have equal statistics on all ranks.

    Every rank must call this before the module is saved or evaluated. It needs one collective for each kind in the
    whole module. A second call changes nothing, and later training changes only by rounding.
    """
    norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
    split = [norm for norm in norms if isinstance(norm, SplitBatchNorm2d)]
    local = [norm for norm in norms if not isinstance(norm, SplitBatchNorm2d | SynchronizedBatchNorm2d)]
    _replace_statistics(split, lambda own: all_reduce_sum(own) / world_size())
    _replace_statistics(local, lambda own: all_gather_rows(own[None])[0])


def _replace_statistics(norms: Sequence[_BatchNorm], by_all_ranks: Callable[[Tensor], Tensor]) -> None:
    """Replace all running statistics of batch norms by what `by_all_ranks` makes of them, together in one row."""
    if not (norms and is_distributed()):
        return
    stats = [stat for norm in norms for stat in (norm.running_mean, norm.running_var) if stat is not None]
    new = by_all_ranks(torch.cat(stats))
    for stat, value in zip(stats, torch.split(new, [len(stat) for stat in stats]), strict=True):
        stat.copy_(value)


def _has_kernels(x_BCHW: Tensor, residual_BCHW: Tensor | None, num_groups: int) -> bool:
    """Return whether the kernels for a GPU take these inputs. Then `_kernels` returns them, if they work here."""
    form = torch.contiguous_format if x_BCHW.dim() == 2 else torch.channels_last
    fits = x_BCHW.device.type == _KERNEL_DEVICE and x_BCHW.dtype in _KERNEL_DTYPES
    fits = fits and x_BCHW.is_contiguous(memory_format=form) and x_BCHW.numel() > num_groups * x_BCHW.shape[1]
    if residual_BCHW is None or not fits:
        return fits
    same = residual_BCHW.dtype == x_BCHW.dtype and residual_BCHW.shape == x_BCHW.shape
    return same and residual_BCHW.is_contiguous(memory_format=form)


_KERNEL_DEVICE = "cuda"
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _kernels(x_BCHW: Tensor) -> ModuleType | None:
    """Return the module of kernels; None if they do not work here."""
    return kernels("trainer.models.batch_norm_kernels", x_BCHW.dtype, _try_out)


def _try_out(module: ModuleType, dtype: torch.dtype) -> None:
    """Compare norm, sum and ReLU of two groups, and their gradients, with torch in float64."""
    draws = torch.Generator().manual_seed(0)
    maps = [torch.randn(8, 24, 6, 6, generator=draws).to(dtype) for _ in range(3)]
    per_channel = [torch.rand(24, generator=draws) + 0.5 for _ in range(2)]
    leaves = [each.double().requires_grad_() for each in (*maps[:2], *per_channel)]
    x, residual, weight_C, bias_C = leaves
    groups = [F.batch_norm(each, None, None, weight_C, bias_C, training=True) for each in x.chunk(2)]
    expected = F.relu(torch.cat(groups) + residual)
    torch.autograd.backward(expected, maps[2].double())
    x, residual, grad = (each.to(_KERNEL_DEVICE, memory_format=torch.channels_last) for each in maps)
    weight_C, bias_C = (each.to(_KERNEL_DEVICE) for each in per_channel)
    settings = {"eps": 1e-5, "num_groups": 2, "relu": True}
    out, stats_N = module.normalised(x, residual, weight_C, bias_C, running=None, gather=None, **settings)
    grad_x, grad_residual, grads_2C = module.gradients(grad, x, out, weight_C, bias_C, stats_N, reduce=None, **settings)
    check_near(out, expected)
    for found, leaf in zip((grad_x, grad_residual, *grads_2C), leaves, strict=True):
        assert leaf.grad is not None
        check_near(found, leaf.grad)


def _normalised_by_all_ranks(
    x_BCHW: Tensor,
    residual_BCHW: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor,
    eps: float,
    num_groups: int,
    relu: bool,
    norm: SynchronizedBatchNorm2d | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the statistics (N,), and update the running statistics of `norm`. Sends one message."""
    if _has_kernels(x_BCHW, residual_BCHW, num_groups) and (module := _kernels(x_BCHW)) is not None:
        found: tuple[Tensor, Tensor] = module.normalised(
            *(x_BCHW, residual_BCHW, weight_C, bias_C),
            eps=eps,
            num_groups=num_groups,
            relu=relu,
            running=None if norm is None else (norm.running_mean, norm.running_var, norm.momentum),
            gather=all_gather_rows if is_distributed() else None,
        )
        return found
    # With running statistics in the parameters' type, torch accumulates a bfloat16 input in float32.
    scratch_C = torch.zeros_like(weight_C)
    groups = x_BCHW.chunk(num_groups)
    own = [stat for x in groups for stat in torch.batch_norm_update_stats(x, scratch_C, scratch_C.clone(), 0.0)]
    num = groups[0].numel() // x_BCHW.shape[1]
    stats_RN = all_gather_rows(torch.cat([*own, scratch_C.new_full((1,), num)])[None])
    num_R1 = stats_RN[:, -1:]
    mean_RSC, var_RSC = stats_RN[:, :-1].view(len(stats_RN), num_groups, 2, -1).unbind(2)
    # Combined as in Chan et al. 1983: a mean of squares minus a squared mean would cancel for a large mean.
    total = num_R1.sum()
    share_R11 = (num_R1 / total)[..., None]
    mean_SC = (mean_RSC * share_R11).sum(0)
    apart_RSC = mean_RSC - mean_SC
    var_SC = (torch.addcmul(var_RSC, apart_RSC, apart_RSC) * share_R11).sum(0)
    stats_N = torch.cat([torch.stack([mean_SC, var_SC], 1).flatten(), total[None]])
    if norm is not None:
        _update_running(norm, stats_N, num_groups)
    out_BCHW = torch.empty_like(x_BCHW)
    outs = out_BCHW.chunk(num_groups)
    for x, out, mean_C, var_C in zip(groups, outs, mean_SC.unbind(), var_SC.unbind(), strict=True):
        _normalise(x, mean_C, var_C, weight_C, bias_C, eps=eps, out=out)
    return _activated(out_BCHW, residual_BCHW, relu), stats_N


def _update_running(norm: SynchronizedBatchNorm2d, stats_N: Tensor, num_groups: int) -> None:
    assert norm.momentum is not None
    assert norm.running_mean is not None
    assert norm.running_var is not None
    total = stats_N[-1]
    for mean_C, var_C in stats_N[:-1].view(num_groups, 2, -1):
        norm.running_mean.lerp_(mean_C, norm.momentum)
        norm.running_var.lerp_(var_C * (total / (total - 1)), norm.momentum)


def _gradients_by_all_ranks(
    grad_BCHW: Tensor,
    x_BCHW: Tensor,
    activated_BCHW: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor,
    stats_N: Tensor,
    eps: float,
    num_groups: int,
    with_residual: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input and residual, and this rank's gradients of weight and bias, (2, C).

    `activated_BCHW` is the output, if it went through a ReLU. The gradient of no residual is empty. Sends one message.
    """
    residual_BCHW = activated_BCHW if with_residual else None  # as far as its form is concerned
    no_residual = x_BCHW.new_empty(0)
    if _has_kernels(x_BCHW, residual_BCHW, num_groups) and (module := _kernels(x_BCHW)) is not None:
        grad_x_BCHW, grad_residual_BCHW, own_2C = module.gradients(
            *(grad_BCHW, x_BCHW, residual_BCHW, weight_C, bias_C, stats_N),
            eps=eps,
            num_groups=num_groups,
            relu=activated_BCHW is not None,
            reduce=all_reduce_sum if is_distributed() else None,
        )
        return grad_x_BCHW, no_residual if grad_residual_BCHW is None else grad_residual_BCHW, own_2C
    if activated_BCHW is not None:
        grad_BCHW = torch.ops.aten.threshold_backward(grad_BCHW, activated_BCHW, 0)
    mean_SC, var_SC = stats_N[:-1].view(num_groups, 2, -1).unbind(1)
    parts = (x_BCHW.chunk(num_groups), grad_BCHW.chunk(num_groups), mean_SC.unbind(), var_SC.unbind())
    groups = list(zip(*parts, strict=True))
    none = mean_SC.new_empty(0)  # no statistics from training; the CUDA kernel does not accept None
    own = []
    for x, grad, mean_C, var_C in groups:
        # The sums of grad * normalised x and of grad, with constant statistics.
        _, *grads_C = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight_C, mean_C, var_C, none, none, False, eps, [False, True, True]
        )
        own += grads_C
    own_S2C = torch.stack(own).view(num_groups, 2, -1)
    sums_S2C = all_reduce_sum(own_S2C)
    # weight / std * (grad - mean of grad - normalised x * mean of grad * normalised x). All terms but the first
    # together are a batch norm of x.
    scale_SC = weight_C * torch.rsqrt(var_SC + eps)
    through_S2C = sums_S2C * (-scale_SC / stats_N[-1])[:, None]
    grad_x_BCHW = torch.empty_like(x_BCHW)
    per_channel = (-1, *(1,) * (x_BCHW.dim() - 2))
    for (x, grad, mean_C, var_C), out, scale_C, through_2C in zip(
        groups, grad_x_BCHW.chunk(num_groups), scale_SC.unbind(), through_S2C.unbind(), strict=True
    ):
        _normalise(x, mean_C, var_C, *through_2C.unbind(), eps=eps, out=out)
        out.addcmul_(grad, scale_C.view(per_channel))
    return grad_x_BCHW, grad_BCHW if with_residual else no_residual, own_S2C.sum(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_BCHW, residual_BCHW, weight_C, bias_C, ctx.eps, ctx.num_groups, relu, *_ = inputs
    out_BCHW, stats_N = output
    ctx.with_residual = residual_BCHW is not None
    ctx.save_for_backward(x_BCHW, out_BCHW if relu else None, weight_C, bias_C, stats_N)
    ctx.mark_non_differentiable(stats_N)


class _SynchronizedBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _normalised_by_all_ranks(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BCHW: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*_backward(ctx, grad_BCHW, function=_gradients_by_all_ranks), None)


# The same two functions as operators: torch.compile cannot look into a collective, but its graph can hold an operator.
@torch.library.custom_op("feature_dropout::synchronized_batch_norm", mutates_args=())
def _forward_operator(
    x_BCHW: Tensor,
    residual_BCHW: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor,
    eps: float,
    num_groups: int,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    return _normalised_by_all_ranks(x_BCHW, residual_BCHW, weight_C, bias_C, eps, num_groups, relu)


_backward_operator = torch.library.custom_op(
    "feature_dropout::synchronized_batch_norm_backward", _gradients_by_all_ranks, mutates_args=()
)


@_forward_operator.register_fake
def _(x_BCHW: Tensor, _: Any, weight_C: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    num_groups: int = settings[2]
    return torch.empty_like(x_BCHW), weight_C.new_empty(2 * num_groups * len(weight_C) + 1)


@_backward_operator.register_fake
def _(grad_BCHW: Tensor, x_BCHW: Tensor, _: Any, weight_C: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_residual_BCHW = torch.empty_like(x_BCHW) if settings[-1] else x_BCHW.new_empty(0)
    return torch.empty_like(x_BCHW), grad_residual_BCHW, weight_C.new_empty((2, len(weight_C)))


def _backward(
    ctx: Any, grad_BCHW: Tensor, *_: Tensor, function: Callable[..., tuple[Tensor, Tensor, Tensor]] = _backward_operator
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    grad_x_BCHW, grad_residual_BCHW, (grad_weight_C, grad_bias_C) = function(
        grad_BCHW, *saved, ctx.eps, ctx.num_groups, ctx.with_residual
    )
    residual = grad_residual_BCHW if ctx.with_residual else None
    return grad_x_BCHW, residual, grad_weight_C, grad_bias_C, None, None, None


_forward_operator.register_autograd(_backward, setup_context=_save)


def _normalise(
    x: Tensor, mean_C: Tensor, var_C: Tensor, weight_C: Tensor, bias_C: Tensor, *, eps: float, out: Tensor
) -> None:
    """Run `F.batch_norm` with the given statistics and write to `out`, which may be a part of a tensor."""
    # Two outputs for a backward pass, which are not used. They must be separate: the CUDA kernel reads what it wrote.
    save_mean, save_invstd = mean_C.new_empty(0), mean_C.new_empty(0)
    torch.native_batch_norm(x, weight_C, bias_C, mean_C, var_C, False, 0.0, eps, out=(out, save_mean, save_invstd))
