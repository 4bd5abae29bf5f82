"""Share tensors between the ranks of a node, for a dataset in host memory.

The first rank of a node makes a file in `SHARED`, and all ranks map it. It is unlinked before samples are written.

Guarantees: the memory is free again when the processes end, however they end.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from data_pipeline.core.system import PROC, SHARED

_ALIGNMENT: Final = 64  # bytes; tensors begin at multiples of it


@dataclass(frozen=True)
class NodeShare:
    """The part of a rank in a copy of a dataset that the ranks with the same `SHARED` hold together.

    Attributes:
        is_first: whether this rank is the first of them, which reads for all.
        from_first: a function that returns the argument of the first of them, on each of them. It returns when every
            rank of the run has called it; all ranks call it equally often.
        token: a file name for this run and dataset, equal on all these ranks.
    """

    is_first: bool
    from_first: Callable[[Any], Any]
    token: str


def shared_memory_identity() -> str:
    """Return a text that is equal in two processes only if they see the same `SHARED`; empty if there is none."""
    if not SHARED.is_dir():
        return ""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {SHARED.stat().st_dev}"
    except OSError:
        return f"{os.uname().nodename} {os.getpid()}"


@dataclass(frozen=True)
class TensorLayout:
    """The shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SharedTensors:
    """Tensors in one file of `SHARED`.

    The first rank calls `create`; then all ranks call `open`; then the first rank calls `reserve` and fills `tensors`.

    Attributes:
        tensors: the tensors by name; exists after `open`.
        num_bytes: the size of the tensors.
    """

    def __init__(self, layouts: Mapping[str, TensorLayout], *, token: str) -> None:
        self._path = SHARED / token
        self._offsets: dict[str, tuple[TensorLayout, int]] = {}
        self.num_bytes = 0
        for name, layout in layouts.items():
            self._offsets[name] = (layout, self.num_bytes)
            self.num_bytes += -(-layout.num_bytes // _ALIGNMENT) * _ALIGNMENT

    def create(self) -> str:
        """Make the file, which takes no memory yet. Return why this failed, or an empty text."""
        try:
            with self._path.open("xb") as file:
                file.truncate(self.num_bytes)
        except OSError as error:
            return f"{self._path} cannot be made ({error.strerror})"
        return ""

    def open(self) -> None:
        """Map the file."""
        mapped = torch.from_file(str(self._path), shared=True, size=self.num_bytes, dtype=torch.uint8)
        self.tensors: dict[str, Tensor] = {
            name: mapped[start : start + layout.num_bytes].view(layout.dtype).view(layout.shape)
            for name, (layout, start) in self._offsets.items()
        }

    def reserve(self) -> str:
        """Unlink the file and allocate memory for the tensors. Return why this failed, or an empty text.

        Without this, a write to a page would kill the process with SIGBUS if there is no memory for the page.
        """
        with self._path.open("r+b") as file:
            self._path.unlink()
            try:
                os.posix_fallocate(file.fileno(), 0, self.num_bytes)
            except OSError as error:
                return f"{self._path.parent} has no room for it ({error.strerror})"
        return ""
