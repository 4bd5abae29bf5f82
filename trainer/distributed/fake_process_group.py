"""Rank 0 of a process group whose other ranks do not exist: for counting what a step would do there."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from trainer.distributed import collectives


@contextmanager
def fake_ranks(world_size: int, *, sums_by_gathering: bool = True) -> Iterator[None]:
    """While open, this process is rank 0 of `world_size`; collectives send nothing and leave their outputs as they are.

    `sums_by_gathering`: sums of few numbers are gathered, as between gloo's ranks, or reduced, as between NCCL's. With
    one rank there is no group, as in a real run. Must not be opened inside a process group.
    """
    assert not dist.is_initialized()
    if world_size == 1:
        yield
        return
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)  # type: ignore[attr-defined]
    shortest = collectives._SHORT
    if not sums_by_gathering:
        collectives._SHORT = 0
    try:
        yield
    finally:
        collectives._SHORT = shortest
        dist.destroy_process_group()
