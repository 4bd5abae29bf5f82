"""Shards: plain WebDataset tars; the same samples give the same bytes, and an index makes them readable at random.

Comes in: samples, in the order of their `index`. Goes out: `shard-00000.tar`, ... that any WebDataset reader opens
(`KEY.json`, and `KEY.png` with `KEY.mask.png` where something is drawn on it, or `KEY.wav`), and beside each a
`shard-00000.index.npz` that says where every member lies. The index is a cache: it is rebuilt by one pass over the
tar's headers where it is missing or belongs to another tar. What may never happen: a byte that depends on the clock,
the user or the machine, or a sample given out as another.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from webdataset import TarWriter

from data_pipeline.audio.waveform import encode_wav
from data_pipeline.manifest import ShardEntry
from data_pipeline.png import encode_png
from data_pipeline.sample import Sample

logger = logging.getLogger(__name__)

MISSING = -1  # the offset and size, in an index, of a member that is not in the tar
_BLOCK = 512  # a tar's members start at multiples of this, each behind a header of the same size


@dataclass(frozen=True)
class EncodedSample:
    """One sample as it lies in a shard: the bytes of `KEY.json` and so on, by what follows `KEY.` in their names."""

    index: int
    members: Mapping[str, bytes]

    @property
    def key(self) -> str:
        return f"{self.index:08d}"


def encode(sample: Sample, *, sample_rate: int | None = None) -> EncodedSample:
    """The bytes of one sample; pure, so that a build may call it in worker processes.

    `sample_rate` is of a sound, in points a second; a picture has none.
    """
    labels = {"index": sample.index, "label_base": sample.label_base, "label_overlay": sample.label_overlay}
    members = {"json": json.dumps(labels).encode()}
    content: NDArray[Any] = sample.content
    if content.ndim == 1:
        assert sample_rate is not None
        members["wav"] = encode_wav(content, sample_rate=sample_rate)
    else:
        if sample.mask is not None:
            members["mask.png"] = encode_png(sample.mask)
        members["png"] = encode_png(content)
    return EncodedSample(sample.index, members)


def shard_name(number: int) -> str:
    """The file name of a shard of a built dataset.

    Examples:
        >>> shard_name(7)
        'shard-00007.tar'
    """
    return f"shard-{number:05d}.tar"


def write_shards(
    encoded: Iterable[EncodedSample], directory: Path, *, num_samples_per_shard: int
) -> tuple[ShardEntry, ...]:
    """Write samples as `directory/shard-00000.tar`, ... with an index beside each; returns the manifest's entries.

    Samples must come in the order of their index, from 0 without a gap (`ValueError` otherwise), because a sample's
    place in the dataset is its index. At most one sample is held in memory at a time.
    """
    if num_samples_per_shard < 1:
        raise ValueError(f"num_samples_per_shard must be at least 1, got {num_samples_per_shard}")
    directory.mkdir(parents=True, exist_ok=True)
    remaining = iter(encoded)
    entries: list[ShardEntry] = []
    num_written = 0
    for first in remaining:
        if first.index != num_written:
            raise _out_of_order(first.index, due=num_written)
        shard = chain([first], islice(remaining, num_samples_per_shard - 1))
        entries.append(write_shard(shard, directory / shard_name(len(entries))))
        num_written += entries[-1].num_samples
    return tuple(entries)


def write_shard(encoded: Iterable[EncodedSample], path: Path) -> ShardEntry:
    """Write one shard, at least one sample, and its index beside it; returns its entry in the manifest.

    Samples must come in the order of their index without a gap, and all have the same members (`ValueError`
    otherwise). At most one sample is held in memory at a time. The bytes are on the disk when this returns.
    """
    rows: list[list[int]] = []
    with path.open("wb") as file:
        # A fixed time, owner and mode: nothing in the tar depends on when, where and by whom it was written. A time in
        # whole seconds also keeps every header to the one block that `_layout` counts.
        with TarWriter(file, encoder=False, mtime=0, user="", group="", mode=0o444) as writer:
            for sample in _in_order(encoded):
                sizes = [len(content) for _, content in sorted(sample.members.items())]
                rows.append(_layout(writer.tarstream.offset, sizes))
                writer.write({"__key__": sample.key, **sample.members})
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    _save_index(index_path(path), np.array(rows, dtype=np.int64), shard_sha256=sha256)
    return ShardEntry(name=path.name, num_samples=len(rows), num_bytes=path.stat().st_size, sha256=sha256)


def _in_order(encoded: Iterable[EncodedSample]) -> Iterator[EncodedSample]:
    """The samples as they come; raises `ValueError` where one is out of order or has other members than the first."""
    first: EncodedSample | None = None
    for number, sample in enumerate(encoded):
        first = first or sample
        if sample.index != first.index + number:
            raise _out_of_order(sample.index, due=first.index + number)
        if sample.members.keys() != first.members.keys():
            raise ValueError(
                f"sample {sample.key} has the members {sorted(sample.members)}, not {sorted(first.members)}"
            )
        yield sample
    if first is None:
        raise ValueError("a shard holds at least one sample")


def _out_of_order(index: int, *, due: int) -> ValueError:
    return ValueError(f"sample {index} came where sample {due} was due; write samples in index order")


def _layout(start: int, sizes: Sequence[int]) -> list[int]:
    """Offset and size of each member's bytes, when the members are appended to a tar that ends at `start`."""
    row: list[int] = []
    for size in sizes:
        row += [start + _BLOCK, size]
        start += _BLOCK + _padded(size)
    return row


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def index_path(shard: Path) -> Path:
    """Where the index of a shard lies: `shard-00000.tar` has `shard-00000.index.npz`."""
    return shard.with_name(f"{shard.stem}.index.npz")


