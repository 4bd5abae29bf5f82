"""The shards of a dataset that `build` wrote, by number: from the list in its manifest, or from its table of shards.

A manifest lists up to 10,000 shards. More are in the file `shards.bin` beside it, which is mapped into memory. So a
dataset of a million shards is opened without an object for each of them, and the processes of a node share the pages.

The file holds four columns, one after the other. Each has one entry for each shard, in the order of their numbers:

- the index after the last sample of the shard, an int64;
- the size of the tar in bytes, an int64;
- the sha256 of the tar, 32 bytes;
- the sha256 of the index beside the tar, 32 bytes.

Integers are little-endian. `shard_name` gives the names. The manifest holds the sha256 of the file, so the hash of the
manifest covers every shard.

Guarantees: the file is compared with its sha256, and its numbers with each other, when it is opened. A row is checked
again, as a listed entry is, each time it is used.

Shapes: S shards.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.storage.files import open_regular
from data_pipeline.storage.manifest import (
    MANIFEST_NAME,
    MAX_SHARD_BYTES,
    MIN_MEMBER_BYTES,
    SHARD_TABLE_NAME,
    Manifest,
    ShardEntry,
    ShardTableEntry,
)
from data_pipeline.storage.shards import shard_name

ROW_BYTES: Final = 80
_INT: Final = np.dtype("<i8")
_HASH: Final = np.dtype("V32")  # not S32, which drops zeros at the end
_COLUMNS: Final = (_INT, _INT, _HASH, _HASH)
_ROWS_AT_ONCE: Final = 1 << 16  # that are checked at a time
_BLOCK: Final = 1 << 20
_MEND: Final = "copy it again from a whole copy, or build the dataset again"


class ShardList(Protocol):
    """The shards of a built dataset, by number.

    Attributes:
        ends: (S,) int64, the index after the last sample of each shard.
        num_bytes: (S,) int64, the size of each tar.
    """

    @property
    def ends(self) -> NDArray[np.int64]: ...

    @property
    def num_bytes(self) -> NDArray[np.int64]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> ShardEntry: ...

    def __iter__(self) -> Iterator[ShardEntry]: ...

    def name(self, number: int) -> str:
        """Return the file name of a shard."""
        ...

    def number(self, name: str) -> int | None:
        """Return the number of the shard with a file name; None if no shard has it."""
        ...


class ListedShards:
    """The shards that the manifest lists; see `ShardList`."""

    def __init__(self, entries: Sequence[ShardEntry]) -> None:
        self._entries = entries
        self._numbers = {entry.name: number for number, entry in enumerate(entries)}
        self.ends: NDArray[np.int64] = np.cumsum([entry.num_samples for entry in entries], dtype=np.int64)
        self.num_bytes: NDArray[np.int64] = np.array([entry.num_bytes for entry in entries], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, number: int) -> ShardEntry:
        return self._entries[number]

    def __iter__(self) -> Iterator[ShardEntry]:
        return iter(self._entries)

    def name(self, number: int) -> str:
        return self._entries[number].name

    def number(self, name: str) -> int | None:
        return self._numbers.get(name)


class ShardTable:
    """The shards of a table, mapped into memory; see `ShardList`.

    Raises `UserError` if the file is missing, is not the one that the manifest names, or contradicts the manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        assert manifest.shard_table is not None
        self._path, self._num = path, manifest.shard_table.num_shards
        _check_file(path, manifest.shard_table)
        self.ends, self.num_bytes, self._sha256, self._index_sha256 = _map(path, self._num)
        for contradiction in _contradictions(self.ends, self.num_bytes, manifest, manifest.shard_table):
            raise UserError(f"{path} contradicts {MANIFEST_NAME}: {contradiction}; {_MEND}")

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, number: int) -> ShardEntry:
        """Return the entry of a shard. Raises `UserError` if the file was changed after it was opened."""
        start = int(self.ends[number - 1]) if number else 0
        row = {
            "name": shard_name(number),
            "num_samples": int(self.ends[number]) - start,
            "num_bytes": int(self.num_bytes[number]),
            "sha256": self._sha256[number].tobytes().hex(),
            "index_sha256": self._index_sha256[number].tobytes().hex(),
        }
        return ShardEntry.parse(row, where=f"row {number} of {self._path}")

    def __iter__(self) -> Iterator[ShardEntry]:
        return (self[number] for number in range(self._num))

    def name(self, number: int) -> str:
        return shard_name(number)

    def number(self, name: str) -> int | None:
        found = re.fullmatch(r"shard-(\d{5,8})\.tar", name, flags=re.ASCII)
        number = -1 if found is None else int(found[1])
        return number if 0 <= number < self._num and name == shard_name(number) else None


