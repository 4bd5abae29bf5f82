"""Shards: plain WebDataset tars; the same samples give the same bytes, and an index makes them readable at random.

Comes in: samples, in the order of their `index`. Goes out: `shard-00000.tar`, ... that any WebDataset reader opens
(`KEY.json`, and `KEY.png` with `KEY.mask.png` where something is drawn on it, or `KEY.wav`), and beside each a
`shard-00000.index` that says where every member lies. The index is a cache: it is rebuilt by one pass over the tar's
headers if it is missing or is not the one that the manifest names by sha256.

Invariants: no byte depends on the clock, the user or the machine. No sample is given out as another: the manifest names
the sha256 of each index, and `names_member` compares each offset with the tar's own header.

The file of an index is an array and nothing else: for each sample, in order, the offset and size of each of its members
(those of `Manifest.members`, in that order), as little-endian int64. So its size follows from the manifest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from webdataset import TarWriter

from data_pipeline.audio.waveform import encode_wav
from data_pipeline.core.sample import Sample
from data_pipeline.storage.files import open_regular, read_regular
from data_pipeline.storage.manifest import ShardEntry
from data_pipeline.storage.png import encode_png

logger = logging.getLogger(__name__)

MISSING = -1  # the offset and size, in an index, of a member that is not in the tar
_BLOCK = 512  # a tar's members start at multiples of this, each behind a header of the same size
_FILE_TYPES: Final = (b"0", b"\0", b"7")  # of a header: a regular file
_EMPTY_TYPES: Final = tuple(b"%d" % number for number in range(1, 7))  # links, devices and folders: no content


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
    index = index_content(np.array(rows, dtype=np.int64))
    _save_index(index_path(path), index)
    return ShardEntry(
        name=path.name,
        num_samples=len(rows),
        num_bytes=path.stat().st_size,
        sha256=sha256,
        index_sha256=hashlib.sha256(index).hexdigest(),
    )


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
    """Where the index of a shard lies: `shard-00000.tar` has `shard-00000.index`."""
    return shard.with_name(f"{shard.stem}.index")


def index_content(rows: NDArray[np.int64]) -> bytes:
    """Return the bytes of the file of an index; the same index gives the same bytes."""
    return rows.astype("<i8").tobytes()


def index_num_bytes(entry: ShardEntry, members: Sequence[str]) -> int:
    """Return the size of the file of an index: an offset and a size for each member of each sample."""
    return 16 * len(members) * entry.num_samples


def _save_index(path: Path, content: bytes) -> None:
    """Write an index as a new file that then takes the name `path`, so that nothing is written through a link."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def index_shard(path: Path, *, members: Sequence[str], due: range) -> NDArray[np.int64]:
    """Where the members of every sample that is due in a shard lie, by one pass over the headers of the tar.

    Returns (len(due), 2 * len(members)) int64: offset and size of the bytes of each member, `MISSING` where the file
    does not hold all of it. Samples are found by their keys, so members may lie anywhere in the tar; what is not due is
    passed over, and a file that is cut short, damaged or no tar gives what is before the damage. Raises `OSError` if
    `path` is not a regular file.
    """
    with map_regular(path) as data:
        return index_members(read_headers(data)[0], members=members, due=due)


def index_members(found: Iterable[TarMember], *, members: Sequence[str], due: range) -> NDArray[np.int64]:
    """`index_shard` of the files of a tar, in stored order."""
    rows = np.full((len(due), 2 * len(members)), MISSING, dtype=np.int64)
    columns = {extension: 2 * number for number, extension in enumerate(members)}
    for member in found:
        key, _, extension = member.name.partition(".")
        column = columns.get(extension)
        if column is None or not (key.isascii() and key.isdigit()):
            continue
        index = int(key)
        if index in due and key == f"{index:08d}":
            rows[index - due.start, column : column + 2] = member.offset, member.size
    return rows


