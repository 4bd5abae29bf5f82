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
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from data_pipeline.storage.files import regular_size
from data_pipeline.storage.manifest import OVERLAY_NAME, Manifest, load_manifest
from data_pipeline.storage.shards import MISSING, EncodedSample, index_num_bytes, index_path, load_index, map_index
from data_pipeline.storage.tar_headers import is_member_at

logger = logging.getLogger(__name__)

_MEND = "copy it again or build the dataset again"
_NUM_ATTEMPTS = 5
_MAX_OPEN_SHARDS = 4_096  # each takes two mappings, and Linux gives a process 65,530 of them
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


@dataclass(frozen=True)
class _OpenShard:
    """A shard in memory.

    Attributes:
        first: the index of its first sample.
        rows: (num_samples, 2 * num_members) int64, offset and size of each member.
        is_checked: (num_samples,) bool, whether the tar's headers were compared with `rows`.
    """

    path: Path
    data: memoryview
    first: int
    rows: NDArray[np.int64]
    is_checked: NDArray[np.bool_]


class SampleStore:
    """The samples of a dataset by index.

    A shard and its index are mapped into memory when they are first read; a remote shard is fetched first. A mapping
    needs no open file and no seek, and all readers on the machine share its pages. A process keeps the shards that it
    has used last; so its memory grows neither with the number of samples nor with the number of shards that it reads.

    Attributes:
        location: the local directory, or the remote location as given.
        manifest: the manifest of the dataset.
        overlay: the online overlay, on the CPU; None if the dataset has none.
        known_bad: samples that are not whole in local shards whose size is not that in the manifest; () if remote.
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
        num_samples_S = np.fromiter((entry.num_samples for entry in self.manifest.shards), dtype=np.int64)
        self.shard_ends: NDArray[np.int64] = np.cumsum(num_samples_S)
        max_bytes = self.manifest.max_member_bytes
        self._max_bytes = [(extension.encode(), max_bytes[extension]) for extension in self._members]
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        # Indexes that had to be made from the tars, and cannot be saved beside them.
        self._unsaved: dict[int, NDArray[np.int64]] = {}
        self._is_trusted: NDArray[np.bool_] = np.zeros(len(num_samples_S), dtype=np.bool_)
        self.known_bad: tuple[BadSample, ...] = ()
        if isinstance(self._files, _LocalFiles):
            self.known_bad = self._survey(self._files)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # another process maps the shards anew

    def __len__(self) -> int:
        return self.manifest.num_samples

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
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not one of {len(self)}")
        shard = self._shard(self._shard_of(index))
        if not shard.is_checked[index - shard.first] and (wrong := self._check(index, shard)) is not None:
            raise UserError(f"{self.location}: sample {sample_key(index)} cannot be read ({wrong}); {_MEND}")
        row = shard.rows[index - shard.first].tolist()
        members = {
            extension: bytes(shard.data[offset : offset + size])
            for extension, offset, size in zip(self._members, row[::2], row[1::2], strict=True)
            if offset != MISSING
        }
        return EncodedSample(index, members)

    def read(self, indices: NDArray[np.int64]) -> StoredSamples:
        """Return the stored bytes of the samples at `indices`, (B,) int64, in that order.

        Raises `IndexError` below 0 and past the end, `UserError` if a shard cannot be fetched.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"samples {indices.min()} to {indices.max()} are not all among {len(self)}")
        by_shard = np.argsort(indices, kind="stable")
        numbers, starts = np.unique(self._shards_of(indices[by_shard]), return_index=True)
        views: list[list[memoryview]] = [[]] * len(indices)
        unreadable: dict[int, str] = {}
        for number, places in zip(numbers.tolist(), np.split(by_shard, starts[1:]), strict=False):
            shard = self._shard(number)
            local = indices[places] - shard.first
            rows = shard.rows[local]
            # A member that is missing becomes an empty view.
            for place, row in zip(places.tolist(), rows.tolist(), strict=True):
                views[place] = [shard.data[at : at + size] for at, size in zip(row[::2], row[1::2], strict=True)]
            for place in places[~shard.is_checked[local]].tolist():
                if (wrong := self._check(int(indices[place]), shard)) is not None:
                    unreadable[place] = wrong
                    views[place] = [memoryview(b"")] * len(self._members)
            for place in places[(rows[:, ::2] == MISSING).any(axis=1)].tolist():
                unreadable[place] = self._missing_members(int(indices[place]), shard)
        files = {name: [sample[number] for sample in views] for number, name in enumerate(self._members)}
        return StoredSamples(files, unreadable)

    def bad_sample(self, index: int, reason: str) -> BadSample:
        return BadSample(index, self.manifest.shards[self._shard_of(index)].name, reason)

    def _shard_of(self, index: int) -> int:
        return int(np.searchsorted(self.shard_ends, index, side="right"))

    def _shards_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.shard_ends, indices, side="right")

    def _missing_members(self, index: int, shard: _OpenShard) -> str:
        """Return the reason why a sample is not whole in its shard; an empty text if it is."""
        offsets = shard.rows[index - shard.first, ::2].tolist()
        missing = [
            f"{sample_key(index)}.{name}" for name, at in zip(self._members, offsets, strict=True) if at == MISSING
        ]
        return f"the shard holds no whole {' and no whole '.join(missing)}" if missing else ""

    def _check(self, index: int, shard: _OpenShard) -> str | None:
        """Compare the index of a sample with the headers in its tar. Return the first difference, or None.

        A sample without a difference is not checked again while its shard is open.
        """
        key, row = b"%08d." % index, iter(shard.rows[index - shard.first].tolist())
        for (extension, max_bytes), offset, size in zip(self._max_bytes, row, row, strict=True):
            if offset == MISSING:
                continue
            if not is_member_at(shard.data, name=key + extension, offset=offset, size=size):
                return f"its shard's index and the tar disagree about where {(key + extension).decode()} is"
            if size > max_bytes:
                return f"{(key + extension).decode()} has {size} bytes, but at most {max_bytes} are allowed"
        shard.is_checked[index - shard.first] = True
        return None

    def _survey(self, files: _LocalFiles) -> tuple[BadSample, ...]:
        """Look at the size of each shard of a local dataset. Return the samples that are not whole.

        Shards whose index is missing are indexed here, before worker processes begin, and so are shards of another
        size than in the manifest. All others are opened when they are first read.
        """
        entries = self.manifest.shards
        sizes = []
        for entry in entries:
            path = files.path(entry.name)
            size = regular_size(path)
            if size is None:
                raise UserError(f"{path} is in the manifest, but it is missing or not a regular file; {_MEND}")
            sizes.append(size)
        due = sum(entry.num_bytes for entry in entries)
        if sum(sizes) < _MIN_SHARE * due:
            raise UserError(
                f"{self.location} holds only {sum(sizes)} of the {due} bytes that its manifest lists; {_MEND}"
            )
        bad: list[BadSample] = []
        for number, (entry, size) in enumerate(zip(entries, sizes, strict=True)):
            path = files.path(entry.name)
            if size == entry.num_bytes and regular_size(index_path(path)) == index_num_bytes(entry, self._members):
                continue
            shard = self._shard(number)
            for row in np.flatnonzero((shard.rows == MISSING).any(axis=1)).tolist():
                bad.append(self.bad_sample(shard.first + row, self._missing_members(shard.first + row, shard)))
        num_whole = len(self) - len(bad)
        if num_whole < _MIN_SHARE * len(self):
            raise UserError(
                f"{self.location} holds only {num_whole} of the {len(self)} samples that its manifest lists; {_MEND}"
            )
        return tuple(bad)

    def _shard(self, number: int) -> _OpenShard:
        """Return one shard; fetch, map and index it if it is not open."""
        if (shard := self._open.get(number)) is not None:
            self._open.move_to_end(number)
            return shard
        entry = self.manifest.shards[number]
        for _ in range(_NUM_ATTEMPTS):
            path = self._files.path(entry.name)
            try:
                data = _map_file(path)
                rows = self._rows_of(number, path)
            except FileNotFoundError:
                continue  # another process has just evicted it
            first = int(self.shard_ends[number]) - entry.num_samples
            self._open[number] = _OpenShard(path, data, first, rows, np.zeros(entry.num_samples, dtype=np.bool_))
            self._close_unused()
            return self._open[number]
        raise UserError(
            f"{entry.name} of {self.location} was removed {_NUM_ATTEMPTS} times before it could be read; {_MEND}"
        )

    def _rows_of(self, number: int, path: Path) -> NDArray[np.int64]:
        """Return the index of a shard. Its file is compared with the manifest when it is opened for the first time."""
        if (unsaved := self._unsaved.get(number)) is not None:
            return unsaved
        entry, end = self.manifest.shards[number], int(self.shard_ends[number])
        if self._is_trusted[number] and (mapped := map_index(path, entry, members=self._members)) is not None:
            return mapped
        num_bytes = path.stat().st_size
        if num_bytes != entry.num_bytes:
            logger.warning("%s has %d bytes but the manifest says %d; %s", path, num_bytes, entry.num_bytes, _MEND)
        due = range(end - entry.num_samples, end)
        rows, self._is_trusted[number] = load_index(path, entry, members=self._members, due=due)
        if not self._is_trusted[number]:
            self._unsaved[number] = rows
        return rows

    def _close_unused(self) -> None:
        """Unmap the shards that the cache has evicted, which frees their disk space, and the least recently used."""
        limit = _MAX_OPEN_SHARDS
        if not isinstance(self._files, _LocalFiles):
            limit = min(limit, max(1, self._files.max_shards or limit))
            for number in [number for number, shard in self._open.items() if not shard.path.exists()]:
                del self._open[number]
        while len(self._open) > limit:
            self._open.popitem(last=False)


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
