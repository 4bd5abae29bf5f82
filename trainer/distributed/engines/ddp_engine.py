"""Train a module with torch's DistributedDataParallel; in a single process, train the bare module."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.collectives import sum_in_rank_order, world_size
from trainer.distributed.engines.engine import BaseEngineConfig, EngineInputs, check_same_names, without_gradients
from trainer.optim.optimizers import OptimizerConfig, build_optimizer
from trainer.optim.skipping import step_unless


class DDPConfig(BaseEngineConfig):
    """The config of DistributedDataParallel: every rank keeps all parameters, gradients and optimizer state."""

    can_be_recorded: ClassVar[bool] = True

    kind: Literal["ddp"] = "ddp"

    def build(self, module: nn.Module, given: EngineInputs) -> DDPEngine:
        return DDPEngine(module, optimizer=given.optimizer)


class DDPEngine:
    """An `Engine` that averages gradients over the ranks during the backward pass."""

    def __init__(self, module: nn.Module, *, optimizer: OptimizerConfig) -> None:
        self.module = module
        self._optimizer = build_optimizer(optimizer, module)
        self._parallel: DistributedDataParallel | None = None
        if world_size() > 1:
            # Buffers need no broadcast: synchronised batch norm computes the same statistics on every rank. A broadcast
            # between the two forward passes of a step would change a tensor that the backward pass still needs. All
            # versions of torch have the attribute; the argument is deprecated since 2.13.
            device = next(module.parameters()).device
            device_ids = [device] if device.type == "cuda" else None
            self._parallel = parallel = DistributedDataParallel(module, device_ids=device_ids)
            parallel.broadcast_buffers = False
            if device.type == "cpu":
                # A filter of one pixel has the same strides in both memory formats, and torch's kernel for the
                # processor decides which one its gradient reports.
                warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
                parallel.register_comm_hook(None, lambda _, bucket: _average_in_rank_order(bucket))
        self._frozen = False

    def __call__(self, *inputs: Any) -> Any:
        return (self.module if self._frozen or self._parallel is None else self._parallel)(*inputs)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        with nullcontext() if self._parallel is None else self._parallel.no_sync():
            yield

    def gradient_norm(self) -> Tensor:
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        if not gradients:
            return torch.zeros((), device=next(self.module.parameters()).device)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        return norm.float()

    def step(self, *, learning_rate: float | Tensor, skip: Tensor | None = None) -> None:
        step_and_clear(self._optimizer, learning_rate=learning_rate, skip=skip)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self._frozen = True
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        try:
            with without_gradients(trained):
                yield
        finally:
            self._frozen = False

    def module_state(self) -> dict[str, Tensor]:
        return self.module.state_dict()

    def optimizer_state(self) -> dict[str, Tensor]:
        return {
            f"{key}/{name}": value
            for name, parameter in self.module.named_parameters()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }

    def load(self, module_state: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor]) -> None:
        self.module.load_state_dict(module_state)
        state = self.optimizer_state()
        check_same_names(state, optimizer_state)
        for name, value in state.items():
            value.copy_(optimizer_state[name])


def step_and_clear(optimizer: torch.optim.Optimizer, *, learning_rate: float | Tensor, skip: Tensor | None) -> None:
    """Take the step of `Engine.step` with an optimizer of torch, then clear its gradients."""
    is_fused = bool(optimizer.defaults.get("fused"))
    if not is_fused:
        learning_rate = float(learning_rate)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
        if is_fused and "capturable" in group:
            # Without this flag, torch refuses to record Adam in a CUDA graph. The fused kernel does not read it.
            group["capturable"] = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    step_unless(optimizer, skip)
    optimizer.zero_grad(set_to_none=True)


def _average_in_rank_order(bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return the mean of a bucket over the ranks, with each number added up in rank order.

    After its first step, DDP packs gradients into other buckets. The order in gloo's own sum depends on the position in
    the bucket. With that sum, the bits of a restarted run would differ from an uninterrupted run.
    """
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(sum_in_rank_order(bucket.buffer()) / world_size())
    return future
