"""Tensors in memory that the ranks of a node share, for a dataset that is held in host memory.

The first rank of a node makes a file in `SHARED`, and all ranks map it. It is unlinked before a sample is written.

Guarantees: the memory ends with the processes that hold it, however they end.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from pydantic import Field
from torch import Tensor

from data_pipeline.core.schema import Schema

SHARED: Final = Path("/dev/shm")  # memory that looks like files, of one machine or container

_ALIGNMENT: Final = 64  # bytes; tensors begin at multiples of it
_MAX_REASON_BYTES: Final = 200  # of the reason why a sample is bad, in the header


@dataclass(frozen=True)
class NodeShare:
    """How the ranks that see the same `SHARED` hold one copy of a dataset together.

    Attributes:
        local_rank: the number of this rank among them, from 0; number 0 reads for all.
        barrier: returns once every rank of the run has called it; all ranks make the same number of calls.
        token: a file name for this run and dataset, the same on all of them.
    """

    local_rank: int
    barrier: Callable[[], None]
    token: str


def shared_memory_identity() -> str:
    """Return a text that two processes have in common only if they see the same `SHARED`."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
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


class SharedHeader(Schema):
    """The result of the first rank's reading: an error, or the bad samples (by index) and the longest sound."""

    error: str = ""
    bad: dict[int, str] = Field(default_factory=dict)
    longest: int = 0


class SharedTensors:
    """Tensors in one file of `SHARED`, followed by a `SharedHeader`.

    The first rank calls `create`; then all ranks call `open`; then the first rank calls `reserve`, fills `tensors` and
    calls `write_header`; then all ranks call `close` and `read_header`. Barriers separate these.

    Attributes:
        tensors: by name; they exist after `open`.
        num_bytes: what they take.
    """

    def __init__(self, layouts: Mapping[str, TensorLayout], *, num_samples: int, token: str) -> None:
        self._path = SHARED / token
        self._offsets: dict[str, tuple[TensorLayout, int]] = {}
        self.num_bytes = 0
        for name, layout in layouts.items():
            self._offsets[name] = (layout, self.num_bytes)
            self.num_bytes += -(-layout.num_bytes // _ALIGNMENT) * _ALIGNMENT
        # Room for a header in which every sample is bad: pages that are not written to take no memory.
        self._size = self.num_bytes + 4 * _MAX_REASON_BYTES * (num_samples + 1)
        self._file = -1

    def create(self) -> str:
        """Make the file, which takes no memory yet. Return why that failed, or an empty text."""
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._file, self._size)
        except OSError as error:
            return f"{self._path} cannot be made ({error.strerror})"
        return ""

    def open(self) -> str:
        """Map the file. Return why that failed, or an empty text."""
        if not self._path.exists():
            return f"the first rank of this machine did not make {self._path}"
        self._mapped = torch.from_file(str(self._path), shared=True, size=self._size, dtype=torch.uint8)
        self.tensors: dict[str, Tensor] = {
            name: self._mapped[start : start + layout.num_bytes].view(layout.dtype).view(layout.shape)
            for name, (layout, start) in self._offsets.items()
        }
        return ""

    def reserve(self) -> str:
        """Remove the file from its directory, and take memory for the tensors. Return why that failed, or "".

        Without it, a write to a page for which there is no memory would kill the process with SIGBUS.
        """
        self._path.unlink()
        try:
            os.posix_fallocate(self._file, 0, self.num_bytes)
        except OSError as error:
            return f"{self._path.parent} has no room for it ({error.strerror})"
        return ""

    def write_header(self, header: SharedHeader) -> None:
        """Write the header for all ranks that have mapped the file; reasons and errors are shortened."""
        short = SharedHeader(
            error=header.error[:_MAX_REASON_BYTES],
            bad={index: _ascii(reason) for index, reason in header.bad.items()},
            longest=header.longest,
        )
        text = short.model_dump_json().encode()
        os.pwrite(self._file, len(text).to_bytes(8, "little") + text, self.num_bytes)

    def read_header(self) -> SharedHeader | None:
        """Return the header; None if the first rank wrote none."""
        data = self._mapped.numpy().data[self.num_bytes :]
        length = int.from_bytes(data[:8], "little")
        return SharedHeader.model_validate_json(bytes(data[8 : 8 + length])) if length else None

    def close(self) -> None:
        """Close the file; the mapping stays as long as its tensors."""
        if self._file >= 0:
            os.close(self._file)


def _ascii(reason: str) -> str:
    """Return a short text in characters that JSON writes in at most two bytes, so that the header's size is bounded."""
    text = "".join(character if character.isprintable() and character.isascii() else "?" for character in reason)
    return text[:_MAX_REASON_BYTES]
