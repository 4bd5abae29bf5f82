"""Make a process group with a single real rank, to count what a step on many ranks would compute and send."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from trainer.distributed import collectives


@contextmanager
def fake_ranks(world_size: int, *, sums_by_gathering: bool = True) -> Iterator[None]:
    """Make this process rank 0 of `world_size` ranks inside the block; collectives send nothing and do not set outputs.

    With `world_size` 1 there is no process group, as in a real run. Do not use it inside a process group.

    Args:
        sums_by_gathering: whether short tensors are summed by gathering them, as on gloo, or by a reduction, as on
            NCCL.
    """
    assert not dist.is_initialized()
    if world_size == 1:
        yield
        return
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::_allgather_base_", "Meta"):  # in torch 2.9 and 2.10
        importlib.import_module("torch.distributed._tools.fake_collectives")  # registers them, for tensors without data
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)  # type: ignore[attr-defined]
    shortest = collectives._SHORT
    if not sums_by_gathering:
        collectives._SHORT = 0
    try:
        yield
    finally:
        collectives._SHORT = shortest
        dist.destroy_process_group()
