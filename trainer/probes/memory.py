"""Decide whether samples and features lie in the memory of the GPU or of the host. All ranks decide alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.system import free_host_bytes
from data_pipeline.loading.placement import free_device_bytes
from trainer.distributed.collectives import any_rank, world_size

_CPU: Final = torch.device("cpu")


def fits(num_bytes: int, device: torch.device = _CPU) -> bool:
    """Return whether `num_bytes` take at most half of the free memory of a device; ranks share that of the host.

    Every rank calls this, and all get the same answer: no, if one of them has too little memory.
    """
    free = free_device_bytes(device) if device.type == "cuda" else free_host_bytes() // world_size()
    return not any_rank(num_bytes > free // 2)


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor for features: on `device` if they fit there, else on the CPU. Every rank calls this.

    Raises `UserError` if they do not fit on the CPU either.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    for place in dict.fromkeys((device, _CPU)):
        if fits(num_bytes, place):
            return torch.empty(*shape, dtype=dtype, device=place)
    raise UserError(
        f"the features take {num_bytes / 1e9:.3g} GB on each rank, more than half of the free memory; use a machine "
        "with more, fit with --views policy, which keeps no train features, or train with encoder.probe_reads=pooled"
    )
