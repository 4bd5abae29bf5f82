"""Collectives: thin, typed, differentiable where a gradient makes sense; the identity without a process group.

They use the default process group, on gloo (CPU) or NCCL (GPU); between CPU ranks of one machine that have met as
neighbours, memory that they share. Every rank must call them in the same order with tensors of equal shape; the caller
asserts that.

Shapes: B rows of this rank, G = W * B rows of all W ranks, D columns.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from data_pipeline.core.errors import UserError
from trainer.distributed.neighbours import Doorbell, Neighbours, can_be_neighbours
from trainer.profiling import stage

T = TypeVar("T")

logger = logging.getLogger(__name__)

_SHORT = 1 << 16

_neighbours: list[Neighbours] = []  # the one, where all ranks are of one machine and have met


def is_distributed() -> bool:
    """Whether this process belongs to a group of more than one rank."""
    return world_size() > 1


def rank() -> int:
    """Number of this process among all; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def meet_neighbours(*, timeout_seconds: float) -> bool:
    """From now on, collectives on CPU tensors go through shared memory; every rank of the machine must call this.

    For ranks that are all on one machine, after the process group was made. Where one cannot (another system than
    Linux, ranks in containers that do not see each other) all stay with gloo. Returns whether they met.
    """
    assert not _neighbours
    if not (is_distributed() and all(all_gather_object(can_be_neighbours()))):
        return False
    doorbell = Doorbell(rank())
    names = all_gather_object(doorbell.name)
    reason = ""
    try:
        _neighbours.append(doorbell.connect(names, timeout_seconds=timeout_seconds))
    except UserError as error:
        reason = str(error)
    reasons = [each for each in all_gather_object(reason) if each]
    if reasons:
        leave_neighbours()
        if rank() == 0:
            logger.warning("%s; the ranks talk through gloo, which is slower", reasons[0])
    return not reasons


def leave_neighbours() -> None:
    """Hang up; collectives use the process group again. Does nothing where nobody has met."""
    while _neighbours:
        _neighbours.pop().close()


def all_gather_rows(x_BD: Tensor) -> Tensor:
    """The rows of all ranks, (W * B, D), in rank order; a row's gradient is summed over all ranks, at its owner."""
    if not is_distributed():
        return x_BD
    if not (torch.is_grad_enabled() and x_BD.requires_grad):
        return _gathered_rows(x_BD)
    gathered_GD: Tensor = _AllGatherRows.apply(x_BD)  # type: ignore[no-untyped-call]
    return gathered_GD


def all_reduce_sum(x: Tensor) -> Tensor:
    """The sum of `x` over all ranks, on every rank; the gradient is the sum of all ranks' gradients."""
    if not is_distributed():
        return x
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _sum_over_ranks(x)
    total: Tensor = _AllReduceSum.apply(x)  # type: ignore[no-untyped-call]
    return total


