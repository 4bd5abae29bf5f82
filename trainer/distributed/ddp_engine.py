"""A player under torch's DistributedDataParallel, on gloo (CPU) or NCCL (GPU); in one process, the bare module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.collectives import sum_in_rank_order, world_size
from trainer.optim import OptimizerConfig, build_optimizer


class DDPEngine:
    """Implements `trainer.distributed.engine.Engine`; gradients are averaged over ranks while backward runs."""

    def __init__(self, module: nn.Module, *, optimizer: OptimizerConfig) -> None:
        self.module = module
        self._optimizer = build_optimizer(optimizer, (p for p in module.parameters() if p.requires_grad))
        self._parallel: nn.Module = module
        if world_size() > 1:
            # Buffers need no broadcast: synchronised batch norm computes the same statistics on every rank, and a
            # broadcast between the two forwards of a step would change a tensor that backward still needs.
            device = next(module.parameters()).device
            self._parallel = parallel = DistributedDataParallel(
                module, device_ids=[device] if device.type == "cuda" else None, broadcast_buffers=False
            )
            if device.type == "cpu":
                parallel.register_comm_hook(None, lambda _, bucket: _average_in_rank_order(bucket))
        self._frozen = False

    def __call__(self, *inputs: Any) -> Any:
        return (self.module if self._frozen else self._parallel)(*inputs)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def step(self, *, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self._frozen = True
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
            self._frozen = False

    def optimizer_state(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


def _average_in_rank_order(bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean of a bucket over the ranks, each number added up in the order of the ranks.

    DDP packs the gradients into other buckets after its first step, and gloo's own sum adds a number up in an order
    that depends on its place in the bucket. So a restarted run would end in other bits than an undisturbed one.
    """
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(sum_in_rank_order(bucket.buffer()) / world_size())
    return future
