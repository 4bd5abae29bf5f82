"""Read the stored bytes of samples of a dataset by index, from memory-mapped shards.

Guarantees:

- No sample is returned under the index of another: when a sample is first read, its key is compared with the tar's own
  headers.
- Nothing is read beyond the end of a file, even if the file is too short.
- No member is returned that is larger than the manifest allows.
- A sample that cannot be read does not stop the others.

Shapes: B samples to read.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BadSample, sample_key
from data_pipeline.overlays import Overlay
from data_pipeline.overlays.registry import load_overlay
from data_pipeline.remote.cache import RemoteConfig, RemoteShards, is_remote
from data_pipeline.storage.manifest import OVERLAY_NAME, Manifest, load_manifest
from data_pipeline.storage.shards import MISSING, EncodedSample, is_member_at, load_index

logger = logging.getLogger(__name__)

_MEND = "copy it again or build the dataset again"
_NUM_ATTEMPTS = 5
_MIN_SHARE = 0.1  # of a local dataset that must be whole: the list of its bad samples takes memory
_REMOTE = RemoteConfig()


@dataclass(frozen=True)
class StoredSamples:
    """The stored bytes of some samples, in the order of the requested indices.

    Attributes:
        files: for each extension in `Manifest.members`, B views into the shards. A view is empty if its member is
            missing or its index is wrong.
        unreadable: by row, the reason why a sample cannot be read.
    """

    files: Mapping[str, Sequence[memoryview]]
    unreadable: Mapping[int, str]


class _Files(Protocol):
    """The files of a dataset on this machine. `max_shards` shards can be there at a time (None: all)."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def max_shards(self) -> int | None: ...

    def path(self, name: str) -> Path: ...

    def prefetch(self, names: Iterable[str]) -> None: ...


@dataclass(frozen=True)
class _LocalFiles:
    directory: Path
    manifest: Manifest
    max_shards: None = None

    def path(self, name: str) -> Path:
        return self.directory / name

    def prefetch(self, names: Iterable[str]) -> None:
        pass  # nothing to fetch


