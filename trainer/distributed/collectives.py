"""Call collectives, with types and gradients; without a process group they are the identity.

They use the default process group, on gloo (CPU) or NCCL (GPU). Every rank must call them in the same order with
tensors of equal shape; the caller is responsible for this.

Guarantees: messages hold numbers and JSON, never code or a pickle.

Shapes: B rows of this rank, G = W * B rows of all W ranks, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from data_pipeline.core.errors import UserError
from trainer.liveness import stage

T = TypeVar("T")

_SHORT = 1 << 16  # numbers of all ranks, up to which gloo sends to all at once, and a CPU sums by gathering
_KNOWN_TO_ALL = "is_known_to_all_ranks"  # an attribute of errors


class FirstRankExit(SystemExit):
    """The exit of a rank after another has raised a `UserError` in `on_every_rank`. It prints nothing."""


def is_distributed() -> bool:
    """Return whether this process belongs to a group of more than one rank."""
    return world_size() > 1


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def message_device() -> torch.device:
    """Return the device on which the backend expects its tensors."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def all_gather_rows(x_BD: Tensor) -> Tensor:
    """Return the rows of all ranks, (W * B, D), in rank order.

    The gradients of all ranks for a row are summed at the rank that owns it.
    """
    if not is_distributed():
        return x_BD
    if not (torch.is_grad_enabled() and x_BD.requires_grad):
        return _gathered_rows(x_BD)
    gathered_GD: Tensor = _AllGatherRows.apply(x_BD)  # type: ignore[no-untyped-call]
    return gathered_GD


def all_reduce_sum(x: Tensor) -> Tensor:
    """Return the sum of `x` over all ranks, on every rank; its gradient is the sum of the gradients of all ranks."""
    if not is_distributed():
        return x
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _sum_over_ranks(x)
    total: Tensor = _AllReduceSum.apply(x)  # type: ignore[no-untyped-call]
    return total


