"""Share tensors between the ranks of a node, for a dataset in host memory.

The first rank of a node makes a file in `SHARED`, and all ranks map it. It is unlinked before samples are written.

Guarantees: the memory is free again when the processes end, however they end.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from pydantic import Field
from torch import Tensor

from data_pipeline.core.schema import Schema
from data_pipeline.core.system import PROC, SHARED

_ALIGNMENT: Final = 64  # bytes; tensors begin at multiples of it
_MAX_REASON_BYTES: Final = 200  # in the header, of the reason why a sample is bad


@dataclass(frozen=True)
class NodeShare:
    """The part of a rank in a copy of a dataset that the ranks with the same `SHARED` hold together.

    Attributes:
        local_rank: the number of this rank among them, from 0; number 0 reads for all.
        barrier: a function that returns when every rank of the run has called it; all ranks call it equally often.
        token: a file name for this run and dataset, equal on all these ranks.
    """

    local_rank: int
    barrier: Callable[[], None]
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


class SharedHeader(Schema):
    """The result of the first rank: an error, or the bad samples (reasons by index) and the longest length."""

    error: str = ""
    bad: dict[int, str] = Field(default_factory=dict)
    longest: int = 0


class SharedTensors:
    """Tensors in one file of `SHARED`, followed by a `SharedHeader`.

    The calls, with a barrier between the lines:

    1. The first rank: `create`.
    2. All ranks: `open`.
    3. The first rank: `reserve`, fill `tensors`, `write_header`.
    4. All ranks: `close`, `read_header`.

    Attributes:
        tensors: the tensors by name; exists after `open`.
        num_bytes: the size of the tensors.
    """

    def __init__(self, layouts: Mapping[str, TensorLayout], *, num_samples: int, token: str) -> None:
        self._path = SHARED / token
        self._offsets: dict[str, tuple[TensorLayout, int]] = {}
        self.num_bytes = 0
        for name, layout in layouts.items():
            self._offsets[name] = (layout, self.num_bytes)
            self.num_bytes += -(-layout.num_bytes // _ALIGNMENT) * _ALIGNMENT
        # Room for a header in which every sample is bad; a page takes no memory until it is written.
        self._size = self.num_bytes + 4 * _MAX_REASON_BYTES * (num_samples + 1)
        self._file = -1

    def create(self) -> str:
        """Make the file, which takes no memory yet. Return why this failed, or an empty text."""
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._file, self._size)
        except OSError as error:
            return f"{self._path} cannot be made ({error.strerror})"
        return ""

    def open(self) -> str:
        """Map the file. Return why this failed, or an empty text."""
        if not self._path.exists():
            return f"the first rank of this machine did not make {self._path}"
        self._mapped = torch.from_file(str(self._path), shared=True, size=self._size, dtype=torch.uint8)
        self.tensors: dict[str, Tensor] = {
            name: self._mapped[start : start + layout.num_bytes].view(layout.dtype).view(layout.shape)
            for name, (layout, start) in self._offsets.items()
        }
        return ""

    def reserve(self) -> str:
        """Unlink the file and allocate memory for the tensors. Return why this failed, or an empty text.

        Without this, a write to a page would kill the process with SIGBUS if there is no memory for the page.
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
        """Return the header; None if the first rank did not write one."""
        data = self._mapped.numpy().data[self.num_bytes :]
        length = int.from_bytes(data[:8], "little")
        return SharedHeader.model_validate_json(bytes(data[8 : 8 + length])) if length else None

    def close(self) -> None:
        """Close the file; the tensors keep the mapping."""
        if self._file >= 0:
            os.close(self._file)


def _ascii(reason: str) -> str:
    """Shorten a text and keep only characters that take at most two bytes in JSON, to bound the size of the header."""
    text = "".join(character if character.isprintable() and character.isascii() else "?" for character in reason)
    return text[:_MAX_REASON_BYTES]
