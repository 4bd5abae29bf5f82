"""A shard in memory: its bytes, and where the members of its samples lie."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BadSample

_NUM_ATTEMPTS: Final = 5


class Rows(Protocol):
    """Offset and size of each member: (B, 2 * num_members) int64 for (B,) numbers of samples in the shard."""

    def __getitem__(self, rows_B: NDArray[np.int64] | slice, /) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class OpenShard:
    """A shard in memory.

    Attributes:
        first: the index of its first sample in the dataset.
        rows: where the members lie; their numbers count from `first`.
        is_checked: (num_samples,) bool, whether the tar's headers were compared with `rows`.
    """

    path: Path
    data: memoryview
    first: int
    rows: Rows
    is_checked: NDArray[np.bool_]

    def row(self, index: int) -> list[int]:
        """Return offset and size of each member of the sample `index` of the dataset."""
        number = index - self.first
        row: list[int] = self.rows[number : number + 1][0].tolist()
        return row


class Shards(Protocol):
    """The shards of a dataset, as a store reads them.

    Attributes:
        members: the names of the members of a sample, in the order of a row.
        shard_ends: (num_shards,) int64, the index after the last sample of each shard.
        shard_bytes: (num_shards,) int64, the size of each shard.
        max_shards: the number of shards that can be on this machine at a time; None if all can.
        is_remote: whether shards are fetched.
    """

    @property
    def members(self) -> Sequence[str]: ...

    @property
    def shard_ends(self) -> NDArray[np.int64]: ...

    @property
    def shard_bytes(self) -> NDArray[np.int64]: ...

    @property
    def max_shards(self) -> int | None: ...

    @property
    def is_remote(self) -> bool: ...

    def name(self, number: int) -> str:
        """Return the file name of a shard, for messages."""
        ...

    def open(self, number: int) -> OpenShard:
        """Map a shard into memory, and fetch it first if it is remote."""
        ...

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Fetch remote shards in the background, in this order, in place of those that still wait."""
        ...

    def problem(self, shard: OpenShard, index: int) -> str | None:
        """Compare the place of a sample with the headers in its tar. Return the first difference, or None."""
        ...

    def missing(self, shard: OpenShard, index: int) -> str:
        """Return which members of a sample the shard does not hold; an empty text if it holds all."""
        ...

    def file_name(self, shard: OpenShard, index: int) -> str:
        """Return the name of the file of a sample in its tar; an empty text if the key of the sample says it."""
        ...

    def survey(self) -> tuple[BadSample, ...]:
        """Look at local shards without reading them. Return the samples that are not whole.

        Raises `UserError` if shards are missing, or if too little of them is there.
        """
        ...

    def labels(self, indices_B: NDArray[np.int64]) -> Mapping[str, NDArray[np.int64]] | None:
        """Return each label of samples by name, (B,) int64; None if they lie in the shards."""
        ...


def open_before_eviction(open_once: Callable[[], OpenShard], *, what: str, mend: str) -> OpenShard:
    """Return what `open_once` returns; call it again if another process removes the file from the cache meanwhile.

    Raises `UserError`, with `what` and `mend`, if that happens again and again.
    """
    for _ in range(_NUM_ATTEMPTS):
        with suppress(FileNotFoundError):
            return open_once()
    raise UserError(f"{what} was removed {_NUM_ATTEMPTS} times before it could be read; {mend}")


def map_file(path: Path) -> memoryview:
    """Map a file copy-on-write, so that writing to the memory does not change the file. Leaves no descriptor open.

    Raises `FileNotFoundError` if the file has been removed, and `UserError` if it cannot be mapped for another reason.
    """
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        return memoryview(bytearray())
    try:
        mapped = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise _why_not_mapped(path, str(error)) from None
    return mapped.numpy().data


def _why_not_mapped(path: Path, problem: str) -> OSError | UserError:
    """Return the error for a message of torch, such as "unable to open file <a.tar>: Permission denied (13)"."""
    found = re.search(r": ([^:]+) \((\d+)\)$", problem)
    if found is not None and int(found[2]) == errno.ENOENT:
        return FileNotFoundError(errno.ENOENT, found[1], str(path))
    reason = problem if found is None else found[1]
    return UserError(f"{path} cannot be mapped into memory ({reason}); mend that, or read another copy of the dataset")
