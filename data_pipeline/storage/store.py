"""Read the stored bytes of samples of a dataset by index, from memory-mapped tars.

Guarantees:

- No sample is returned under the index of another: when a sample is first read, its place is compared with the tar's
  own headers (`data_pipeline.storage.index`).
- Nothing is read beyond the end of a file.
- A sample that cannot be read does not stop the others.

Shapes: B samples to read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import printable
from data_pipeline.core.sample import BadSample
from data_pipeline.overlays import Overlay
from data_pipeline.overlays.registry import load_overlay
from data_pipeline.remote.cache import RemoteConfig, fetch_manifest, is_remote
from data_pipeline.storage.index import Index, OpenTar
from data_pipeline.storage.locations import dataset_directory
from data_pipeline.storage.manifest import OVERLAY_NAME, Manifest, load_manifest

_MAX_OPEN_SHARDS: Final = 4_096  # Linux gives a process 65,530 mappings
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
        index: the index of its tars.

    A `manifest` that was read already is not read again. Unless it `surveys` the tars, a tar that is missing or has
    another size is noticed when it is opened. Raises `UserError` if the manifest, the index, a tar or the
    overlay of a local dataset is missing or wrong.
    """

    def __init__(
        self,
        location: str | Path,
        *,
        remote: RemoteConfig = _REMOTE,
        manifest: Manifest | None = None,
        surveys: bool = True,
    ) -> None:
        self.remote = remote
        self.location: str | Path = str(location) if is_remote(location) else dataset_directory(location)
        if manifest is None:
            is_local = isinstance(self.location, Path)
            manifest = load_manifest(self.location) if is_local else fetch_manifest(str(location), config=remote)
        self.manifest = manifest
        self.index = Index(self.location, manifest, remote=remote)
        self.overlay: Overlay | None = None
        if manifest.overlay is not None and manifest.is_online:
            self.overlay = load_overlay(self.index.path(OVERLAY_NAME), sha256=manifest.files[OVERLAY_NAME].sha256)
        self._open: dict[int, OpenTar] = {}  # the last used at the end
        self._limit = _MAX_OPEN_SHARDS if self.max_shards is None else min(_MAX_OPEN_SHARDS, max(1, self.max_shards))
        if surveys:
            self.index.survey()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # another process maps the tars anew

    def __len__(self) -> int:
        return self.manifest.num_samples

    @property
    def shard_ends(self) -> NDArray[np.int64]:
        """Return the index after the last sample of each tar, (num_shards,) int64."""
        return self.index.shard_ends

    @property
    def shard_bytes(self) -> NDArray[np.int64]:
        """Return the size of each tar in bytes, (num_shards,) int64."""
        return self.index.shard_bytes

    @property
    def max_shards(self) -> int | None:
        """Return the number of tars that the cache can hold at a time; None if it can hold all."""
        return self.index.max_shards

    @property
    def is_remote(self) -> bool:
        """Return whether tars are fetched when they are first read."""
        return self.index.is_remote

    def prefetch(self, shards: Iterable[int]) -> None:
        """Fetch tars of a remote dataset in the background, in this order, in place of those that still wait."""
        self.index.prefetch(shards)

    def shard_name(self, number: int) -> str:
        """Return the file name of a tar."""
        return self.index.names[number].rpartition("/")[2]

    def read(self, indices: NDArray[np.int64]) -> StoredSamples:
        """Return the stored bytes of the samples at `indices`, (B,) int64, in that order.

        Raises `IndexError` below 0 and past the end, `UserError` if a tar cannot be fetched.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"samples {indices.min()} to {indices.max()} are not all among {len(self)}")
        by_shard = np.argsort(indices, kind="stable")
        shards = np.searchsorted(self.shard_ends, indices[by_shard], side="right")
        numbers, starts = np.unique(shards, return_index=True)
        members = self.index.members
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
                    views[place] = [memoryview(b"")] * len(members)
        files = {name: [sample[number] for sample in views] for number, name in enumerate(members)}
        return StoredSamples(files, unreadable, self.labels(indices))

    def labels(self, indices: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Return each stored label of samples by name, (B,) int64. Reads no tar."""
        return self.index.labels(indices)

    def bad_sample(self, index: int, reason: str) -> BadSample:
        return BadSample(index, self.shard_name(self._shard_of(index)), reason)

    def undecoded(self, index: int, reason: str) -> BadSample:
        """Return a sample whose bytes could be read and do not decode, with the name of its file."""
        name = self.index.file_name(self._tar(self._shard_of(index)), index)
        return self.bad_sample(index, f"{printable(name)}: {reason}")

    def _shard_of(self, index: int) -> int:
        return bisect_right(self.shard_ends, index)  # for one number faster than NumPy's own

    def _problem(self, tar: OpenTar, index: int) -> str | None:
        """Return why a sample cannot be read, or None. A sample is checked once while its tar is open."""
        wrong = self.index.problem(tar, index)
        tar.is_checked[index - tar.first] = wrong is None
        return wrong

    def _tar(self, number: int) -> OpenTar:
        """Return one tar; open it if it is not open. Threads may call this at the same time."""
        tar = self._open.get(number)
        if tar is None:
            tar = self._open[number] = self.index.open(number)
            self._close_unused()
        elif 2 * len(self._open) > self._limit and self._open.pop(number, None) is not None:
            self._open[number] = tar  # now the last used
        return tar

    def _close_unused(self) -> None:
        """Unmap the tars that the cache has evicted, which frees their disk space, and the least recently used."""
        opened = list(self._open.items())
        gone = [number for number, tar in opened if not tar.path.exists()] if self.is_remote else []
        kept = [number for number, _ in opened if number not in gone]
        for number in gone + kept[: -self._limit]:
            self._open.pop(number, None)