def _save_index(path: Path, rows: NDArray[np.int64], *, shard_sha256: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            np.savez(file, rows=rows, shard_sha256=np.array(shard_sha256))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def index_shard(path: Path, *, members: Sequence[str], due: range) -> NDArray[np.int64]:
    """Where the members of every sample that is due in a shard lie, by one pass over the headers of the tar.

    Returns (len(due), 2 * len(members)) int64: offset and size of the bytes of each member, `MISSING` where the file
    does not hold all of it. Samples are found by their keys, so members may lie anywhere in the tar; what is not due is
    passed over, and a file that is cut short, damaged or no tar gives what is before the damage.
    """
    rows = np.full((len(due), 2 * len(members)), MISSING, dtype=np.int64)
    columns = {extension: 2 * number for number, extension in enumerate(members)}
    for name, offset, size in _members_of(path):
        key, _, extension = name.partition(".")
        column = columns.get(extension)
        if column is None or not (key.isascii() and key.isdigit()):
            continue
        index = int(key)
        if index in due and key == f"{index:08d}":
            rows[index - due.start, column : column + 2] = offset, size
    return rows


def _members_of(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each file in a tar, in stored order, as far as the file is whole."""
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = _members_of_plain_tar(data)
    if found is None:
        found = []
        with suppress(tarfile.TarError), tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.isfile():
                    found.append((member.name, member.offset_data, member.size))
    for name, offset, size in found:
        if offset + size <= num_bytes:
            yield name, offset, size


def _members_of_plain_tar(data: mmap.mmap) -> list[tuple[str, int, int]] | None:
    """Name, offset and size of each file in a tar of short names and small files; None where it is any other.

    The same as a pass of `tarfile`, some ten times as fast.
    """
    found: list[tuple[str, int, int]] = []
    position = 0
    while len(header := data[position : position + _BLOCK]) == _BLOCK and header[0]:
        try:
            size, checksum = int(header[124:136].rstrip(b"\0 "), 8), int(header[148:156].rstrip(b"\0 "), 8)
            name = header[: header.index(b"\0", 0, 100)].decode("ascii")
        except ValueError:
            return None
        # The checksum is taken with spaces in its own field. A prefix (345) continues names of more than 100 bytes.
        right = sum(header) - sum(header[148:156]) + 8 * ord(" ")
        if checksum != right or size < 0 or header[156:157] not in (b"0", b"\0") or header[345]:
            return None
        found.append((name, position + _BLOCK, size))
        position += _BLOCK + _padded(size)
    return found


def load_index(shard: Path, entry: ShardEntry, *, members: Sequence[str], due: range) -> NDArray[np.int64]:
    """The index of one shard as `index_shard` returns it: from its file, or rebuilt where that is missing or stale.

    An index names the sha256 of its tar, and is stale where the manifest names another, or where the tar's size is not
    the manifest's. A rebuilt index is kept for the next reader if the tar is whole and the directory can be written to.
    """
    path = index_path(shard)
    num_bytes = shard.stat().st_size
    is_right_size = num_bytes == entry.num_bytes
    with suppress(OSError, ValueError, KeyError, EOFError, BadZipFile):  # missing, or not an index
        if is_right_size:
            with np.load(path) as saved:
                rows: NDArray[np.int64] = saved["rows"]
                if str(saved["shard_sha256"]) == entry.sha256 and _is_index(rows, members, due, num_bytes):
                    return rows
    logger.info("indexing %s: one pass over the headers of %d samples", shard, entry.num_samples)
    rows = index_shard(shard, members=members, due=due)
    if is_right_size and (rows != MISSING).all():
        try:
            _save_index(path, rows, shard_sha256=entry.sha256)
        except OSError as error:
            logger.info("the index of %s stays in memory: %s", shard, error.strerror)
    return rows


def _is_index(rows: NDArray[np.int64], members: Sequence[str], due: range, num_bytes: int) -> bool:
    """Whether an array can be the index of a whole tar: a wrong one could point outside the mapped file."""
    if rows.shape != (len(due), 2 * len(members)) or rows.dtype != np.int64:
        return False
    offsets, sizes = rows[:, ::2], rows[:, 1::2]
    return bool((offsets >= 0).all() and (sizes >= 0).all() and (offsets + sizes <= num_bytes).all())
