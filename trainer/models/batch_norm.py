"""Batch normalisation over the batch of all ranks, on CPU and GPU.

`torch.nn.SyncBatchNorm` refuses CPU tensors. This one is built on the collectives, costs one of them forward and one
backward, and equals `torch.nn.BatchNorm2d` in one process on the whole batch: outputs, gradients, running statistics.

Shapes: B rows of this rank, C channels, H by W pixels, R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from trainer.distributed.collectives import all_gather_rows, all_reduce_sum, is_distributed


def synchronized_batch_norm(
    x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each channel by the mean and variance over the batches of all ranks (Ioffe and Szegedy 2015).

    Returns the output, like `x_BCHW`, and the mean and the unbiased variance of each channel, (C,), without gradient.
    The gradients of weight and bias are this rank's part, as those of every other parameter.
    """
    out_BCHW, mean_C, unbiased_C = _SynchronizedBatchNorm.apply(x_BCHW, weight_C, bias_C, eps)  # type: ignore[no-untyped-call]
    return out_BCHW, mean_C, unbiased_C


class SynchronizedBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` whose batch, in training mode, is that of all ranks; the same parameters, buffers and names."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the base class's name
        if not (self.training and is_distributed()):
            return super().forward(input)
        assert self.momentum is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        out_BCHW, mean_C, unbiased_C = synchronized_batch_norm(input, self.weight, self.bias, eps=self.eps)
        self.running_mean.lerp_(mean_C, self.momentum)
        self.running_var.lerp_(unbiased_C, self.momentum)
        self.num_batches_tracked.add_(1)
        return out_BCHW


class SynchronizedBatchNorm1d(SynchronizedBatchNorm2d):
    """`nn.BatchNorm1d` of rows (B, C) whose batch, in training mode, is that of all ranks."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  the base class's name
        if input.dim() != 2:
            raise ValueError(f"batch norm of a head expects rows (B, C), got {tuple(input.shape)}")


def synchronize_batch_norm(module: nn.Module) -> nn.Module:
    """Replace every `nn.BatchNorm2d` inside `module`, in place; a state_dict fits before and after."""
    for name, child in module.named_children():
        if type(child) is nn.BatchNorm2d:
            twin = SynchronizedBatchNorm2d(child.num_features, eps=child.eps, momentum=child.momentum)
            twin.load_state_dict(child.state_dict())
            setattr(module, name, twin)
        else:
            synchronize_batch_norm(child)
    return module


class _SynchronizedBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Running statistics in the parameters' type make torch accumulate a bfloat16 input in float32.
        scratch_C = torch.zeros_like(weight_C)
        mean_C, var_C = torch.batch_norm_update_stats(x_BCHW, scratch_C, scratch_C.clone(), 0.0)
        num = x_BCHW.numel() // x_BCHW.shape[1]
        stats_RS = all_gather_rows(torch.cat([mean_C, var_C, mean_C.new_full((1,), num)])[None])
        mean_RC, var_RC, num_R1 = stats_RS[:, : len(mean_C)], stats_RS[:, len(mean_C) : -1], stats_RS[:, -1:]
        # Combined by Chan et al. 1983: a mean of squares minus a squared mean would cancel where the mean is large.
        total = num_R1.sum()
        mean_C = (mean_RC * (num_R1 / total)).sum(0)
        var_C = ((var_RC + (mean_RC - mean_C).square()) * (num_R1 / total)).sum(0)
        ctx.eps = eps
        ctx.save_for_backward(x_BCHW, weight_C, mean_C, var_C, total)
        out_BCHW = F.batch_norm(x_BCHW, mean_C, var_C, weight_C, bias_C, training=False, eps=eps)
        unbiased_C = var_C * (total / (total - 1))
        ctx.mark_non_differentiable(mean_C, unbiased_C)
        return out_BCHW, mean_C, unbiased_C

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BCHW: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x_BCHW, weight_C, mean_C, var_C, total = ctx.saved_tensors
        # With the statistics held constant; the second and third are the sums of grad * normalised x and of grad.
        grad_x_BCHW, grad_weight_C, grad_bias_C = torch.ops.aten.native_batch_norm_backward(
            grad_BCHW, x_BCHW, weight_C, mean_C, var_C, None, None, False, ctx.eps, [True, True, True]
        )
        # Through the statistics: -weight / std * (mean of grad + normalised x * mean of grad * normalised x), which is
        # itself a batch norm of x.
        sums_2C = all_reduce_sum(torch.cat([grad_weight_C, grad_bias_C]))
        scale_C = -weight_C * torch.rsqrt(var_C + ctx.eps) / total
        through_weight_C, through_bias_C = (sums_2C * scale_C.repeat(2)).chunk(2)
        grad_x_BCHW += F.batch_norm(
            x_BCHW, mean_C, var_C, through_weight_C, through_bias_C, training=False, eps=ctx.eps
        )
        return grad_x_BCHW, grad_weight_C, grad_bias_C, None
