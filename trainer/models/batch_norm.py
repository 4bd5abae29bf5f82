"""Batch normalisation over the batch of all ranks, or over equal groups of it, on CPU and GPU.

`torch.nn.SyncBatchNorm` refuses CPU tensors. The synchronised batch norm here needs one collective in the forward pass
and one in the backward pass. Outputs, gradients and running statistics equal `torch.nn.BatchNorm2d` in one process on
the whole batch.

Split batch norm imitates several devices that each normalise their own part of a batch. It is used to train MoCo on one
device (He et al. 2020 show CIFAR with 8 splits, and Huang et al. 2023 use 8 too). Its groups are cut from the batch of
all ranks, so the result is equal on any number of ranks that divides the number of groups.

The two views of a batch can pass a network together, each with its own statistics (`grouped_statistics`). The results
are the same as one after the other, with half as many collectives and far fewer kernels.

Synchronised batch norm in one process on a CPU is torch's, group after group. On a GPU the kernels of
`batch_norm_kernels` take maps in channels_last and rows. The sum with a residual and the ReLU after it are part of
them. Parts of torch's batch norm are for float64, other layouts, ranks of CPUs, and if Triton does not work here.

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
from trainer import triton_works
from trainer.distributed.collectives import all_gather_rows, all_reduce_sum, is_distributed, world_size
from trainer.triton_works import check_near, kernels

_num_groups = [1]  # of each open `grouped_statistics`; shared by threads, because a backward pass has its own thread


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


def reenter_groups() -> Callable[[], AbstractContextManager[None]]:
    """Return a factory that enters the present `grouped_statistics` again, for a later recomputation."""
    return partial(grouped_statistics, _num_groups[-1])


class SynchronizedBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` over the batch of all ranks in training mode, with the same parameters, buffers and names.

    Each run of rows in `grouped_statistics` is a separate batch, together with the same run on the other ranks. The
    gradients of weight and bias are this rank's part, like the gradient of every other parameter. With
    `with_relu`, every output goes through a ReLU.
    """

    with_relu = False

    def forward(self, input: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:  # noqa: A002  the base class's name
        """Return the normalised input; with `relu`, its ReLU after the sum with `residual`, if there is one.

        On a GPU, norm, sum and ReLU are one operation. Raises `ValueError` if there is a residual but no `relu`.
        """
        relu = relu or self.with_relu
        if residual is not None and not relu:
            raise ValueError("a residual is added in front of a ReLU; set relu")
        if not self.training:
            return _activated(super().forward(input), residual, relu)
        assert self.momentum is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self._check_input_dim(input)
        num_groups, parameters = _num_groups[-1], (self.weight, self.bias)
        if is_distributed() or input.device.type == triton_works.DEVICE:
            buffers = (self.running_mean, self.running_var, self.num_batches_tracked)
            settings = (self.momentum, self.eps, num_groups, relu)
            out_BCHW: Tensor = _SynchronizedBatchNorm.apply(input, residual, *parameters, *buffers, *settings)  # type: ignore[no-untyped-call]
            return out_BCHW
        self.num_batches_tracked.add_(num_groups)
        running = (self.running_mean, self.running_var)
        groups = [
            F.batch_norm(x_BCHW, *running, *parameters, True, self.momentum, self.eps)
            for x_BCHW in input.chunk(num_groups)
        ]
        return _activated(groups[0] if num_groups == 1 else torch.cat(groups), residual, relu)


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


def check_splits(num_splits: int, *, global_batch_size: int, num_ranks: int) -> None:
    """Raise `UserError` if split batch norm on that many ranks cannot give the same result as in one process."""
    if global_batch_size % num_splits:
        raise UserError(
            f"encoder.batch_norm=split cuts a batch into {num_splits} equal groups, but global_batch_size "
            f"{global_batch_size} is not a multiple of that; change it, or encoder.batch_norm_splits"
        )
    if num_splits % num_ranks:
        raise UserError(
            f"encoder.batch_norm=split needs a number of ranks that divides {num_splits} groups, but there are "
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


def _kernels(x_BCHW: Tensor, like_x: Tensor | None, num_groups: int) -> ModuleType | None:
    """Return the module of kernels; None if they do not take these inputs, or do not work here."""
    form = torch.contiguous_format if x_BCHW.dim() == 2 else torch.channels_last
    for each in (x_BCHW, x_BCHW if like_x is None else like_x):
        if each.dtype != x_BCHW.dtype or each.shape != x_BCHW.shape or not each.is_contiguous(memory_format=form):
            return None
    if x_BCHW.numel() <= num_groups * x_BCHW.shape[1]:  # a variance needs two values
        return None
    return kernels("trainer.models.batch_norm_kernels", x_BCHW.device, x_BCHW.dtype, _try_out)


def _try_out(module: ModuleType, dtype: torch.dtype) -> None:
    """Compare norm, sum and ReLU of two groups, and their gradients, with torch in float64."""
    draws = torch.Generator().manual_seed(0)
    maps = [torch.randn(8, 24, 6, 6, generator=draws).to(dtype) for _ in range(3)]
    per_channel = [torch.rand(24, generator=draws) + 0.5 for _ in range(4)]
    leaves = [each.double().requires_grad_() for each in (*maps[:2], *per_channel[:2])]
    x, residual, weight_C, bias_C = leaves
    groups = [F.batch_norm(each, None, None, weight_C, bias_C, training=True) for each in x.chunk(2)]
    expected = F.relu(torch.cat(groups) + residual)
    torch.autograd.backward(expected, maps[2].double())
    x, residual, grad = (each.to(triton_works.DEVICE, memory_format=torch.channels_last) for each in maps)
    weight_C, bias_C, mean_C, var_C = (each.to(triton_works.DEVICE) for each in per_channel)
    running = (mean_C, var_C, torch.zeros((), dtype=torch.int64, device=mean_C.device), 0.1)
    out, stats_N = module.normalised(x, residual, weight_C, bias_C, running, 1e-5, 2, True, None)
    grad_x, grad_residual, grads_2C = module.gradients(grad, x, out, weight_C, bias_C, stats_N, 1e-5, 2, True, None)
    check_near((out, grad_x, grad_residual, *grads_2C), (expected, *(leaf.grad for leaf in leaves)))


def _forward(
    x_BCHW: Tensor,
    residual_BCHW: Tensor | None,
    weight_C: Tensor,
    bias_C: Tensor,
    running_mean_C: Tensor,
    running_var_C: Tensor,
    num_batches: Tensor,
    momentum: float,
    eps: float,
    num_groups: int,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output and the statistics (N,), and update the running statistics. Sends one message."""
    if (module := _kernels(x_BCHW, residual_BCHW, num_groups)) is not None:
        running = (running_mean_C, running_var_C, num_batches, momentum)
        gather = all_gather_rows if is_distributed() else None
        found: tuple[Tensor, Tensor] = module.normalised(
            x_BCHW, residual_BCHW, weight_C, bias_C, running, eps, num_groups, relu, gather
        )
        return found
    # With running statistics in the parameters' type, torch accumulates a bfloat16 input in float32.
    scratch_C = torch.zeros_like(weight_C)
    groups = x_BCHW.chunk(num_groups)
    own = [stat for x in groups for stat in torch.batch_norm_update_stats(x, scratch_C, scratch_C.clone(), 0.0)]
    own_N = torch.cat([*own, scratch_C.new_full((1,), groups[0].numel() // len(weight_C))])
    stats_RN = all_gather_rows(own_N[None])
    # Combined as in Chan et al. 1983: a mean of squares minus a squared mean would cancel for a large mean.
    mean_RSC, var_RSC = stats_RN[:, :-1].view(len(stats_RN), num_groups, 2, -1).unbind(2)
    total = stats_RN[:, -1].sum()
    share_R11 = (stats_RN[:, -1:] / total)[..., None]
    mean_SC = (mean_RSC * share_R11).sum(0)
    apart_RSC = mean_RSC - mean_SC
    var_SC = (torch.addcmul(var_RSC, apart_RSC, apart_RSC) * share_R11).sum(0)
    num_batches.add_(num_groups)
    for mean_C, var_C in zip(mean_SC, var_SC, strict=True):
        running_mean_C.lerp_(mean_C, momentum)
        running_var_C.lerp_(var_C * (total / (total - 1)), momentum)
    out_BCHW = torch.empty_like(x_BCHW)
    for x, out, mean_C, var_C in zip(groups, out_BCHW.chunk(num_groups), mean_SC, var_SC, strict=True):
        _normalise(x, mean_C, var_C, weight_C, bias_C, eps=eps, out=out)
    stats_N = torch.cat([torch.stack([mean_SC, var_SC], 1).flatten(), total[None]])
    return _activated(out_BCHW, residual_BCHW, relu), stats_N


def _normalise(
    x: Tensor, mean_C: Tensor, var_C: Tensor, weight_C: Tensor, bias_C: Tensor, *, eps: float, out: Tensor
) -> None:
    """Run `F.batch_norm` with the given statistics and write to `out`, which may be a part of a tensor."""
    # Two outputs for a backward pass, which are not used. They must be separate: the CUDA kernel reads what it wrote.
    save_mean, save_invstd = mean_C.new_empty(0), mean_C.new_empty(0)
    torch.native_batch_norm(x, weight_C, bias_C, mean_C, var_C, False, 0.0, eps, out=(out, save_mean, save_invstd))


def _backward(
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
    out_BCHW = activated_BCHW if with_residual else None
    no_residual = x_BCHW.new_empty(0)
    if (module := _kernels(x_BCHW, out_BCHW, num_groups)) is not None:
        relu, reduce = activated_BCHW is not None, all_reduce_sum if is_distributed() else None
        grad_x_BCHW, grad_residual_BCHW, own_2C = module.gradients(
            grad_BCHW, x_BCHW, out_BCHW, weight_C, bias_C, stats_N, eps, num_groups, relu, reduce
        )
        return grad_x_BCHW, no_residual if grad_residual_BCHW is None else grad_residual_BCHW, own_2C
    if activated_BCHW is not None:
        grad_BCHW = torch.ops.aten.threshold_backward(grad_BCHW, activated_BCHW, 0)
    mean_SC, var_SC = stats_N[:-1].view(num_groups, 2, -1).unbind(1)
    groups = list(zip(x_BCHW.chunk(num_groups), grad_BCHW.chunk(num_groups), mean_SC, var_SC, strict=True))
    none = mean_SC.new_empty(0)  # no statistics from training; the CUDA kernel does not accept None
    own = []
    for x, grad, mean_C, var_C in groups:
        # The sums of grad * normalised x and of grad, with constant statistics.
        _, *grads_C = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight_C, mean_C, var_C, none, none, False, eps, [False, True, True]
        )
        own += grads_C
    own_S2C = torch.stack(own).view(num_groups, 2, -1)
    # weight / std * (grad - mean of grad - normalised x * mean of grad * normalised x). All terms but the first
    # together are a batch norm of x.
    scale_SC = weight_C * torch.rsqrt(var_SC + eps)
    through_S2C = all_reduce_sum(own_S2C) * (-scale_SC / stats_N[-1])[:, None]
    per_channel = (-1, *(1,) * (x_BCHW.dim() - 2))
    grad_x_BCHW = torch.empty_like(x_BCHW)
    for (x, grad, mean_C, var_C), out, (slope_C, level_C), scale_C in zip(
        groups, grad_x_BCHW.chunk(num_groups), through_S2C, scale_SC, strict=True
    ):
        _normalise(x, mean_C, var_C, slope_C, level_C, eps=eps, out=out)
        out.addcmul_(grad, scale_C.view(per_channel))
    return grad_x_BCHW, grad_BCHW if with_residual else no_residual, own_S2C.sum(0)


# As operators too: torch.compile cannot look into a collective, but its graph can hold an operator.
_forward_operator = torch.library.custom_op(
    "feature_dropout::batch_norm", _forward, mutates_args=("running_mean_C", "running_var_C", "num_batches")
)
_backward_operator = torch.library.custom_op("feature_dropout::batch_norm_backward", _backward, mutates_args=())


@_forward_operator.register_fake
def _(x_BCHW: Tensor, _: Any, weight_C: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    num_groups: int = settings[-2]
    return torch.empty_like(x_BCHW), weight_C.new_empty(2 * num_groups * len(weight_C) + 1)


@_backward_operator.register_fake
def _(grad_BCHW: Tensor, x_BCHW: Tensor, _: Any, weight_C: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_residual_BCHW = torch.empty_like(x_BCHW) if settings[-1] else x_BCHW.new_empty(0)
    return torch.empty_like(x_BCHW), grad_residual_BCHW, weight_C.new_empty((2, len(weight_C)))


class _SynchronizedBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BCHW: Tensor, residual_BCHW: Tensor | None, weight_C: Tensor, bias_C: Tensor, *settings: Any
    ) -> Tensor:
        run = _forward_operator if torch.compiler.is_compiling() else _forward
        out_BCHW, stats_N = run(x_BCHW, residual_BCHW, weight_C, bias_C, *settings)
        *_, ctx.eps, ctx.num_groups, relu = settings
        ctx.with_residual = residual_BCHW is not None
        ctx.save_for_backward(x_BCHW, out_BCHW if relu else None, weight_C, bias_C, stats_N)
        return out_BCHW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BCHW: Tensor) -> tuple[Tensor | None, ...]:
        run: Any = _backward_operator if torch.compiler.is_compiling() else _backward
        grad_x_BCHW, grad_residual_BCHW, grads_2C = run(
            grad_BCHW, *ctx.saved_tensors, ctx.eps, ctx.num_groups, ctx.with_residual
        )
        return grad_x_BCHW, grad_residual_BCHW if ctx.with_residual else None, *grads_2C, *(None,) * 7
