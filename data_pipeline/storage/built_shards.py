"""The shards of a dataset that `build` wrote, local or remote, and their indexes.

A shard lies in its directory or, if it is remote, in the cache. Its index is compared with the manifest when it is
opened for the first time, and made again from the tar if it is missing or wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BadSample, sample_key
from data_pipeline.remote.cache import RemoteShards
from data_pipeline.storage.files import regular_size
from data_pipeline.storage.manifest import MAX_LISTED_SHARDS, Manifest
from data_pipeline.storage.open_shard import OpenShard, map_file, open_before_eviction
from data_pipeline.storage.shard_list import open_shard_list
from data_pipeline.storage.shards import MISSING, index_path, index_row_bytes, load_index, map_index
from data_pipeline.storage.tar_headers import is_member_at

logger = logging.getLogger(__name__)

_MEND = "copy it again or build the dataset again"
_MIN_SHARE = 0.1  # of a local dataset that must be whole: the list of its bad samples takes memory
_NUM_SURVEYED = 1_000  # shards of a dataset that has more than `MAX_LISTED_SHARDS`


class BuiltShards:
    """The shards of a built dataset; see `data_pipeline.storage.open_shard.Shards`.

    `files` is a local directory, or the cache of a remote dataset.
    """

    def __init__(self, files: Path | RemoteShards, manifest: Manifest) -> None:
        self._files, self._manifest = files, manifest
        self.members = manifest.members
        self._entries = open_shard_list(files, manifest) if isinstance(files, Path) else files.shards
        max_bytes = manifest.max_member_bytes
        self._max_bytes = [(extension.encode(), max_bytes[extension]) for extension in self.members]
        # Indexes that had to be made from the tars, and cannot be saved beside them.
        self._unsaved: dict[int, NDArray[np.int64]] = {}
        self._is_trusted: NDArray[np.bool_] = np.zeros(len(self._entries), dtype=np.bool_)

    @property
    def shard_ends(self) -> NDArray[np.int64]:
        return self._entries.ends

    @property
    def shard_bytes(self) -> NDArray[np.int64]:
        return self._entries.num_bytes

    @property
    def max_shards(self) -> int | None:
        return None if isinstance(self._files, Path) else self._files.max_shards

    @property
    def is_remote(self) -> bool:
        return not isinstance(self._files, Path)

    @property
    def _location(self) -> str | Path:
        return self._files if isinstance(self._files, Path) else self._files.location

    def name(self, number: int) -> str:
        return self._entries.name(number)

    def prefetch(self, numbers: Iterable[int]) -> None:
        if not isinstance(self._files, Path):
            self._files.prefetch(self.name(number) for number in numbers)

    def labels(self, indices_B: NDArray[np.int64]) -> None:
        return None

    def open(self, number: int) -> OpenShard:
        """Map one shard; fetch it first if it is remote. Raises `UserError` if it is missing or cannot be fetched."""
        name = self.name(number)
        num_samples = self._entries[number].num_samples
        if isinstance(self._files, Path) and regular_size(self._files / name) is None:
            raise self._is_missing(self._files / name)

        def open_once() -> OpenShard:
            path = self._path(name)
            data, rows = map_file(path), self._rows(number, path)
            first = int(self.shard_ends[number]) - num_samples
            return OpenShard(path, data, first, rows, np.zeros(num_samples, dtype=np.bool_))

        return open_before_eviction(open_once, what=f"{name} of {self._location}", mend=_MEND)

    def _path(self, name: str) -> Path:
        return self._files / name if isinstance(self._files, Path) else self._files.path(name)

    def _rows(self, number: int, path: Path) -> NDArray[np.int64]:
        """Return the index of a shard. Its file is compared with the manifest when it is opened for the first time."""
        if (unsaved := self._unsaved.get(number)) is not None:
            return unsaved
        entry, end = self._entries[number], int(self.shard_ends[number])
        if self._is_trusted[number] and (mapped := map_index(path, entry, members=self.members)) is not None:
            return mapped
        num_bytes = path.stat().st_size
        if num_bytes != entry.num_bytes:
            logger.warning("%s has %d bytes but the manifest says %d; %s", path, num_bytes, entry.num_bytes, _MEND)
        due = range(end - entry.num_samples, end)
        rows, self._is_trusted[number] = load_index(path, entry, members=self.members, due=due)
        if not self._is_trusted[number]:
            self._unsaved[number] = rows
        return rows

    def problem(self, shard: OpenShard, index: int) -> str | None:
        """Compare the index of a sample with the headers in its tar. Return the first difference, or None."""
        key, row = b"%08d." % index, iter(shard.row(index))
        for (extension, max_bytes), offset, size in zip(self._max_bytes, row, row, strict=True):
            if offset == MISSING:
                continue
            if not is_member_at(shard.data, name=key + extension, offset=offset, size=size):
                return f"its shard's index and the tar disagree about where {(key + extension).decode()} is"
            if size > max_bytes:
                return f"{(key + extension).decode()} has {size} bytes, but at most {max_bytes} are allowed"
        return None

    def missing(self, shard: OpenShard, index: int) -> str:
        """Return the reason why a sample is not whole in its shard; an empty text if it is."""
        offsets = shard.row(index)[::2]
        missing = [
            f"{sample_key(index)}.{name}" for name, at in zip(self.members, offsets, strict=True) if at == MISSING
        ]
        return f"the shard holds no whole {' and no whole '.join(missing)}" if missing else ""

    def file_name(self, shard: OpenShard, index: int) -> str:
        return ""  # the files of a sample are named by its key

    def survey(self) -> tuple[BadSample, ...]:
        """Look at the size of each local shard. Return the samples that are not whole; () if the shards are remote.

        Shards whose index is missing are indexed here, before worker processes begin, and so are shards of another
        size than in the manifest. All others are opened when they are first read. Of more than 100,000 shards, only
        1,000 are looked at, which lie evenly among them.
        """
        if not isinstance(self._files, Path):
            return ()
        num = len(self._entries)
        numbers_L = np.linspace(0, num - 1, num if num <= MAX_LISTED_SHARDS else _NUM_SURVEYED, dtype=np.int64)
        num_samples_L = self.shard_ends[numbers_L] - np.where(numbers_L > 0, self.shard_ends[numbers_L - 1], 0)
        due_L = self.shard_bytes[numbers_L]
        index_bytes_L = index_row_bytes(self.members) * num_samples_L
        paths = [self._files / self.name(number) for number in numbers_L.tolist()]
        sizes = [regular_size(path) for path in paths]
        for path, size in zip(paths, sizes, strict=True):
            if size is None:
                raise self._is_missing(path)
        found, due = sum(size or 0 for size in sizes), int(due_L.sum())
        if found < _MIN_SHARE * due:
            raise UserError(f"{self._files} holds only {found} of the {due} bytes that its manifest lists; {_MEND}")
        bad: list[BadSample] = []
        for row, (path, size) in enumerate(zip(paths, sizes, strict=True)):
            if size == due_L[row] and regular_size(index_path(path)) == index_bytes_L[row]:
                continue
            shard = self.open(int(numbers_L[row]))
            is_whole = (shard.rows[np.arange(num_samples_L[row])] != MISSING).all(axis=1)
            for index in (shard.first + np.flatnonzero(~is_whole)).tolist():
                bad.append(BadSample(index, path.name, self.missing(shard, index)))
        num_samples = int(num_samples_L.sum())
        if num_samples - len(bad) < _MIN_SHARE * num_samples:
            raise UserError(
                f"{self._files} holds only {num_samples - len(bad)} of the {num_samples} samples that its manifest "
                f"lists; {_MEND}"
            )
        return tuple(bad)

    def _is_missing(self, path: Path) -> UserError:
        return UserError(f"{path} is in the manifest, but it is missing or not a regular file; {_MEND}")