class SampleStore:
    """The samples of a dataset by index.

    A shard is mapped into memory when it is first read; a remote shard is fetched first. A mapping needs no open file
    and no seek, and all readers on the machine share its pages.

    Attributes:
        location: the local directory, or the remote location as given.
        manifest: the manifest of the dataset.
        overlay: the online overlay, on the CPU; None if the dataset has none.
        known_bad: samples that are not whole in the local shards, found from the indexes alone; () if remote.
        shard_ends: (num_shards,) int64, the index after the last sample of each shard.

    A `manifest` that was read already is not read again. Raises `UserError` if the manifest, a shard or the overlay of
    a local dataset is missing, or if fewer than a tenth of its bytes or of its samples are there.
    """

    def __init__(
        self, location: str | Path, *, remote: RemoteConfig = _REMOTE, manifest: Manifest | None = None
    ) -> None:
        self.location: str | Path
        self._files: _Files
        if is_remote(location):
            self.location = str(location)
            self._files = RemoteShards(self.location, config=remote, manifest=manifest)
        else:
            self.location = Path(location)
            self._files = _LocalFiles(self.location, manifest or load_manifest(self.location))
        self.manifest: Manifest = self._files.manifest
        self.overlay: Overlay | None = None
        if self.manifest.overlay is not None and self.manifest.is_online:
            self.overlay = load_overlay(self._files.path(OVERLAY_NAME), sha256=self.manifest.overlay.sha256)
        self._members = self.manifest.members
        self._ends = list(accumulate(entry.num_samples for entry in self.manifest.shards))
        self.shard_ends: NDArray[np.int64] = np.array(self._ends, dtype=np.int64)
        num_samples = self._ends[-1] if self._ends else 0
        # Offset and size of each member of each sample. Until a shard is indexed these are zeros, which take no memory.
        self._rows = np.zeros((num_samples, 2 * len(self._members)), dtype=np.int64)
        self._is_indexed = [False] * len(self._ends)
        # Whether the tar's headers were compared with `_rows`, for each sample.
        self._is_checked: NDArray[np.bool_] = np.zeros(num_samples, dtype=np.bool_)
        max_bytes = self.manifest.max_member_bytes
        self._max_bytes = [(extension.encode(), max_bytes[extension]) for extension in self._members]
        self._mapped: dict[int, tuple[Path, memoryview]] = {}
        self.known_bad: tuple[BadSample, ...] = ()
        if isinstance(self._files, _LocalFiles):
            self.known_bad = self._index_all([self._files.path(entry.name) for entry in self.manifest.shards])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": {}}  # another process maps the shards anew

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def max_shards(self) -> int | None:
        """Return the number of shards that the cache can hold at a time; None if it can hold all."""
        return self._files.max_shards

    def prefetch(self, shards: Iterable[int]) -> None:
        """Fetch shards of a remote dataset in the background, in this order, in place of those that still wait."""
        self._files.prefetch(self.manifest.shards[shard].name for shard in shards)

    def encoded(self, index: int) -> EncodedSample:
        """Return the stored bytes of one sample. A member that the shard lacks is left out.

        Raises `IndexError` if there is no such sample, and `UserError` if the shard's index is wrong.
        """
        if not 0 <= index < len(self._rows):
            raise IndexError(f"there is no sample {index}; the dataset has {len(self._rows)}")
        data = self._map_shard(self._shard_of(index))
        if not self._is_checked[index] and (wrong := self._check(index, data)) is not None:
            raise UserError(f"{self.location}: sample {sample_key(index)} cannot be read ({wrong}); {_MEND}")
        row = self._rows[index].tolist()
        members = {
            extension: bytes(data[offset : offset + size])
            for extension, offset, size in zip(self._members, row[::2], row[1::2], strict=True)
            if offset != MISSING
        }
        return EncodedSample(index, members)

    def read(self, indices: NDArray[np.int64]) -> StoredSamples:
        """Return the stored bytes of the samples at `indices`, (B,) int64, in that order.

        Raises `IndexError` if there is no such sample, and `UserError` if a shard cannot be fetched.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(
                f"samples {indices.min()} to {indices.max()} do not all exist; the dataset has {len(self)}"
            )
        shards = np.searchsorted(self.shard_ends, indices, side="right")
        data = {shard: self._map_shard(shard) for shard in np.unique(shards).tolist()}
        # A member that is missing becomes an empty view.
        views = [
            [view[offset : offset + size] for offset, size in zip(row[::2], row[1::2], strict=True)]
            for view, row in zip(map(data.__getitem__, shards.tolist()), self._rows[indices].tolist(), strict=True)
        ]
        unreadable: dict[int, str] = {}
        for row in np.flatnonzero(~self._is_checked[indices]).tolist():
            if (wrong := self._check(int(indices[row]), data[int(shards[row])])) is not None:
                unreadable[row] = wrong
                views[row] = [memoryview(b"")] * len(self._members)
        for row in np.flatnonzero((self._rows[indices, ::2] == MISSING).any(axis=1)).tolist():
            unreadable[row] = self._missing_members(int(indices[row]))
        files = {name: [sample[number] for sample in views] for number, name in enumerate(self._members)}
        return StoredSamples(files, unreadable)

    def bad_sample(self, index: int, reason: str) -> BadSample:
        return BadSample(index, self.manifest.shards[self._shard_of(index)].name, reason)

    def _shard_of(self, index: int) -> int:
        return bisect_right(self._ends, index)

    def _missing_members(self, index: int) -> str:
        """Return a sentence about the members that a sample lacks in its shard; an empty text if it lacks none."""
        offsets = self._rows[index, ::2].tolist()
        missing = [
            f"{sample_key(index)}.{name}" for name, at in zip(self._members, offsets, strict=True) if at == MISSING
        ]
        return f"the shard holds no whole {' and no whole '.join(missing)}" if missing else ""

    def _check(self, index: int, data: memoryview) -> str | None:
        """Compare the index of a sample with the headers in its tar, `data`. Return the first difference, or None.

        Marks a sample without a difference as checked.
        """
        key, row = b"%08d." % index, iter(self._rows[index].tolist())
        for (extension, max_bytes), offset, size in zip(self._max_bytes, row, row, strict=True):
            if offset == MISSING:
                continue
            if not is_member_at(data, name=key + extension, offset=offset, size=size):
                return f"its shard's index and the tar disagree about where {(key + extension).decode()} is"
            if size > max_bytes:
                return f"{(key + extension).decode()} has {size} bytes, but at most {max_bytes} are allowed"
        self._is_checked[index] = True
        return None

    def _index_all(self, paths: Sequence[Path]) -> tuple[BadSample, ...]:
        """Load the index of all shards of a local dataset. Return the samples that are not whole in them."""
        for path in paths:
            if not path.is_file():
                raise UserError(f"{path} is in the manifest, but it is missing or not a regular file; {_MEND}")
        num_bytes, due = sum(path.stat().st_size for path in paths), sum(e.num_bytes for e in self.manifest.shards)
        if num_bytes < _MIN_SHARE * due:
            raise UserError(
                f"{self.location} holds only {num_bytes} of the {due} bytes that its manifest lists; {_MEND}"
            )
        not_whole: list[NDArray[np.int64]] = []
        for shard, path in enumerate(paths):
            rows = self._load_rows(shard, path)
            not_whole.append(np.flatnonzero((rows == MISSING).any(axis=1)) + self._ends[shard] - len(rows))
        num_whole = len(self) - sum(map(len, not_whole))
        if num_whole < _MIN_SHARE * len(self):
            raise UserError(
                f"{self.location} holds only {num_whole} of the {len(self)} samples that its manifest lists; {_MEND}"
            )
        indices = [index for found in not_whole for index in found.tolist()]
        return tuple(self.bad_sample(index, self._missing_members(index)) for index in indices)

    def _load_rows(self, shard: int, path: Path) -> NDArray[np.int64]:
        entry = self.manifest.shards[shard]
        num_bytes = path.stat().st_size
        if num_bytes != entry.num_bytes:
            logger.warning("%s has %d bytes but the manifest says %d; %s", path, num_bytes, entry.num_bytes, _MEND)
        end = self._ends[shard]
        due = range(end - entry.num_samples, end)
        rows = self._rows[due.start : end]
        rows[:] = load_index(path, entry, members=self._members, due=due)
        self._is_indexed[shard] = True
        return rows

    def _map_shard(self, shard: int) -> memoryview:
        """Return the bytes of one shard; fetch and index it if it was not read before."""
        if (mapped := self._mapped.get(shard)) is not None:
            return mapped[1]
        name = self.manifest.shards[shard].name
        for _ in range(_NUM_ATTEMPTS):
            path = self._files.path(name)
            try:
                data = _map_file(path)
                if not self._is_indexed[shard]:
                    self._load_rows(shard, path)
            except FileNotFoundError:
                continue  # another process has just evicted it
            self._mapped[shard] = (path, data)
            self._unmap_unused()
            return data
        raise UserError(f"{name} of {self.location} was removed {_NUM_ATTEMPTS} times before it could be read; {_MEND}")

    def _unmap_unused(self) -> None:
        """Unmap the shards that the cache has evicted, which frees their disk space, and the oldest above
        `max_shards`."""
        if isinstance(self._files, _LocalFiles):
            return
        mapped = list(self._mapped.items())
        gone = [shard for shard, (path, _) in mapped if not path.exists()]
        kept = [shard for shard, _ in mapped if shard not in gone]
        limit = max(1, self._files.max_shards or len(kept))
        for shard in gone + kept[:-limit]:
            self._mapped.pop(shard, None)


def _map_file(path: Path) -> memoryview:
    """Map a file copy-on-write, so that writing to the memory does not change the file. Leaves no descriptor open."""
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        return memoryview(bytearray())
    try:
        mapped = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None
    return mapped.numpy().data
