"""Write shards, and find their members: plain WebDataset tars, each with an index for random access.

Samples are written in the order of their `index` to `shard-00000.tar`, ... which any WebDataset reader can open. A
sample has the members `KEY.json` and `KEY.wav` or `KEY.png`, and also `KEY.mask.png` if an overlay is drawn on it. The
file `shard-00000.index` beside a shard holds the offset and size of every member. The index is only a cache: if it is
missing or does not have the sha256 in the manifest, one pass over the tar's headers rebuilds it.

Guarantees: the same samples give the same bytes on any machine, for any user, at any time. No sample is returned in
place of another: the manifest has the sha256 of each index, and `is_member_at` compares each offset with the tar's own
header.

An index file is one array of little-endian int64: for each sample in order, the offset and size of each member in the
order of `Manifest.members`. Its size therefore follows from the manifest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from webdataset import TarWriter

from data_pipeline.audio.waveform import encode_wav
from data_pipeline.core.sample import BASE, NO_LABEL, OVERLAY, Sample, sample_key
from data_pipeline.storage.files import map_regular, read_regular, regular_size
from data_pipeline.storage.manifest import ShardEntry
from data_pipeline.storage.png import encode_png
from data_pipeline.storage.tar_headers import BLOCK, TarMember, padded, read_contents

logger = logging.getLogger(__name__)

MISSING = -1  # offset and size, in an index, of a member that is not in the tar


@dataclass(frozen=True)
class EncodedSample:
    """One sample as stored in a shard: the bytes of its members, by the extension after `KEY.`."""

    index: int
    members: Mapping[str, bytes]

    @property
    def key(self) -> str:
        return sample_key(self.index)


def encode(sample: Sample, *, sample_rate: int | None = None) -> EncodedSample:
    """Return the stored form of one sample.

    `sample_rate` is in points a second for a sound, None for a picture.
    """
    # Always both of these, and in this order: so samples with no other label have the bytes that they had before.
    labels = {BASE: NO_LABEL, OVERLAY: NO_LABEL, **sample.labels}
    numbers = {"index": sample.index, **{f"label_{name}": label for name, label in labels.items()}}
    members = {"json": json.dumps(numbers).encode()}
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
    """Return the file name of a shard of a built dataset.

    Examples:
        >>> shard_name(7)
        'shard-00007.tar'
    """
    return f"shard-{number:05d}.tar"


def write_shards(
    encoded: Iterable[EncodedSample], directory: Path, *, num_samples_per_shard: int
) -> tuple[ShardEntry, ...]:
    """Write samples as `directory/shard-00000.tar`, ... with an index beside each. Return the manifest's entries.

    Samples must come in the order of their index, from 0 without a gap, because the index of a sample is its number in
    the dataset; raises `ValueError` if they do not. Holds at most one sample in memory.
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
    """Write one shard of at least one sample, and its index beside it. Return its entry in the manifest.

    Samples must come in the order of their index without a gap, and all must have the same members; raises `ValueError`
    if not. Holds at most one sample in memory. The bytes are on disk when this returns.
    """
    rows: list[list[int]] = []
    with path.open("wb") as file:
        # Fixed time, owner and mode: the same samples give the same bytes. A time in whole seconds also keeps a header
        # to one block, as `_layout` assumes.
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
    """Yield the samples; raise `ValueError` if one is out of order or has other members than the first."""
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
        raise ValueError("a shard needs at least one sample")


def _out_of_order(index: int, *, due: int) -> ValueError:
    return ValueError(f"sample {index} came instead of sample {due}; write samples in index order")


def _layout(start: int, sizes: Sequence[int]) -> list[int]:
    """Return the offset and size of each member if the members are appended to a tar that ends at `start`."""
    row: list[int] = []
    for size in sizes:
        row += [start + BLOCK, size]
        start += BLOCK + padded(size)
    return row


def index_path(shard: Path) -> Path:
    """Return the path of the index of a shard: `shard-00000.index` for `shard-00000.tar`."""
    return shard.with_name(f"{shard.stem}.index")


def index_content(rows: NDArray[np.int64]) -> bytes:
    """Return the content of an index file."""
    return rows.astype("<i8").tobytes()


def index_row_bytes(members: Sequence[str]) -> int:
    """Return the size of the row of a sample in an index file: an offset and a size for each member."""
    return 16 * len(members)


def index_num_bytes(entry: ShardEntry, members: Sequence[str]) -> int:
    """Return the size of an index file."""
    return index_row_bytes(members) * entry.num_samples


