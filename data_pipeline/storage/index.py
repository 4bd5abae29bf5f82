"""Read the index of tars: where the members of each sample lie, and what its labels are.

The index of a dataset lies beside its manifest:

    tars.txt        the path or URL of each tar, a line each; a path in the index's own directory is relative
    tars.bin        (num_tars, 2) int64: the samples up to its end, and its size in bytes
    tars.sha256     the sha256 of each tar, 32 bytes, if `build` wrote the tars or they are remote; else empty
    tars.times      (num_tars,) int64: when each local tar of others was changed last, in nanoseconds
    samples.bin     (num_samples, num_members) int64: where each member lies in its tar, and its size (`pack`)
    label_NAME.bin  for each label, such as `base`: int32 for each sample, the number of its class, -1 if it has none

All numbers are little-endian. A process maps `samples.bin` and the labels into memory and reads only the pages of the
samples that it needs.

Guarantees: a tar of another size than when it was indexed is refused. A member is read only from a place that the
tar's own header confirms, with the key of the sample if `build` wrote the tar.

Shapes: B samples to read, M members of a sample, S tars.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL, sample_key
from data_pipeline.remote.cache import FileCache, RemoteConfig, file_url, is_remote
from data_pipeline.remote.fetch import RemoteFile
from data_pipeline.storage.locations import MANIFEST_NAME, TARS_NAME
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.tar_headers import BLOCK, is_file_at, name_at

logger = logging.getLogger(__name__)

NUMBERS_NAME: Final = "tars.bin"
HASHES_NAME: Final = "tars.sha256"
TIMES_NAME: Final = "tars.times"
SAMPLES_NAME: Final = "samples.bin"
_SIZE_BITS: Final = 28  # and 35 bits for the offset in blocks: tars of up to 16 TiB
MAX_MEMBER_BYTES: Final = (1 << _SIZE_BITS) - 1
_HASH_BYTES: Final = 32
_NUM_SURVEYED: Final = 10_000  # tars whose size is looked at before the first is read
_NUM_ATTEMPTS: Final = 5
_MEND: Final = "copy the dataset again, or build or index it again"


def labels_name(label: str) -> str:
    """Return the name of the file of a label.

    Examples:
        >>> labels_name("base")
        'label_base.bin'
    """
    return f"label_{label}.bin"


def pack(offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return one int64 for each member, of its offset in bytes and its size, `MAX_MEMBER_BYTES` at most.

    An offset is a whole number of blocks of a tar.
    """
    packed: NDArray[np.int64] = (offsets // BLOCK << _SIZE_BITS) | sizes
    return packed


@dataclass(frozen=True)
class OpenTar:
    """A tar in memory.

    Attributes:
        first: the index of its first sample in the dataset.
        packed_NM: from `pack`, for the members of its samples.
        is_checked: (N,) bool, whether the tar's headers were compared with the index.
    """

    path: Path
    data: memoryview
    first: int
    packed_NM: NDArray[np.int64]
    is_checked: NDArray[np.bool_]

    def places(self, rows_B: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the offsets and the sizes of the members of some samples of the tar, (B, M) each."""
        packed_BM = self.packed_NM[rows_B].astype(np.int64)
        return (packed_BM >> _SIZE_BITS) * BLOCK, packed_BM & MAX_MEMBER_BYTES


class Index:
    """The indexed tars of a dataset. Remote tars are fetched into a cache.

    Attributes:
        directory: the local directory of the index; None if it is remote.
        members: the names of the members of a sample: `content`, and `mask` if there is one.
        names: the path or URL of each tar, as the index names it.
        shard_ends: (S,) int64, the index after the last sample of each tar.
        shard_bytes: (S,) int64, the size of each tar.

    Raises `UserError` if a file of the index is missing, or does not agree with the manifest.
    """

    def __init__(self, location: Path | str, manifest: Manifest, *, remote: RemoteConfig) -> None:
        self._location, self._manifest = location, manifest
        self.directory = location if isinstance(location, Path) else None
        self._beside = None if isinstance(location, Path) else files_beside(location, manifest, remote)
        self.members = ("content", "mask") if manifest.has_mask else ("content",)
        self.names = self._read(TARS_NAME).decode(errors="replace").splitlines()
        numbers_S2 = np.frombuffer(self._read(NUMBERS_NAME), dtype="<i8").astype(np.int64).reshape(-1, 2)
        self._hashes = self._read(HASHES_NAME)
        self.shard_ends: NDArray[np.int64] = np.ascontiguousarray(numbers_S2[:, 0])
        self.shard_bytes: NDArray[np.int64] = np.ascontiguousarray(numbers_S2[:, 1])
        if not len(self.names) == len(numbers_S2) == manifest.tars.num_tars:
            raise self._contradiction(TARS_NAME)
        if self.shard_ends[-1] != manifest.num_samples:
            raise self._contradiction(NUMBERS_NAME)
        self._packed_NM = self._map(SAMPLES_NAME, np.dtype("<i8"), len(self.members))
        self._labels: dict[str, NDArray[np.int32]] = {
            name: self._map(labels_name(name), np.dtype("<i4"), 1)[:, 0] for name in manifest.stored_labels
        }
        self._times_S = self._read_times()
        self._cache: FileCache | None = None
        if isinstance(location, str) or is_remote(self.names[0]):
            urls = [self._url(name) for name in self.names]
            self._cache = FileCache(
                str(location),
                partial(_remote_tar, urls, self.shard_bytes, self._hashes),
                shard_bytes_S=self.shard_bytes,
                sha256=manifest.sha256,
                config=remote,
            )

    def path(self, name: str) -> Path:
        """Return the local path of a file beside the manifest, which is fetched first if the dataset is remote."""
        if self.directory is not None:
            return self.directory / name
        assert self._beside is not None
        return self._beside.path(name)

    def _read(self, name: str) -> bytes:
        path = self.path(name)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); {_MEND}") from None
        if name not in self._manifest.files or len(content) != self._manifest.files[name].num_bytes:
            raise self._contradiction(name)
        return content

    def _read_times(self) -> NDArray[np.int64] | None:
        """Return when the local tars of others were changed last; None for other tars."""
        if self.directory is None or not (path := self.directory / TIMES_NAME).is_file():
            return None
        times_S = np.fromfile(path, dtype="<i8").astype(np.int64)
        return times_S if len(times_S) == len(self.names) else None

    def _map(self, name: str, dtype: np.dtype[Any], num_columns: int) -> NDArray[Any]:
        path, shape = self.path(name), (self._manifest.num_samples, num_columns)
        due = self._manifest.num_samples * num_columns * dtype.itemsize
        if not path.is_file() or path.stat().st_size != due:
            raise self._contradiction(name)
        return np.memmap(path, dtype=dtype, mode="r", shape=shape)

    def _contradiction(self, name: str) -> UserError:
        return UserError(f"{self._location}: {name} does not agree with {MANIFEST_NAME}; {_MEND}")

    def _url(self, name: str) -> str:
        if is_remote(name):
            return name
        if Path(name).is_absolute():
            raise UserError(
                f"{self._location} is an index of tars on the machine that made it; index the tars here with "
                "`python -m data_pipeline index`"
            )
        return file_url(str(self._location), name)

    @property
    def max_shards(self) -> int | None:
        """Return the number of tars that the cache can hold at a time; None if it can hold all."""
        return None if self._cache is None else self._cache.max_shards

    @property
    def is_remote(self) -> bool:
        """Return whether tars are fetched when they are first read."""
        return self._cache is not None

    def sha256(self, number: int) -> str | None:
        """Return the sha256 of a tar; None if the index has none."""
        return self._hashes[_HASH_BYTES * number : _HASH_BYTES * (number + 1)].hex() or None

    def prefetch(self, numbers: Iterable[int]) -> None:
        if self._cache is not None:
            self._cache.prefetch(_copy_name(number) for number in numbers)

    def survey(self) -> None:
        """Raise `UserError` if a local tar is missing or has another size. Of many tars, looks at 10,000."""
        if self._cache is None:
            num = len(self.names)
            for number in np.unique(np.linspace(0, num - 1, min(num, _NUM_SURVEYED)).astype(np.int64)).tolist():
                self.check_size(number)

    def tar_path(self, number: int) -> Path:
        """Return the path of a local tar."""
        assert self.directory is not None
        return self.directory / self.names[number]  # which may be absolute

    def check_size(self, number: int) -> None:
        """Raise `UserError` if a local tar is missing or has another size than when it was indexed."""
        path, due = self.tar_path(number), int(self.shard_bytes[number])
        if not path.is_file():
            raise UserError(f"{path} is in the index {self.directory}, but it is not there; {_MEND}")
        if (size := path.stat().st_size) != due:
            raise UserError(f"{path} has {size} bytes, but it had {due} when it was indexed; {_MEND}")

    def open(self, number: int) -> OpenTar:
        """Map one tar; fetch it first if it is remote. Raises `UserError` if it is missing or has another size."""
        if self._cache is None:
            self.check_size(number)
            path = self.tar_path(number)
            if self._times_S is not None and path.stat().st_mtime_ns != self._times_S[number]:
                logger.warning("%s was written again after it was indexed; index it again, to be sure of it", path)
            return self._opened(number, path)
        for _ in range(_NUM_ATTEMPTS):
            try:
                return self._opened(number, self._cache.path(_copy_name(number)))
            except FileNotFoundError:
                continue  # another process has evicted it
        raise UserError(
            f"{self.names[number]} was removed {_NUM_ATTEMPTS} times before it could be read; raise "
            "data.remote.cache_gigabytes"
        )

    def _opened(self, number: int, path: Path) -> OpenTar:
        start, end = self.samples_of(number)
        return OpenTar(path, map_file(path), start, self._packed_NM[start:end], np.zeros(end - start, dtype=np.bool_))

    def samples_of(self, number: int) -> tuple[int, int]:
        """Return the indices of the first sample of a tar, and after its last one."""
        return int(self.shard_ends[number - 1]) if number else 0, int(self.shard_ends[number])

    def problem(self, tar: OpenTar, index: int) -> str | None:
        """Compare the place of a sample with the headers in its tar. Return the first difference, or None."""
        start = b"%s." % sample_key(index).encode() if self._manifest.tars.numbered else b""
        offsets_1M, sizes_1M = tar.places(np.array([index - tar.first]))
        for offset, size in zip(offsets_1M[0].tolist(), sizes_1M[0].tolist(), strict=True):
            if not is_file_at(tar.data, offset=offset, size=size, start=start):
                return (
                    f"its index says that {start.decode()} of {size} bytes begins at {offset}, and the tar says "
                    "otherwise"
                )
        return None

    def file_name(self, tar: OpenTar, index: int) -> str:
        """Return the name of the content of a sample in its tar."""
        offsets_1M, _ = tar.places(np.array([index - tar.first]))
        return name_at(tar.data, offset=int(offsets_1M[0, 0]))

    def labels(self, indices_B: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Return each stored label of samples by name, (B,) int64; `NO_LABEL` for a sample without it."""
        found: dict[str, NDArray[np.int64]] = {}
        for name, label_N in self._labels.items():
            label_B = label_N[indices_B].astype(np.int64)
            label_B[(label_B < 0) | (label_B >= len(self._manifest.labels[name].classes))] = NO_LABEL
            found[name] = label_B
        return found

    def ranges(self) -> Iterator[tuple[str, range]]:
        """Yield the samples of each tar, with the name under which every index knows the same tar.

        A tar with a hash is known by it, and another one by its path without links.
        """
        for number in range(len(self.names)):
            yield self.sha256(number) or str(self.tar_path(number).resolve()), range(*self.samples_of(number))


def has_remote_tars(directory: Path) -> bool:
    """Return whether a local directory is an index of remote tars."""
    names = directory / TARS_NAME
    return names.is_file() and is_remote(names.read_text(encoding="utf-8").partition("\n")[0])


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
        found = re.search(r": ([^:]+) \((\d+)\)$", str(error))  # "unable to open file <a.tar>: Permission denied (13)"
        if found is not None and int(found[2]) == errno.ENOENT:
            raise FileNotFoundError(errno.ENOENT, found[1], str(path)) from None
        reason = str(error) if found is None else found[1]
        raise UserError(f"{path} cannot be mapped into memory ({reason}); mend that, or read another copy") from None
    return mapped.numpy().data


def files_beside(location: str, manifest: Manifest, remote: RemoteConfig) -> FileCache:
    """Return the cache of the files beside a remote manifest."""

    return FileCache(
        location,
        partial(_remote_file, location, {name: entry.sha256 for name, entry in manifest.files.items()}),
        shard_bytes_S=np.empty(0, dtype=np.int64),
        sha256=manifest.sha256,
        config=remote,
    )


def _remote_file(location: str, hashes: Mapping[str, str], name: str) -> RemoteFile | None:
    return RemoteFile(file_url(location, name), sha256=hashes[name]) if name in hashes else None


def _remote_tar(urls: list[str], num_bytes_S: NDArray[np.int64], hashes: bytes, name: str) -> RemoteFile | None:
    """Return the remote tar whose copy has a name; None if there is none."""
    found = re.fullmatch(r"tar-(\d{8,})\.tar", name)
    if found is None or (number := int(found[1])) >= len(urls):
        return None
    sha256 = hashes[_HASH_BYTES * number : _HASH_BYTES * (number + 1)].hex()
    return RemoteFile(urls[number], int(num_bytes_S[number]), sha256)


def _copy_name(number: int) -> str:
    """Return the name of the copy of a remote tar in the cache."""
    return f"tar-{number:08d}.tar"