def open_shard_list(directory: Path, manifest: Manifest) -> ShardList:
    """Return the shards of a local dataset. Raises `UserError` if its table is missing or wrong."""
    if manifest.shard_table is None:
        return ListedShards(manifest.shards)
    return ShardTable(directory / SHARD_TABLE_NAME, manifest)


def write_shard_table(path: Path, entries: Iterable[ShardEntry], *, num_shards: int) -> ShardTableEntry:
    """Write the table of `num_shards` shards, which lie on disk in the order of their names. Return its entry.

    Holds 80 bytes a shard in memory. The bytes are on disk when this returns.
    """
    columns: list[NDArray[Any]] = [np.zeros(num_shards, dtype=dtype) for dtype in _COLUMNS]
    end = 0
    for number, entry in enumerate(entries):
        assert entry.name == shard_name(number)
        end += entry.num_samples
        row = (end, entry.num_bytes, bytes.fromhex(entry.sha256), bytes.fromhex(entry.index_sha256))
        for column, value in zip(columns, row, strict=True):
            column[number] = np.void(value) if isinstance(value, bytes) else value
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for column in columns:
            file.write(column.data)
            digest.update(column.data)
        file.flush()
        os.fsync(file.fileno())
    return ShardTableEntry(num_shards=num_shards, num_bytes=int(columns[1].sum()), sha256=digest.hexdigest())


def _check_file(path: Path, due: ShardTableEntry) -> None:
    """Raise `UserError` if a file is not the table that the manifest names."""
    try:
        with open_regular(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != ROW_BYTES * due.num_shards:
                raise UserError(
                    f"{path} has {num_bytes} bytes, not {ROW_BYTES} for each of the {due.num_shards} shards; {_MEND}"
                )
            digest = hashlib.sha256()
            while block := file.read(_BLOCK):  # not mapped, so that the pages do not count for this process
                digest.update(block)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {_MEND}") from None
    if digest.hexdigest() != due.sha256:
        raise UserError(f"{path} is not the file that {MANIFEST_NAME} names by sha256; {_MEND}")


def _map(path: Path, num: int) -> list[NDArray[Any]]:
    columns, offset = [], 0
    for dtype in _COLUMNS:
        columns.append(np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(num,))))
        offset += num * dtype.itemsize
    return columns


def _contradictions(
    ends_S: NDArray[np.int64], num_bytes_S: NDArray[np.int64], manifest: Manifest, due: ShardTableEntry
) -> Iterator[str]:
    """Yield contradictions between the numbers of a table and those of the manifest."""
    end = total = 0
    least = len(manifest.members) * MIN_MEMBER_BYTES  # of a sample
    for first in range(0, len(ends_S), _ROWS_AT_ONCE):
        ends_R, bytes_R = ends_S[first : first + _ROWS_AT_ONCE], num_bytes_S[first : first + _ROWS_AT_ONCE]
        before_R = np.concatenate([[end], ends_R[:-1]])
        if (wrong_R := (ends_R <= before_R) | (ends_R > manifest.num_samples)).any():
            yield f"{shard_name(first + int(wrong_R.argmax()))} has no valid number of samples"
            return
        if (wrong_R := (bytes_R > MAX_SHARD_BYTES) | (bytes_R // least < ends_R - before_R)).any():
            row = int(wrong_R.argmax())
            num_samples = ends_R[row] - before_R[row]
            yield f"{num_samples} samples cannot be in the {bytes_R[row]} bytes of {shard_name(first + row)}"
            return
        end, total = int(ends_R[-1]), total + int(bytes_R.sum())
    if end != manifest.num_samples:
        yield f"num_samples is {manifest.num_samples}, but the shards add up to {end}"
    if total != due.num_bytes:
        yield f"num_bytes is {due.num_bytes}, but the shards add up to {total}"