def all_reduce_mean_scalars(scalars: Mapping[str, Tensor | float]) -> dict[str, float]:
    """The mean over the ranks of each scalar, for logging: one collective, no gradient. Ranks pass the same keys."""
    names = sorted(scalars)
    if not names:
        return {}
    values = torch.stack([torch.as_tensor(scalars[name]).detach().to(_device(), torch.float64) for name in names])
    if is_distributed():
        values = _sum_over_ranks(values)
    return dict(zip(names, (values / world_size()).tolist(), strict=True))


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on at least one rank; every rank gets the same answer."""
    if not is_distributed():
        return flag
    flags = torch.tensor(int(flag), device=_device())
    return bool(_sum_over_ranks(flags).item())


class AnyRank:
    """Whether a flag is true on at least one rank, asked step by step and answered one step late, so that none waits.

    It has a process group of its own, on gloo: the question goes beside whatever else the ranks tell each other.
    Neighbours are quick enough to be asked at once.
    """

    def __init__(self) -> None:
        """Every rank makes one at the same time."""
        self._group = dist.new_group(backend="gloo") if is_distributed() and not _neighbours else None
        self._asked: tuple[Tensor, Any] | None = None

    def next(self, flag: bool) -> bool:
        """The answer to what was asked in the call before, False in the first one; every rank gets the same. One
        process, and neighbours, answer what is asked now."""
        if self._group is None:
            return any_rank(flag)
        before = self._asked
        flags = torch.tensor(int(flag))
        self._asked = flags, dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        if before is None:
            return False
        answer, work = before
        with stage("communication"):
            work.wait()
        return bool(answer)


def broadcast_object(value: T, *, source: int = 0) -> T:
    """The picklable `value` of rank `source`, on every rank; what the other ranks pass is ignored."""
    if not is_distributed():
        return value
    box = [value]
    with stage("communication"):
        dist.broadcast_object_list(box, src=source, device=_device())
    return box[0]


def all_gather_object(value: T) -> list[T]:
    """The picklable values of all ranks, in rank order, on every rank."""
    if not is_distributed():
        return [value]
    values: list[T | None] = [None] * world_size()
    with stage("communication"):
        dist.all_gather_object(values, value)
    return cast(list[T], values)


def barrier() -> None:
    """Wait until every rank has come here."""
    if is_distributed():
        with stage("communication"):
            dist.barrier()


def sum_in_rank_order(x: Tensor) -> Tensor:
    """The sum of `x` over all ranks, without gradient, each number added up in the order of the ranks.

    A backend's own sum adds a number up in an order that depends on its place in the tensor; this one does not.
    """
    if _share_memory_with(x):
        with stage("communication"):
            gathered: Tensor = torch.ops.neighbours.allgather_sum(x.contiguous())
            return gathered
    parts = x.new_empty((world_size(), x.numel()))
    with stage("communication"):
        dist.all_gather_into_tensor(parts, x.reshape(1, -1).contiguous())
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total.view(x.shape)


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BD: Tensor) -> Tensor:
        ctx.num_rows = len(x_BD)
        return _gathered_rows(x_BD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_GD: Tensor) -> Tensor:
        grad_BD = grad_GD.new_empty((ctx.num_rows, *grad_GD.shape[1:]))
        with stage("communication"):
            if _share_memory_with(grad_GD):
                torch.ops.neighbours.reduce_scatter_(grad_BD, grad_GD.contiguous())
            else:
                dist.reduce_scatter_tensor(grad_BD, grad_GD.contiguous())
        return grad_BD


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _sum_over_ranks(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _sum_over_ranks(grad)


def _gathered_rows(x_BD: Tensor) -> Tensor:
    """The rows of all ranks, without gradient."""
    gathered_GD = x_BD.new_empty((world_size() * len(x_BD), *x_BD.shape[1:]))
    with stage("communication"):
        if _share_memory_with(x_BD):
            torch.ops.neighbours.allgather_(gathered_GD, x_BD.contiguous())
        else:
            dist.all_gather_into_tensor(gathered_GD, x_BD.contiguous())
    return gathered_GD


def _sum_over_ranks(x: Tensor) -> Tensor:
    """The sum, without gradient. On the CPU a short vector is gathered and added up here: gloo gathers some hundred
    numbers in half of the time that it needs to sum them, and batch norm asks for a sum in every layer."""
    if x.device.type == "cpu" and x.numel() * world_size() <= _SHORT:
        return sum_in_rank_order(x)
    with stage("communication"):
        if _share_memory_with(x):
            total: Tensor = torch.ops.neighbours.allreduce(x.contiguous())
            return total
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
    return total


def _share_memory_with(x: Tensor) -> bool:
    """Whether all ranks can read what this one holds of it."""
    return bool(_neighbours) and x.device.type == "cpu"


def _device() -> torch.device:
    """Where the backend wants its tensors."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _gather(out: Tensor, x: Tensor) -> None:
    _neighbours[0].all_gather(out.view(world_size(), -1), x.view(-1))


def _sum(x: Tensor) -> Tensor:
    return _neighbours[0].all_reduce_sum(x.view(-1)).view(x.shape)


def _reduce_scatter(out: Tensor, x: Tensor) -> None:
    out.copy_(_neighbours[0].all_reduce_sum(x.view(-1)).view(world_size(), *out.shape)[rank()])


# What neighbours do are operators: whoever counts operations (`trainer.planning.accounting`) sees them as c10d's own.
_operators = torch.library.Library("neighbours", "DEF")  # type: ignore[no-untyped-call]
for _schema, _kernel in (
    ("allgather_(Tensor(a!) out, Tensor x) -> ()", _gather),
    ("allgather_sum(Tensor x) -> Tensor", _sum),
    ("allreduce(Tensor x) -> Tensor", _sum),
    ("reduce_scatter_(Tensor(a!) out, Tensor x) -> ()", _reduce_scatter),
):
    _operators.define(_schema)  # type: ignore[no-untyped-call]
    _operators.impl(_schema.partition("(")[0], _kernel, "CPU")  # type: ignore[no-untyped-call]