def _save_index(path: Path, content: bytes) -> None:
    """Write an index to a new file and rename it to `path`, so that nothing is written through a link."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def index_shard(path: Path, *, members: Sequence[str], due: range) -> NDArray[np.int64]:
    """Find the members of the samples with the indices `due` in a shard, in one pass over the headers of the tar.

    Returns (len(due), 2 * len(members)) int64: offset and size of each member, or `MISSING` if the file does not hold
    the whole member. Finds samples by their keys, so members may lie anywhere in the tar; ignores other files in it.
    From a file that is cut short, damaged or not a tar, returns the members before the damage. Raises `OSError` if
    `path` is not a regular file.
    """
    with map_regular(path) as data:
        return index_members(read_contents(data).members, members=members, due=due)


def index_members(found: Iterable[TarMember], *, members: Sequence[str], due: range) -> NDArray[np.int64]:
    """Do `index_shard` on the members of a tar, in stored order."""
    rows = np.full((len(due), 2 * len(members)), MISSING, dtype=np.int64)
    columns = {extension: 2 * number for number, extension in enumerate(members)}
    for member in found:
        key, _, extension = member.name.partition(".")
        column = columns.get(extension)
        if column is None or not (key.isascii() and key.isdigit()):
            continue
        index = int(key)
        if index in due and key == sample_key(index):
            rows[index - due.start, column : column + 2] = member.offset, member.size
    return rows


def load_index(shard: Path, entry: ShardEntry, *, members: Sequence[str], due: range) -> tuple[NDArray[np.int64], bool]:
    """Return the index of one shard in the form of `index_shard`, and whether its file holds it.

    An index with the sha256 in the manifest is mapped from its file. Otherwise, or if the tar has another size, it is
    rebuilt from the tar, and saved for the next reader if its sha256 is right and the directory is writable.
    """
    if (num_bytes := shard.stat().st_size) == entry.num_bytes:
        content = _saved_index(shard, entry, members=members)
        if content is not None and _lies_within(_rows_in(content, members), num_bytes):
            mapped = map_index(shard, entry, members=members)
            return (_rows_in(content, members), False) if mapped is None else (mapped, True)
    logger.info("indexing %s: one pass over the headers of %d samples", shard, entry.num_samples)
    rows = index_shard(shard, members=members, due=due)
    if num_bytes != entry.num_bytes:
        return rows, False
    content = index_content(rows)
    if hashlib.sha256(content).hexdigest() != entry.index_sha256:
        logger.warning(
            "the index of %s differs from the manifest's (index_sha256); the tar's own headers are used", shard
        )
        return rows, False
    try:
        _save_index(index_path(shard), content)
    except OSError as error:
        logger.info("the index of %s stays in memory: %s", shard, error.strerror)
        return rows, False
    return rows, True


def map_index(shard: Path, entry: ShardEntry, *, members: Sequence[str]) -> NDArray[np.int64] | None:
    """Map the index file of a shard into memory; None if it has another size than it should, or cannot be read.

    Does not compare it with the manifest, as `load_index` does.
    """
    path, num_bytes = index_path(shard), index_num_bytes(entry, members)
    if regular_size(path) != num_bytes or sys.byteorder != "little":
        return None
    try:
        mapped = torch.from_file(str(path), shared=False, size=num_bytes // 8, dtype=torch.int64)
    except RuntimeError:
        return None
    rows: NDArray[np.int64] = mapped.numpy().reshape(entry.num_samples, 2 * len(members))
    return rows


def _rows_in(content: bytes, members: Sequence[str]) -> NDArray[np.int64]:
    return np.frombuffer(content, dtype="<i8").astype(np.int64).reshape(-1, 2 * len(members))


def _saved_index(shard: Path, entry: ShardEntry, *, members: Sequence[str]) -> bytes | None:
    """Return the content of an index file; None if it does not have the sha256 in the manifest."""
    path, num_bytes = index_path(shard), index_num_bytes(entry, members)
    try:
        content = read_regular(path, max_bytes=num_bytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read (%s); it is rebuilt from the tar", path, error.strerror)
        return None
    if len(content) == num_bytes and hashlib.sha256(content).hexdigest() == entry.index_sha256:
        return content
    logger.warning("%s is not the index that the manifest names (index_sha256); it is rebuilt from the tar", path)
    return None


def _lies_within(rows: NDArray[np.int64], num_bytes: int) -> bool:
    """Return whether all members of an index lie in a file of `num_bytes`, and are not larger together.

    Does not add two of its int64 numbers, because the sum could overflow.
    """
    offsets, sizes = rows[:, ::2], rows[:, 1::2]
    if (offsets < 0).any() or (sizes < 0).any() or (sizes > num_bytes).any():
        return False
    return bool((offsets <= num_bytes - sizes).all() and sizes.sum(dtype=np.float64) <= num_bytes)
