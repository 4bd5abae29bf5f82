"""Read the stored bytes of samples of a dataset by index, from memory-mapped tars.

A process maps the files with an entry for each sample (`data_pipeline.storage.index`) into memory and reads only the
pages of the samples that it needs.

Guarantees:

- An index that is not the one of the manifest is refused: by the sha256 of each file up to 100 MB, which holds the
  labels of 25 million samples; of a larger file, by its size.
- A tar of another size than when it was indexed is refused.
- No sample is returned under the index of another: a member is read only from a place that the tar's own header
  confirms, with the key of the sample if `build` wrote the tar.
- Nothing is read beyond the end of a file.
- A sample that cannot be read does not stop the others.

Shapes: B samples to read, M members of a sample, S tars.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import FILE_ENTRY, NO_LABEL, BadSample, sample_key
from data_pipeline.overlays import Overlay
from data_pipeline.overlays.registry import load_overlay
from data_pipeline.remote.cache import FileCache, file_url, path_beside, read_manifest
from data_pipeline.remote.fetch import RemoteConfig, RemoteFile
from data_pipeline.storage.index import (
    HASHES_NAME,
    NUMBERS_NAME,
    SAMPLES_NAME,
    TIMES_NAME,
    OpenTar,
    labels_name,
    map_file,
)
from data_pipeline.storage.locations import MANIFEST_NAME, TARS_NAME, dataset_directory, is_remote
from data_pipeline.storage.manifest import OVERLAY_NAME, FileEntry, Manifest
from data_pipeline.storage.tar_headers import is_file_at, name_at, padded, read_contents

logger = logging.getLogger(__name__)

_MAX_OPEN_SHARDS: Final = 4_096  # Linux gives a process 65,530 mappings
_HASH_BYTES: Final = 32
_MAX_HASHED_BYTES: Final = 100_000_000  # of a file of the index that is read whole when a dataset is opened
_NUM_SURVEYED: Final = 10_000  # tars whose size is looked at before the first is read
_NUM_ATTEMPTS: Final = 5
_JSON_ROOM: Final = 1 << 16  # bytes behind a content in which its JSON is looked for
_MEND: Final = "copy the dataset again, or build or index it again"
_REMOTE: Final = RemoteConfig()


@dataclass(frozen=True)
class StoredSamples:
    """The stored bytes of some samples, in the order of the requested indices.

    Attributes:
        files: for each member, `content` and `mask`, B views into the tars. A view is empty if its index is wrong.
        unreadable: by row, the reason why a sample cannot be read.
        labels: each stored label by name, (B,) int64.
    """

    files: Mapping[str, Sequence[memoryview]]
    unreadable: Mapping[int, str]
    labels: Mapping[str, NDArray[np.int64]]


class SampleStore:
    """The samples of a dataset by index.

    A tar is mapped into memory when it is first read; a remote one is fetched first. A mapping needs no open file and
    no seek, and all readers on the machine share its pages. A process keeps the tars that it has used last; so its
    memory grows neither with the number of samples nor with the number of tars that it reads.

    Attributes:
        location: the local directory, or the remote location as given.
        remote: the settings with which a remote dataset is fetched.
        manifest: the manifest of the dataset.
        overlay: the online overlay, on the CPU; None if the dataset has none.
        members: the names of the members of a sample: `content`, and `mask` if there is one.
        tar_names: the path or URL of each tar, as the index names it.
        shard_ends: (S,) int64, the index after the last sample of each tar.
        shard_bytes: (S,) int64, the size of each tar.
        max_shards: the number of tars that the cache can hold at a time; None if it can hold all.

    Takes a `manifest` that was read already. With `surveys` it compares the files of the index and all tars at once;
    without, only the sizes of the index files, and a tar when it is first opened. Raises `UserError` if the manifest,
    the index, a tar or the overlay of a local dataset is missing or wrong.
    """

    def __init__(
        self,
        location: str | Path,
        *,
        remote: RemoteConfig = _REMOTE,
        manifest: Manifest | None = None,
        surveys: bool = True,
    ) -> None:
        self.remote, self._surveys = remote, surveys
        self.location: str | Path = str(location) if is_remote(location) else dataset_directory(location)
        self.manifest = manifest = read_manifest(self.location, config=remote) if manifest is None else manifest
        self.members = ("content", "mask") if manifest.has_mask else ("content",)
        self.tar_names = self._index_file(TARS_NAME).read_bytes().decode(errors="replace").splitlines()
        numbers_S2 = np.fromfile(self._index_file(NUMBERS_NAME), dtype="<i8").astype(np.int64).reshape(-1, 2)
        self._hashes = self._index_file(HASHES_NAME).read_bytes()
        self.shard_ends: NDArray[np.int64] = np.ascontiguousarray(numbers_S2[:, 0])
        self.shard_bytes: NDArray[np.int64] = np.ascontiguousarray(numbers_S2[:, 1])
        if not len(self.tar_names) == len(numbers_S2) == manifest.tars.num_tars:
            raise self._contradiction(TARS_NAME)
        if self.shard_ends[-1] != manifest.num_samples:
            raise self._contradiction(NUMBERS_NAME)
        self._packed_NM = self._map(SAMPLES_NAME, np.dtype("<i8"), len(self.members))
        self._labels: dict[str, NDArray[np.int32]] = {
            name: self._map(labels_name(name), np.dtype("<i4"), 1)[:, 0] for name in manifest.stored_labels
        }
        self._times_S = self._read_times()
        self._cache: FileCache | None = None
        self.max_shards: int | None = None
        if isinstance(self.location, str) or is_remote(self.tar_names[0]):
            self._cache = FileCache(str(self.location), sha256=manifest.sha256, config=remote)
            self.max_shards = self._cache.max_files(self.shard_bytes)
        self.overlay: Overlay | None = None
        if manifest.is_online:
            self.overlay = load_overlay(self.path(OVERLAY_NAME), sha256=manifest.files[OVERLAY_NAME].sha256)
        self._open: dict[int, OpenTar] = {}  # the last used at the end
        self._limit = _MAX_OPEN_SHARDS if self.max_shards is None else min(_MAX_OPEN_SHARDS, self.max_shards)
        if surveys and not self.is_remote:
            num = len(self.tar_names)
            for number in np.linspace(0, num - 1, min(num, _NUM_SURVEYED), dtype=np.int64).tolist():
                self.check_size(number)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # another process maps the tars anew

    def __len__(self) -> int:
        return self.manifest.num_samples

    @property
    def is_remote(self) -> bool:
        """Return whether tars are fetched when they are first read."""
        return self._cache is not None

    def path(self, name: str) -> Path:
        """Return the local path of a file beside the manifest, which is fetched first if the dataset is remote."""
        return path_beside(self.location, name, self.manifest, config=self.remote)

    def _index_file(self, name: str) -> Path:
        """Return the local path of a file of the index. Raises `UserError` if it is not as the manifest says."""
        entry = self.manifest.files.get(name)
        if entry is None or not (path := self.path(name)).is_file() or path.stat().st_size != entry.num_bytes:
            raise self._contradiction(name)
        if self._surveys and entry.num_bytes <= _MAX_HASHED_BYTES and FileEntry.of(path) != entry:
            raise self._contradiction(name)
        return path

    def _map(self, name: str, dtype: np.dtype[Any], num_columns: int) -> NDArray[Any]:
        path, shape = self._index_file(name), (self.manifest.num_samples, num_columns)
        if path.stat().st_size != self.manifest.num_samples * num_columns * dtype.itemsize:
            raise self._contradiction(name)
        return np.memmap(path, dtype=dtype, mode="r", shape=shape)

    def _contradiction(self, name: str) -> UserError:
        return UserError(f"{self.location}: {name} is missing or does not agree with {MANIFEST_NAME}; {_MEND}")

    def _read_times(self) -> NDArray[np.int64] | None:
        """Return when the local tars of others were changed last; None for other tars."""
        if isinstance(self.location, str) or not (path := self.path(TIMES_NAME)).is_file():
            return None
        times_S = np.fromfile(path, dtype="<i8").astype(np.int64)
        return times_S if len(times_S) == len(self.tar_names) else None

    def check_size(self, number: int) -> None:
        """Raise `UserError` if a local tar is missing or has another size than when it was indexed."""
        path, due = self.tar_path(number), int(self.shard_bytes[number])
        if not path.is_file():
            raise UserError(f"{path} is in the index {self.location}, but it is not there; {_MEND}")
        if (size := path.stat().st_size) != due:
            raise UserError(f"{path} has {size} bytes, but it had {due} when it was indexed; {_MEND}")

    def tar_path(self, number: int) -> Path:
        """Return the path of a local tar."""
        return Path(self.location, self.tar_names[number])  # which may be absolute

    def shard_name(self, number: int) -> str:
        """Return the file name of a tar."""
        return self.tar_names[number].rpartition("/")[2]

    def sha256(self, number: int) -> str | None:
        """Return the sha256 of a tar; None if the index has none."""
        return self._hashes[_HASH_BYTES * number : _HASH_BYTES * (number + 1)].hex() or None

    def samples_of(self, number: int) -> range:
        """Return the indices of the samples of a tar."""
        return range(int(self.shard_ends[number - 1]) if number else 0, int(self.shard_ends[number]))

    def samples_by_tar(self) -> dict[str, range]:
        """Return the samples of each tar by the name under which every index knows the same tar.

        A tar with a hash is known by it, and another one by its path without links.
        """
        return {
            self.sha256(number) or str(self.tar_path(number).resolve()): self.samples_of(number)
            for number in range(len(self.tar_names))
        }

    def prefetch(self, shards: Iterable[int]) -> None:
        """Fetch tars of a remote dataset in the background, in this order, in place of those that still wait."""
        if self._cache is not None:
            self._cache.prefetch(map(self._remote_tar, shards))

    def _remote_tar(self, number: int) -> tuple[str, RemoteFile]:
        """Return the name of the copy of a remote tar in the cache, and the tar."""
        url = self.tar_names[number]
        if not is_remote(url):
            url = file_url(str(self.location), url)
        return f"tar-{number:08d}.tar", RemoteFile(url, int(self.shard_bytes[number]), self.sha256(number))

    def read(self, indices: NDArray[np.int64]) -> StoredSamples:
        """Return the stored bytes of the samples at `indices`, (B,) int64, in that order.

        Raises `IndexError` below 0 and past the end, `UserError` if a tar cannot be fetched.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"samples {indices.min()} to {indices.max()} are not all among {len(self)}")
        by_shard = np.argsort(indices, kind="stable")
        shards = np.searchsorted(self.shard_ends, indices[by_shard], side="right")
        numbers, starts = np.unique(shards, return_index=True)
        views: list[list[memoryview]] = [[]] * len(indices)
        unreadable: dict[int, str] = {}
        for number, places in zip(numbers.tolist(), np.split(by_shard, starts[1:]), strict=False):
            tar = self._tar(number)
            local = indices[places] - tar.first
            offsets_BM, sizes_BM = tar.places(local)
            ends_BM = offsets_BM + sizes_BM
            for place, begins, ends in zip(places.tolist(), offsets_BM.tolist(), ends_BM.tolist(), strict=True):
                views[place] = [tar.data[begin:end] for begin, end in zip(begins, ends, strict=True)]
            for place in places[~tar.is_checked[local]].tolist():
                if (wrong := self._problem(tar, int(indices[place]))) is not None:
                    unreadable[place] = wrong
                    views[place] = [memoryview(b"")] * len(self.members)
        files = {name: [sample[number] for sample in views] for number, name in enumerate(self.members)}
        return StoredSamples(files, unreadable, self.labels(indices))

    def labels(self, indices: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Return each stored label of samples by name, (B,) int64; `NO_LABEL` for a sample without it. Reads no tar."""
        found: dict[str, NDArray[np.int64]] = {}
        for name, label_N in self._labels.items():
            label_B = label_N[indices].astype(np.int64)
            label_B[(label_B < 0) | (label_B >= len(self.manifest.labels[name].classes))] = NO_LABEL
            found[name] = label_B
        return found

    def bad_sample(self, index: int, reason: str) -> BadSample:
        return BadSample(index, self.shard_name(self._shard_of(index)), reason)

    def file_of(self, index: int) -> str:
        """Return the name of the file of a sample: in a tar of `build` the one from which it was made.

        That stands in `KEY.json`, before or behind the content. If there is none, as for a generated sample and in
        other tars, it is the name of the content.
        """
        tar, key = self._tar(self._shard_of(index)), sample_key(index)
        first = index == tar.first
        offsets_2M, sizes_2M = tar.places(np.array([index - tar.first - (not first), index - tar.first]))
        begin, end = (offsets_2M + sizes_2M).max(axis=1).tolist()
        found = ""
        if self.manifest.tars.numbered:
            around = tar.data[0 if first else padded(begin) : end + _JSON_ROOM]
            beside = (each for each in read_contents(around).members if each.name == f"{key}.json")
            found = next((_file_in(around[each.offset : each.offset + each.size]) for each in beside), "")
        return found or name_at(tar.data, offset=int(offsets_2M[1, 0]))

    def _shard_of(self, index: int) -> int:
        return bisect_right(self.shard_ends, index)  # for one number faster than NumPy's own

    def _problem(self, tar: OpenTar, index: int) -> str | None:
        """Compare the place of a sample with the headers in its tar. Return the first difference, or None.

        A sample is checked once while its tar is open.
        """
        start = b"%s." % sample_key(index).encode() if self.manifest.tars.numbered else b""
        offsets_1M, sizes_1M = tar.places(np.array([index - tar.first]))
        for offset, size in zip(offsets_1M[0].tolist(), sizes_1M[0].tolist(), strict=True):
            if not is_file_at(tar.data, offset=offset, size=size, start=start):
                return (
                    f"its index says that {start.decode()} of {size} bytes begins at {offset}, and the tar says "
                    "otherwise"
                )
        tar.is_checked[index - tar.first] = True
        return None

    def _tar(self, number: int) -> OpenTar:
        """Return one tar; open it if it is not open. Threads may call this at the same time."""
        tar = self._open.get(number)
        if tar is None:
            tar = self._open[number] = self._opened(number)
            self._close_unused()
        elif 2 * len(self._open) > self._limit and self._open.pop(number, None) is not None:
            self._open[number] = tar  # now the last used
        return tar

    def _opened(self, number: int) -> OpenTar:
        """Map one tar; fetch it first if it is remote. Raises `UserError` if it is missing or has another size."""
        if self._cache is None:
            self.check_size(number)
            path = self.tar_path(number)
            if self._times_S is not None and path.stat().st_mtime_ns != self._times_S[number]:
                logger.warning("%s was written again after it was indexed; index it again, to be sure of it", path)
            return self._mapped(number, path)
        for _ in range(_NUM_ATTEMPTS):
            with suppress(FileNotFoundError):  # another process has evicted it
                return self._mapped(number, self._cache.path(*self._remote_tar(number)))
        raise UserError(
            f"{self.tar_names[number]} was removed {_NUM_ATTEMPTS} times before it could be read; raise "
            "data.remote.cache_gigabytes"
        )

    def _mapped(self, number: int, path: Path) -> OpenTar:
        samples = self.samples_of(number)
        packed_NM = self._packed_NM[samples.start : samples.stop]
        return OpenTar(path, map_file(path), samples.start, packed_NM, np.zeros(len(samples), dtype=np.bool_))

    def _close_unused(self) -> None:
        """Unmap the tars that the cache has evicted, which frees their disk space, and the least recently used."""
        opened = list(self._open.items())
        gone = [number for number, tar in opened if not tar.path.exists()] if self.is_remote else []
        kept = [number for number, _ in opened if number not in gone]
        for number in gone + kept[: -self._limit]:
            self._open.pop(number, None)


def _file_in(labels: memoryview) -> str:
    """Return the file in the JSON of a sample; "" if there is none."""
    with suppress(ValueError):  # damaged
        entries = json.loads(bytes(labels))
        return str(entries.get(FILE_ENTRY, "")) if isinstance(entries, dict) else ""
    return ""