def all_reduce_mean_scalars(scalars: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return the mean of each scalar over the ranks, for logging, with one collective and without gradient.

    All ranks must pass the same keys.
    """
    names = sorted(scalars)
    if not names:
        return {}
    values = torch.stack(
        [torch.as_tensor(scalars[name]).detach().to(message_device(), torch.float64) for name in names]
    )
    if is_distributed():
        values = _sum_over_ranks(values)
    return dict(zip(names, (values / world_size()).tolist(), strict=True))


def any_rank(flag: bool) -> bool:
    """Return whether `flag` is true on at least one rank; every rank gets the same answer."""
    if not is_distributed():
        return flag
    flags = torch.tensor(int(flag), device=message_device())
    return bool(_sum_over_ranks(flags).item())


class AnyRank:
    """A repeated question whether a flag is true on any rank. The answer comes one call later, so that no rank waits.

    It has its own gloo process group, so the question does not queue behind the collectives of training.
    """

    def __init__(self) -> None:
        """Make the process group. Every rank must do so at the same time."""
        self._group = dist.new_group(backend="gloo") if is_distributed() else None
        self._asked: tuple[Tensor, Any] | None = None

    def next(self, flag: bool) -> bool:
        """Return whether `flag` was true on any rank at the previous call; the first call returns False.

        Every rank gets the same answer. A single process gets the answer for this call.
        """
        if self._group is None:
            return flag
        before = self._asked
        flags = torch.tensor(int(flag))
        self._asked = flags, dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        if before is None:
            return False
        answer, work = before
        with stage("communication"):
            work.wait()
        return bool(answer)


def broadcast_json(value: T, kind: Any) -> T:
    """Return the `value` of rank 0 on every rank; ignore the values of the other ranks.

    It is sent as JSON, and read as pydantic reads the type `kind`.
    """
    if not is_distributed():
        return value
    content = _to_bytes(value, kind) if rank() == 0 else torch.empty(0, dtype=torch.uint8)
    return cast(T, _from_bytes(all_gather_parts(content.to(message_device()))[0], kind))


def on_every_rank(action: Callable[[], T], *, catch: type[Exception] = UserError) -> T:
    """Run `action` on every rank, and return its result on this one.

    If it raises `catch` on some ranks, the first of them raises the same, and the others exit without a message: by
    `FirstRankExit` if the error is a `UserError`, and else by `SystemExit`. Any other error leaves at once, because
    the other ranks may wait in a collective of `action`.
    """
    error: Exception | None = None
    result: list[T] = []
    try:
        result.append(action())
    except catch as raised:
        error = raised
    errors = all_gather_json(None if error is None else isinstance(error, UserError), bool | None)
    first = next((number for number, is_users in enumerate(errors) if is_users is not None), None)
    if first is None:
        return result[0]
    if error is None or first != rank():
        raise FirstRankExit(2) if errors[first] else SystemExit(2)
    setattr(error, _KNOWN_TO_ALL, True)
    raise error


def on_first_rank(action: Callable[[], T]) -> T | None:
    """Run `action`, without collectives, on rank 0, and return its result there; None on other ranks.

    If it raises, all ranks end as in `on_every_rank`.
    """
    return on_every_rank(lambda: action() if rank() == 0 else None, catch=Exception)


def from_first_rank(action: Callable[[], T], kind: Any) -> T:
    """Run `action` as `on_first_rank` does, and return its result on every rank, as `broadcast_json` does."""
    return cast(T, broadcast_json(on_first_rank(action), kind))


def is_known_to_all(error: BaseException) -> bool:
    """Return whether every rank has raised at the same call as this one, so that all can go on with something else.

    This holds for what `on_every_rank` raises for a `UserError`, and for any error of a single process.
    """
    if not is_distributed() or isinstance(error, FirstRankExit):
        return True
    return isinstance(error, UserError) and getattr(error, _KNOWN_TO_ALL, False)


def all_gather_json(value: T, kind: Any) -> list[T]:
    """Return the values of all ranks, in rank order, on every rank, as `broadcast_json` sends and reads them."""
    if not is_distributed():
        return [value]
    return [_from_bytes(content, kind) for content in all_gather_parts(_to_bytes(value, kind).to(message_device()))]


def all_gather_parts(x_BD: Tensor) -> list[Tensor]:
    """Return the rows of each rank, which may be differently many, in rank order, without gradient."""
    if not is_distributed():
        return [x_BD]
    nums_W = all_gather_rows(torch.tensor([len(x_BD)], device=x_BD.device)).tolist()
    padding = [0, 0] * (x_BD.dim() - 1) + [0, max(nums_W) - len(x_BD)]
    rows_WBD = all_gather_rows(F.pad(x_BD.detach(), padding)[None])
    return [rows_BD[:num] for rows_BD, num in zip(rows_WBD, nums_W, strict=True)]


def sum_in_rank_order(x: Tensor) -> Tensor:
    """Return the sum of `x` over all ranks, without gradient, with each number added up in rank order.

    The order in a backend's own sum depends on the position of the number in the tensor.
    """
    parts = _gathered_rows(x.reshape(1, -1))
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
    """Return the rows of all ranks, without gradient."""
    x_BD = x_BD.contiguous()  # ranks exchange memory, not numbers: pictures in channels_last would be mixed up
    gathered_GD = x_BD.new_empty((world_size() * len(x_BD), *x_BD.shape[1:]))
    with stage("communication"):
        # gloo's gather has W - 1 rounds, and each waits for the one before. For a few numbers, that takes the time.
        if gathered_GD.numel() <= _SHORT and dist.get_backend() == "gloo":
            dist.all_to_all_single(gathered_GD, torch.cat([x_BD] * world_size()))
        else:
            dist.all_gather_into_tensor(gathered_GD, x_BD)
    return gathered_GD


def _sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum, without gradient.

    On a CPU, a short tensor is gathered and added up here: gloo gathers some hundred numbers in half of the time that
    it needs to sum them, and batch norm needs a sum in every layer.
    """
    if x.device.type == "cpu" and x.numel() * world_size() <= _SHORT:
        return sum_in_rank_order(x)
    with stage("communication"):
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
    return total


def _to_bytes(value: object, kind: Any) -> Tensor:
    """Return a value as JSON, in bytes."""
    return torch.frombuffer(bytearray(TypeAdapter(kind).dump_json(value)), dtype=torch.uint8)


def _from_bytes(content: Tensor, kind: Any) -> Any:
    return TypeAdapter(kind).validate_json(content.cpu().numpy().tobytes())