@contextmanager
def map_regular(path: Path) -> Iterator[memoryview]:
    """Map a regular file into memory, to read. Raises `OSError` if `path` is not one."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield memoryview(b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            yield data


@dataclass(frozen=True, slots=True)
class TarMember:
    """One file in a tar: the name that its header gives, and where its content lies."""

    name: str
    offset: int
    size: int


def read_headers(data: memoryview) -> tuple[list[TarMember], int]:
    """Read the headers of a tar: its files in stored order, and the position behind the last of them.

    Ends before the first block that is no header, or whose content is not all there. Names are those of the ustar
    header alone, which is all of a key of up to 100 letters; long names, links, folders and times that other writers
    keep in blocks of their own are passed over. Some ten times as fast as `tarfile`, and bounded in time and memory for
    any bytes.
    """
    found: list[TarMember] = []
    position = 0
    while len(header := bytes(data[position : position + _BLOCK])) == _BLOCK and header[0]:
        # The checksum is taken with spaces in its own field.
        right = sum(header) - sum(header[148:156]) + 8 * ord(" ")
        size, kind = _number(header[124:136]), header[156:157]
        if size is None or _number(header[148:156]) != right:
            break
        if kind in _EMPTY_TYPES:
            size = 0
        offset = position + _BLOCK
        if offset + size > len(data):
            break
        if kind in _FILE_TYPES:
            name = header[:100].partition(b"\0")[0]
            if header[345] and header[257:263] == b"ustar\0":  # continues names of more than 100 bytes
                name = header[345:500].partition(b"\0")[0] + b"/" + name
            found.append(TarMember(name.decode(errors="replace"), offset, size))
        position = offset + _padded(size)
    return found, min(position, len(data))


def _number(field: bytes) -> int | None:
    """The number in a field of a tar's header, octal or, above 8 GiB, in binary; None if it is neither."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b"\0 ")
    return int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else None


def names_member(data: memoryview, *, name: bytes, offset: int, size: int) -> bool:
    """Return whether a file `name` of `size` bytes begins at `offset` of a tar, by the header that lies before it.

    The reader calls it before it believes an index: it costs a microsecond, on a page that is about to be read.
    """
    if not _BLOCK <= offset <= len(data):
        return False
    start = offset - _BLOCK
    if data[start : start + len(name) + 1] != name + b"\0":
        return False
    is_padded = data[start + 124 : start + 135] == b"%011o" % size  # as almost all writers store a size
    return is_padded or _number(bytes(data[start + 124 : start + 136])) == size


def load_index(shard: Path, entry: ShardEntry, *, members: Sequence[str], due: range) -> NDArray[np.int64]:
    """The index of one shard as `index_shard` returns it: from its file, or rebuilt from the tar.

    It is rebuilt if the file is missing or is not the one that the manifest names by sha256, or if the size of the tar
    is not the manifest's. A rebuilt index is kept for the next reader if it is the one that the manifest names and the
    directory can be written to.
    """
    num_bytes = shard.stat().st_size
    if num_bytes != entry.num_bytes:
        return _rebuilt(shard, entry, members=members, due=due)
    content = _saved_index(shard, entry, members=members)
    if content is not None:
        rows = np.frombuffer(content, dtype="<i8").astype(np.int64).reshape(len(due), 2 * len(members))
        if _lies_within(rows, num_bytes):
            return rows
    rows = _rebuilt(shard, entry, members=members, due=due)
    content = index_content(rows)
    if hashlib.sha256(content).hexdigest() != entry.index_sha256:
        logger.warning("%s is not indexed as the manifest says (index_sha256); the tar's own headers are used", shard)
        return rows
    try:
        _save_index(index_path(shard), content)
    except OSError as error:
        logger.info("the index of %s stays in memory: %s", shard, error.strerror)
    return rows


def _saved_index(shard: Path, entry: ShardEntry, *, members: Sequence[str]) -> bytes | None:
    """The file of an index, None unless it is the one that the manifest names."""
    path, num_bytes = index_path(shard), index_num_bytes(entry, members)
    try:
        content = read_regular(path, max_bytes=num_bytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read (%s); it is made anew from the tar", path, error.strerror)
        return None
    if len(content) == num_bytes and hashlib.sha256(content).hexdigest() == entry.index_sha256:
        return content
    logger.warning("%s is not the index that the manifest names (index_sha256); it is made anew from the tar", path)
    return None


def _rebuilt(shard: Path, entry: ShardEntry, *, members: Sequence[str], due: range) -> NDArray[np.int64]:
    logger.info("indexing %s: one pass over the headers of %d samples", shard, entry.num_samples)
    return index_shard(shard, members=members, due=due)


def _lies_within(rows: NDArray[np.int64], num_bytes: int) -> bool:
    """Whether all that an index names is in a file of `num_bytes`, and together is no more than that.

    No sum of two of its numbers is taken in int64, where it could overflow.
    """
    offsets, sizes = rows[:, ::2], rows[:, 1::2]
    if (offsets < 0).any() or (sizes < 0).any() or (sizes > num_bytes).any():
        return False
    return bool((offsets <= num_bytes - sizes).all() and sizes.sum(dtype=np.float64) <= num_bytes)
