"""The index of somebody else's WebDataset tars, which stay as they are.

An index is a directory:

    manifest.json   what the samples are: a `Manifest` with the section `tars`
    tars.txt        the path or URL of each tar, a line each; a path in the index's own directory is relative
    tars.bin        (num_tars, 3) int64: the samples up to its end, its size in bytes, its time of change in nanoseconds
    tars.sha256     the sha256 of each tar, 32 bytes, if the tars are remote; else empty
    samples.bin     int64 for each sample: where its picture lies in its tar, and its size (`pack`)
    label_NAME.bin  for each label, such as `base`: int32 for each sample, the number of its class, -1 if it has none

All numbers are little-endian. A process maps `samples.bin` and the labels into memory and reads only the pages of the
samples that it needs.

Guarantees: a tar of another size than when it was indexed is refused. A picture is read only from a place that the
tar's own header confirms.

Shapes: B samples to read, S tars.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL, BadSample
from data_pipeline.remote.cache import FileCache, RemoteConfig, RemoteFile, RemoteShards
from data_pipeline.remote.fetch import Expected
from data_pipeline.storage.files import read_regular, regular_size
from data_pipeline.storage.manifest import MANIFEST_NAME, Manifest
from data_pipeline.storage.open_shard import OpenShard, map_file, open_before_eviction
from data_pipeline.storage.tar_headers import BLOCK, is_size_at, name_at
from data_pipeline.storage.tar_lists import MAX_TARS_BYTES, TARS_NAME

logger = logging.getLogger(__name__)

_SIZE_BITS: Final = 28  # and 35 bits for the offset in blocks: tars of up to 16 TiB
TAR_HASHES_NAME: Final = "tars.sha256"
TAR_NUMBERS_NAME: Final = "tars.bin"
SAMPLES_NAME: Final = "samples.bin"
PICTURE: Final = "picture"  # the name of the one member that a reader gets
MAX_PICTURE_BYTES: Final = (1 << _SIZE_BITS) - 1
_REINDEX: Final = "run `python -m data_pipeline index` again"
_COPY_AGAIN: Final = "copy the dataset again with `cp -a`, which keeps the times, or make it again"


def labels_name(label: str) -> str:
    """Return the name of the file of a label.

    Examples:
        >>> labels_name("base")
        'label_base.bin'
    """
    return f"label_{label}.bin"


def pack(offsets_B: NDArray[np.int64], sizes_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return one number for each picture, (B,) int64, of its offset in bytes and its size, `MAX_PICTURE_BYTES` at most.

    An offset is a whole number of blocks of a tar.
    """
    packed_B: NDArray[np.int64] = (offsets_B // BLOCK << _SIZE_BITS) | sizes_B
    return packed_B


@dataclass(frozen=True)
class PackedRows:
    """Offset and size of the pictures of a tar, which are unpacked as they are asked for."""

    packed_N: NDArray[np.int64]

    def __getitem__(self, rows_B: NDArray[np.int64] | slice) -> NDArray[np.int64]:
        """Return the offsets and sizes of some samples, (B, 2) int64."""
        packed_B = self.packed_N[rows_B].astype(np.int64)
        return np.stack([(packed_B >> _SIZE_BITS) * BLOCK, packed_B & MAX_PICTURE_BYTES], axis=1)


def tars_sha256(paths: Sequence[str], numbers_S3: NDArray[np.int64], *, hashes: bytes = b"") -> str:
    """Return a hash of the names, sizes, numbers of samples and, of remote tars, hashes of all tars."""
    digest = hashlib.sha256("\n".join(paths).encode())
    digest.update(np.ascontiguousarray(numbers_S3[:, :2], dtype="<i8").tobytes())
    digest.update(hashes)
    return digest.hexdigest()


class TarShards:
    """The indexed tars; see `data_pipeline.storage.open_shard.Shards`.

    `directory` is that of the index. Remote tars are fetched into a cache, by `remote`. Raises `UserError` if a file of
    the index is missing, or does not agree with the manifest.
    """

    members: Sequence[str] = (PICTURE,)

    def __init__(self, directory: Path | RemoteShards, manifest: Manifest, *, remote: RemoteConfig) -> None:
        assert manifest.tars is not None
        if not isinstance(directory, Path):
            raise UserError(
                f"{directory.location} is an index of tars, whose paths are of the machine that made it; index the "
                "tars here with `python -m data_pipeline index`"
            )
        self._directory = directory
        try:
            names = read_regular(directory / TARS_NAME, max_bytes=MAX_TARS_BYTES)
            numbers = read_regular(directory / TAR_NUMBERS_NAME, max_bytes=MAX_TARS_BYTES)
            hashes = read_regular(directory / TAR_HASHES_NAME, max_bytes=MAX_TARS_BYTES)
            self._paths = names.decode().splitlines()
        except (OSError, ValueError) as error:
            raise UserError(f"the index in {directory} cannot be read ({error}); {_REINDEX}") from None
        if len(numbers) != 24 * manifest.tars.num_tars or len(self._paths) != manifest.tars.num_tars:
            raise self._contradiction(TAR_NUMBERS_NAME)
        numbers_S3 = np.frombuffer(numbers, dtype="<i8").astype(np.int64).reshape(-1, 3)
        if tars_sha256(self._paths, numbers_S3, hashes=hashes) != manifest.tars.sha256:
            raise self._contradiction(TARS_NAME)
        self.shard_ends: NDArray[np.int64] = np.ascontiguousarray(numbers_S3[:, 0])
        self.shard_bytes: NDArray[np.int64] = numbers_S3[:, 1]
        self._changed_ns_S = numbers_S3[:, 2]
        if self.shard_ends[-1] != manifest.num_samples or (np.diff(self.shard_ends, prepend=0) < 0).any():
            raise self._contradiction(TAR_NUMBERS_NAME)
        self._cache: FileCache | None = None
        if hashes:
            if len(hashes) != 32 * len(self._paths):
                raise self._contradiction(TAR_HASHES_NAME)
            self._cache = FileCache(
                manifest.tars.location,
                partial(_remote_tar, self._paths, self.shard_bytes, hashes),
                shard_bytes_S=self.shard_bytes,
                sha256=manifest.tars.sha256,
                config=remote,
            )
        self._packed = self._map(SAMPLES_NAME, np.dtype("<i8"), manifest.num_samples)
        self._num_classes = {name: len(label.classes) for name, label in manifest.stored_labels.items()}
        self._labels: dict[str, NDArray[np.int32]] = {
            name: self._map(labels_name(name), np.dtype("<i4"), manifest.num_samples) for name in self._num_classes
        }

    def _map(self, name: str, dtype: np.dtype[Any], num: int) -> NDArray[Any]:
        path = self._directory / name
        if regular_size(path) != num * dtype.itemsize:
            raise self._contradiction(name)
        return np.memmap(path, dtype=dtype, mode="r", shape=(num,))

    def _contradiction(self, name: str) -> UserError:
        return UserError(f"{self._directory / name} does not agree with {MANIFEST_NAME}; {_REINDEX}")

    def _path(self, number: int) -> Path:
        return self._directory / self._paths[number]  # which may be absolute

    def _mend(self, number: int) -> str:
        """Return what mends a tar that is not as it was indexed.

        A dataset of `build --keep` holds its tars and their index. `index` would make another index, in a folder of it.
        """
        return _REINDEX if Path(self._paths[number]).is_absolute() else _COPY_AGAIN

    def name(self, number: int) -> str:
        return Path(self._paths[number]).name

    @property
    def max_shards(self) -> int | None:
        return None if self._cache is None else self._cache.max_shards

    @property
    def is_remote(self) -> bool:
        return self._cache is not None

    def prefetch(self, numbers: Iterable[int]) -> None:
        if self._cache is not None:
            self._cache.prefetch(_copy_name(number) for number in numbers)

    def survey(self) -> tuple[BadSample, ...]:
        """Raise `UserError` if a local tar is missing or has another size than when it was indexed."""
        if self._cache is not None:
            return ()
        for number in range(len(self._paths)):
            self._check_size(number)
        return ()

    def _check_size(self, number: int) -> None:
        path, due = self._path(number), int(self.shard_bytes[number])
        size = regular_size(path)
        if size is None:
            raise UserError(
                f"{path} is in the index {self._directory}, but it is missing or not a regular file; put it back, or "
                f"{self._mend(number)}"
            )
        if size != due:
            raise UserError(f"{path} has {size} bytes, but it had {due} when it was indexed; {self._mend(number)}")

    def open(self, number: int) -> OpenShard:
        """Map one tar. Raises `UserError` if it is missing or has another size than when it was indexed."""
        start, end = int(self.shard_ends[number - 1]) if number else 0, int(self.shard_ends[number])
        rows = PackedRows(self._packed[start:end])
        is_checked = np.zeros(end - start, dtype=np.bool_)
        if (cache := self._cache) is not None:

            def open_once() -> OpenShard:
                path = cache.path(_copy_name(number))
                return OpenShard(path, map_file(path), start, rows, is_checked)

            mend = "raise data.remote.cache_gigabytes"
            return open_before_eviction(open_once, what=self._paths[number], mend=mend)
        self._check_size(number)
        path = self._path(number)
        if path.stat().st_mtime_ns != self._changed_ns_S[number]:
            logger.warning(
                "%s was written again after it was indexed; to be sure of its content, %s", path, self._mend(number)
            )
        return OpenShard(path, map_file(path), start, rows, is_checked)

    def problem(self, shard: OpenShard, index: int) -> str | None:
        """Return a sentence if the tar's own header does not confirm the place of a picture."""
        offset, size = shard.row(index)
        if is_size_at(shard.data, offset=offset, size=size):
            return None
        return f"its index says that a picture of {size} bytes begins at {offset}, and the tar says otherwise"

    def missing(self, shard: OpenShard, index: int) -> str:
        return ""  # only samples with a picture are in the index

    def file_name(self, shard: OpenShard, index: int) -> str:
        offset, _ = shard.row(index)
        return name_at(shard.data, offset=offset)

    def labels(self, indices_B: NDArray[np.int64]) -> Mapping[str, NDArray[np.int64]]:
        """Return each label of samples by name, (B,) int64; `NO_LABEL` for a sample without it."""
        found: dict[str, NDArray[np.int64]] = {}
        for name, label_N in self._labels.items():
            label_B = label_N[indices_B].astype(np.int64)
            label_B[(label_B < 0) | (label_B >= self._num_classes[name])] = NO_LABEL
            found[name] = label_B
        return found


def tar_ranges(directory: Path) -> dict[str, range]:
    """Return the samples of each tar of an index, by the name under which every index knows the same tar.

    A local tar is known by its path without links, and a remote one by its sha256. Raises `UserError` if the index
    cannot be read.
    """
    try:
        paths = read_regular(directory / TARS_NAME, max_bytes=MAX_TARS_BYTES).decode().splitlines()
        numbers = read_regular(directory / TAR_NUMBERS_NAME, max_bytes=MAX_TARS_BYTES)
        hashes = read_regular(directory / TAR_HASHES_NAME, max_bytes=MAX_TARS_BYTES)
        ends = np.frombuffer(numbers, dtype="<i8").reshape(-1, 3)[:, 0].tolist()
    except (OSError, ValueError) as error:
        raise UserError(f"the index in {directory} cannot be read ({error}); {_REINDEX}") from None
    if hashes:
        names = [hashes[start : start + 32].hex() for start in range(0, len(hashes), 32)]
    else:
        names = [str((directory / path).resolve()) for path in paths]
    return dict(zip(names, map(range, [0, *ends], ends), strict=False))


def has_remote_tars(directory: Path) -> bool:
    """Return whether a directory is an index of remote tars."""
    return bool(regular_size(directory / TAR_HASHES_NAME))


def _remote_tar(urls: Sequence[str], num_bytes_S: NDArray[np.int64], hashes: bytes, name: str) -> RemoteFile | None:
    """Return the remote tar whose copy has a name; None if there is none."""
    found = re.fullmatch(r"tar-(\d{8,})\.tar", name, flags=re.ASCII)
    number = len(urls) if found is None else int(found[1])
    if number >= len(urls):
        return None
    sha256 = hashes[32 * number : 32 * number + 32].hex()
    return RemoteFile(urls[number], Expected(num_bytes=int(num_bytes_S[number]), sha256=sha256))


def _copy_name(number: int) -> str:
    """Return the name of the copy of a remote tar in the cache."""
    return f"tar-{number:08d}.tar"


def split_name(name: str) -> tuple[str, str]:
    """Split the name of a member into the key of its sample and its extension, as WebDataset does.

    Examples:
        >>> split_name("n01440764/n01440764_10026.seg.png"), split_name("./a/b.c/README")
        (('n01440764/n01440764_10026', 'seg.png'), ('./a/b.c/README', ''))
    """
    folder, slash, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()
