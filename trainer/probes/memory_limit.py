"""Decide what a probe keeps in the memory of the GPU or of the host, and put the rest into a file without a name.

Guarantees: all ranks decide alike. The file has no entry in a directory, so it is gone when its process ends, even
after kill -9.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.system import free_host_bytes, reserve_room
from data_pipeline.loading.placement import free_device_bytes
from trainer.distributed.collectives import any_rank, world_size

_CPU: Final = torch.device("cpu")


@dataclass(frozen=True)
class MemoryLimit:
    """The most bytes that a dataset, or its features, may take in memory, and a directory for what is larger.

    max_bytes: on each rank; None stands for half of the memory that is free when it is asked for, shared by all ranks.
    scratch: a directory on a local disk; None stands for the one of `tempfile`, which the variable TMPDIR sets.
    """

    max_bytes: int | None = None
    scratch: Path | None = None

    def holds(self, num_bytes: int, device: torch.device = _CPU) -> bool:
        """Return whether `num_bytes` may be kept in the memory of a device.

        Every rank calls this, and all get the same answer: no, if one of them has too little memory.
        """
        most = self.max_bytes
        if most is None and device.type == "cuda":
            most = free_device_bytes(device) // 2
        elif most is None:
            most = free_host_bytes() // 2 // world_size()
        return not any_rank(num_bytes > most)

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor to write to: on `device` if its memory holds it, else on the CPU, in memory or in a file.

        Every rank calls this. Raises `UserError` if the disk has no room for the file.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        for place in dict.fromkeys((device, _CPU)):
            if self.holds(num_bytes, place):
                return torch.empty(*shape, dtype=dtype, device=place)
        directory = Path(tempfile.gettempdir()) if self.scratch is None else self.scratch
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                # Without room, writing to a mapped file would end the process without a word.
                reserve_room(file.fileno(), num_bytes)
                mapped = np.memmap(file, dtype=np.uint8, mode="r+", shape=(num_bytes,))
        except OSError as error:
            free = f", where {shutil.disk_usage(directory).free / 1e9:.3g} GB are free" if directory.is_dir() else ""
            raise UserError(
                f"the features take {num_bytes / 1e9:.3g} GB, which fit neither in memory nor in {directory}{free} "
                f"({error.strerror}); name a directory on a larger disk with --scratch"
            ) from None
        return torch.from_numpy(mapped).view(dtype).view(*shape)
