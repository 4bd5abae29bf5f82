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

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError, printable
from data_pipeline.core.sample import BadSample, sample_key
from data_pipeline.overlays import Overlay
from data_pipeline.overlays.registry import load_overlay
from data_pipeline.remote.cache import RemoteConfig, RemoteShards, is_remote
from data_pipeline.storage.built_shards import BuiltShards
from data_pipeline.storage.manifest import OVERLAY_NAME, Manifest, dataset_directory, load_manifest
from data_pipeline.storage.open_shard import OpenShard, Shards
from data_pipeline.storage.shards import MISSING, EncodedSample
from data_pipeline.storage.tar_index import TarShards

_MAX_OPEN_SHARDS: Final = 4_096  # each takes two mappings, and Linux gives a process 65,530 of them
_REMOTE: Final = RemoteConfig()


@dataclass(frozen=True)
class StoredSamples:
    """The stored bytes of some samples, in the order of the requested indices.

    Attributes:
        files: for each extension in `Manifest.members`, B views into the shards. A view is empty if its member is
            missing or its index is wrong.
        unreadable: by row, the reason why a sample cannot be read.
        labels: each label by name, (B,) int64; None if they are in the files.
    """

    files: Mapping[str, Sequence[memoryview]]
    unreadable: Mapping[int, str]
    labels: Mapping[str, NDArray[np.int64]] | None = None


class SampleStore:
    """The samples of a dataset by index.

    A shard and its index are mapped into memory when they are first read; a remote shard is fetched first. A mapping
    needs no open file and no seek, and all readers on the machine share its pages. A process keeps the shards that it
    has used last; so its memory grows neither with the number of samples nor with the number of shards that it reads.

    Attributes:
        location: the local directory, or the remote location as given.
        remote: the settings with which a remote dataset is fetched.
        manifest: the manifest of the dataset.
        overlay: the online overlay, on the CPU; None if the dataset has none.
        known_bad: samples that are not whole in local shards whose size is not that in the manifest; () if remote.
        shard_ends: (num_shards,) int64, the index after the last sample of each shard.

    A `manifest` that was read already is not read again. Raises `UserError` if the manifest, a shard or the overlay of
    a local dataset is missing, or if fewer than a tenth of its bytes or of its samples are there.
    """

    def __init__(
        self,
        location: str | Path,
        *,
        remote: RemoteConfig = _REMOTE,
        manifest: Manifest | None = None,
    ) -> None:
        self.remote = remote
        self.location: str | Path = str(location) if is_remote(location) else dataset_directory(location)
        files: Path | RemoteShards
        if isinstance(self.location, Path):
            files = self.location
            self.manifest = manifest or load_manifest(files)
        else:
            files = RemoteShards(self.location, config=remote, manifest=manifest)
            self.manifest = files.manifest
        self.overlay: Overlay | None = None
        if self.manifest.overlay is not None and self.manifest.is_online:
            path = files / OVERLAY_NAME if isinstance(files, Path) else files.path(OVERLAY_NAME)
            self.overlay = load_overlay(path, sha256=self.manifest.overlay.sha256)
        self._shards: Shards
        if self.manifest.tars is None:
            self._shards = BuiltShards(files, self.manifest)
        else:
            self._shards = TarShards(files, self.manifest, remote=remote)
        self._members = self._shards.members
        self._open: dict[int, OpenShard] = {}  # the last used at the end
        self._limit = _MAX_OPEN_SHARDS if self.max_shards is None else min(_MAX_OPEN_SHARDS, max(1, self.max_shards))
        self.known_bad: tuple[BadSample, ...] = self._shards.survey()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # another process maps the shards anew

    def __len__(self) -> int:
        return self.manifest.num_samples

    @property
    def shard_ends(self) -> NDArray[np.int64]:
        """Return the index after the last sample of each shard, (num_shards,) int64."""
        return self._shards.shard_ends

    @property
    def shard_bytes(self) -> NDArray[np.int64]:
        """Return the size of each shard in bytes, (num_shards,) int64."""
        return self._shards.shard_bytes

    @property
    def max_shards(self) -> int | None:
        """Return the number of shards that the cache can hold at a time; None if it can hold all."""
        return self._shards.max_shards

    @property
    def is_remote(self) -> bool:
        """Return whether shards are fetched when they are first read."""
        return self._shards.is_remote

    def prefetch(self, shards: Iterable[int]) -> None:
        """Fetch shards of a remote dataset in the background, in this order, in place of those that still wait."""
        self._shards.prefetch(shards)

    def shard_name(self, number: int) -> str:
        """Return the file name of a shard."""
        return self._shards.name(number)

    def encoded(self, index: int) -> EncodedSample:
        """Return the stored bytes of one sample. A member that the shard lacks is left out.

        Raises `IndexError` if there is no such sample, and `UserError` if the shard's index is wrong.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not one of {len(self)}")
        shard = self._shard(self._shard_of(index))
        if (wrong := self._problem(shard, index)) is not None:
            raise UserError(
                f"{self.location}: sample {sample_key(index)} cannot be read ({wrong}); copy it again or build the "
                "dataset again"
            )
        row = shard.row(index)
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
        shards = np.searchsorted(self.shard_ends, indices[by_shard], side="right")
        numbers, starts = np.unique(shards, return_index=True)
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
                if (wrong := self._problem(shard, int(indices[place]))) is not None:
                    unreadable[place] = wrong
                    views[place] = [memoryview(b"")] * len(self._members)
            for place in places[(rows[:, ::2] == MISSING).any(axis=1)].tolist():
                unreadable[place] = self._shards.missing(shard, int(indices[place]))
        files = {name: [sample[number] for sample in views] for number, name in enumerate(self._members)}
        return StoredSamples(files, unreadable, self._shards.labels(indices))

    def labels(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[np.int64]] | None:
        """Return each label of samples of tars, (B,) int64; None for a built dataset, whose shards hold them."""
        return self._shards.labels(indices)

    def bad_sample(self, index: int, reason: str) -> BadSample:
        return BadSample(index, self._shards.name(self._shard_of(index)), reason)

    def undecoded(self, index: int, reason: str) -> BadSample:
        """Return a sample whose bytes could be read and do not decode; of other tars, with the name of its file."""
        name = self._shards.file_name(self._shard(self._shard_of(index)), index)
        return self.bad_sample(index, f"{printable(name)}: {reason}" if name else reason)

    def _shard_of(self, index: int) -> int:
        return bisect_right(self.shard_ends, index)  # for one number faster than NumPy's own

    def _problem(self, shard: OpenShard, index: int) -> str | None:
        """Return why a sample cannot be read, or None. A sample is checked once while its shard is open."""
        if shard.is_checked[index - shard.first]:
            return None
        wrong = self._shards.problem(shard, index)
        shard.is_checked[index - shard.first] = wrong is None
        return wrong

    def _shard(self, number: int) -> OpenShard:
        """Return one shard; open it if it is not open. Threads may call this at the same time."""
        shard = self._open.get(number)
        if shard is None:
            shard = self._open[number] = self._shards.open(number)
            self._close_unused()
        elif 2 * len(self._open) > self._limit and self._open.pop(number, None) is not None:
            self._open[number] = shard  # now the last used
        return shard

    def _close_unused(self) -> None:
        """Unmap the shards that the cache has evicted, which frees their disk space, and the least recently used."""
        opened = list(self._open.items())
        gone = [number for number, shard in opened if not shard.path.exists()] if self.is_remote else []
        kept = [number for number, _ in opened if number not in gone]
        for number in gone + kept[: -self._limit]:
            self._open.pop(number, None)
