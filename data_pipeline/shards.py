"""Shards: plain WebDataset tars; the same samples give the same bytes, and an index makes them readable at random.

Comes in: samples, in the order of their `index`. Goes out: `shard-00000.tar`, ... that any WebDataset reader opens
(`KEY.png`, `KEY.mask.png`, `KEY.json`), and beside each a `shard-00000.index.npz` that says where every member lies.
The index is a cache: it is rebuilt by one pass over the tar's headers where it is missing or belongs to another tar.
What may never happen: a byte that depends on the clock, the user or the machine, or a sample given out as another.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Final
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.io import ImageReadMode, decode_png
from webdataset import TarWriter

from data_pipeline.errors import UserError
from data_pipeline.manifest import Manifest, ShardEntry, load_manifest
from data_pipeline.sample import Batch, Sample

logger = logging.getLogger(__name__)

MEMBERS: Final = ("json", "mask.png", "png")  # in the order in which they lie in the tar
_BLOCK = 512  # a tar's members start at multiples of this, each behind a header of the same size
_COMPRESS_LEVEL = (
    3  # 32x32 photos: as small as level 9 within 1 %, and quicker to encode and decode than Pillow's default of 6
)


@dataclass(frozen=True)
class EncodedSample:
    """One sample as it lies in a shard: the bytes of `KEY.json`, `KEY.mask.png` and `KEY.png`."""

    index: int
    json: bytes
    mask_png: bytes
    image_png: bytes

    @property
    def key(self) -> str:
        return f"{self.index:08d}"


def encode(sample: Sample) -> EncodedSample:
    """The bytes of one sample; pure, so that a build may call it in worker processes."""
    labels = {"index": sample.index, "label_base": sample.label_base, "label_overlay": sample.label_overlay}
    return EncodedSample(
        index=sample.index,
        json=json.dumps(labels).encode(),
        mask_png=_encode_png(sample.mask),
        image_png=_encode_png(sample.image),
    )


def _encode_png(pixels: NDArray[np.uint8]) -> bytes:
    assert pixels.dtype == np.uint8
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=_COMPRESS_LEVEL, optimize=False)
    return buffer.getvalue()


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
    in_order = _check_order(encoded)
    entries: list[ShardEntry] = []
    for first in in_order:
        shard = chain([first], islice(in_order, num_samples_per_shard - 1))
        entries.append(_write_shard(shard, directory / f"shard-{len(entries):05d}.tar"))
    return tuple(entries)


def _check_order(encoded: Iterable[EncodedSample]) -> Iterator[EncodedSample]:
    for expected, sample in enumerate(encoded):
        if sample.index != expected:
            raise ValueError(
                f"sample {sample.index} came where sample {expected} was due; write samples in index order"
            )
        yield sample


def _write_shard(encoded: Iterable[EncodedSample], path: Path) -> ShardEntry:
    rows: list[list[int]] = []
    with path.open("wb") as file:
        # A fixed time, owner and mode: nothing in the tar depends on when, where and by whom it was written. A time in
        # whole seconds also keeps every header to the one block that `_layout` counts.
        with TarWriter(file, encoder=False, mtime=0, user="", group="", mode=0o444) as writer:
            for sample in encoded:
                members = dict(zip(MEMBERS, (sample.json, sample.mask_png, sample.image_png), strict=True))
                rows.append(_layout(writer.tarstream.offset, [len(member) for member in members.values()]))
                writer.write({"__key__": sample.key, **members})
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    _save_index(index_path(path), np.array(rows, dtype=np.int64), shard_sha256=sha256)
    return ShardEntry(name=path.name, num_samples=len(rows), num_bytes=path.stat().st_size, sha256=sha256)


def _layout(start: int, sizes: Sequence[int]) -> list[int]:
    """Offset and size of each member's bytes, when the members are appended to a tar that ends at `start`."""
    row: list[int] = []
    for size in sizes:
        row += [start + _BLOCK, size]
        start += _BLOCK + -(-size // _BLOCK) * _BLOCK
    return row


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


def index_shard(path: Path) -> NDArray[np.int64]:
    """Where the members of every sample lie, by one pass over the headers of a tar.

    Returns (num_samples, 6) int64, samples in stored order: offset and size of the bytes of each of `MEMBERS`. Raises
    `UserError` where the file is not a whole tar or a sample lacks a member.
    """
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                key, _, extension = member.name.partition(".")
                samples.setdefault(key, {})[extension] = (member.offset_data, member.size)
    except tarfile.TarError as error:
        raise UserError(f"{path} is not a whole tar file ({error}); copy it or build the dataset again") from None
    rows = np.empty((len(samples), 2 * len(MEMBERS)), dtype=np.int64)
    for row, (key, members) in zip(rows, samples.items(), strict=True):
        for missing in set(MEMBERS) - members.keys():
            raise UserError(f"{path}: sample {key} has no {key}.{missing}; build the dataset again")
        row[:] = [number for name in MEMBERS for number in members[name]]
    return rows


def load_index(shard: Path, entry: ShardEntry) -> NDArray[np.int64]:
    """The index of one shard as `index_shard` returns it: from its file, or rebuilt where that is missing or stale.

    An index names the sha256 of its tar, and is stale where the manifest names another. A rebuilt index is kept for the
    next reader if the directory can be written to.
    """
    path = index_path(shard)
    try:
        with np.load(path) as saved:
            if str(saved["shard_sha256"]) == entry.sha256:
                rows: NDArray[np.int64] = saved["rows"]
                return rows
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        pass  # missing, or not an index: rebuilt like a stale one
    logger.info("indexing %s: one pass over the headers of %d samples, once", shard, entry.num_samples)
    rows = index_shard(shard)
    if len(rows) != entry.num_samples:
        raise UserError(
            f"{shard} holds {len(rows)} samples but the manifest says {entry.num_samples}; build the dataset again"
        )
    try:
        _save_index(path, rows, shard_sha256=entry.sha256)
    except OSError as error:
        logger.info("the index of %s stays in memory: %s", shard, error.strerror)
    return rows


class SampleStore:
    """Every sample of a dataset by its index: maps the shards into memory as they are first touched.

    The mapping needs no open file and no seek, and pages are shared with all other readers on the machine.

    Raises `UserError` at once where a shard is missing or its size is not the manifest's.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: Manifest = load_manifest(directory)
        self._paths = [directory / entry.name for entry in self.manifest.shards]
        for path, entry in zip(self._paths, self.manifest.shards, strict=True):
            _check_size(path, entry)
        rows = [load_index(path, entry) for path, entry in zip(self._paths, self.manifest.shards, strict=True)]
        self._rows = np.concatenate([np.empty((0, 2 * len(MEMBERS)), dtype=np.int64), *rows])
        self._shard_ends = np.cumsum([len(shard_rows) for shard_rows in rows], dtype=np.int64)
        self._mapped: dict[int, memoryview] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        """One sample, decoded. Raises `UserError` where it does not decode, `IndexError` past the end."""
        batch = self.batch(np.array([range(len(self))[index]]), step=0, epoch=0)
        return Sample(
            index=int(batch.index_B[0]),
            image=batch.images_BCHW[0].permute(1, 2, 0).contiguous().numpy(),
            mask=batch.masks_BHW[0].numpy(),
            label_base=int(batch.label_base_B[0]),
            label_overlay=int(batch.label_overlay_B[0]),
        )

    def encoded(self, index: int) -> EncodedSample:
        """The stored bytes of one sample, neither decoded nor checked."""
        json_at, json_size, mask_at, mask_size, image_at, image_size = self._rows[index].tolist()
        data = self._map_shard(int(np.searchsorted(self._shard_ends, index, side="right")))
        return EncodedSample(
            index=index,
            json=bytes(data[json_at : json_at + json_size]),
            mask_png=bytes(data[mask_at : mask_at + mask_size]),
            image_png=bytes(data[image_at : image_at + image_size]),
        )

    def batch(self, indices: NDArray[np.int64], *, step: int, epoch: int) -> Batch:
        """The samples at `indices`, decoded, in that order; `step` and `epoch` are passed on. Shapes as in `Batch`.

        Raises `UserError` that names shard and key where a sample does not decode or is not what the index says.
        """
        num_channels, height, width = self.manifest.image_shape
        images: list[torch.Tensor] = []
        masks: list[torch.Tensor] = []
        labels: list[tuple[int, int]] = []
        shards = np.searchsorted(self._shard_ends, indices, side="right").tolist()
        for index, shard, row in zip(indices.tolist(), shards, self._rows[indices].tolist(), strict=True):
            json_at, json_size, mask_at, mask_size, image_at, image_size = row
            data = self._map_shard(shard)
            try:
                stored = json.loads(str(data[json_at : json_at + json_size], "utf-8"))
                if stored["index"] != index:
                    raise ValueError(f"it says that it is sample {stored['index']}")
                labels.append((stored["label_base"], stored["label_overlay"]))
                # Straight from the mapped file: the compressed bytes are never copied.
                image_png = torch.frombuffer(data, dtype=torch.uint8, offset=image_at, count=image_size)
                mask_png = torch.frombuffer(data, dtype=torch.uint8, offset=mask_at, count=mask_size)
                image = decode_png(image_png, ImageReadMode.RGB)
                mask = decode_png(mask_png, ImageReadMode.GRAY)
                if image.shape != (num_channels, height, width) or mask.shape != (1, height, width):
                    raise ValueError(
                        f"picture {tuple(image.shape)} or mask {tuple(mask.shape)} is not as in the manifest"
                    )
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise UserError(self._bad_sample(index, shard, error)) from None
            images.append(image)
            masks.append(mask)
        labels_B2 = torch.tensor(labels, dtype=torch.int64)
        return Batch(
            step=step,
            epoch=epoch,
            index_B=torch.from_numpy(indices.astype(np.int64)),
            images_BCHW=torch.stack(images),
            masks_BHW=torch.cat(masks),
            label_base_B=labels_B2[:, 0].contiguous(),
            label_overlay_B=labels_B2[:, 1].contiguous(),
        )

    def _map_shard(self, shard: int) -> memoryview:
        """The bytes of one shard; torch's mapping closes its file, so that a thousand shards hold no descriptor."""
        if (data := self._mapped.get(shard)) is None:
            size = self.manifest.shards[shard].num_bytes
            mapped = torch.from_file(str(self._paths[shard]), shared=False, size=size, dtype=torch.uint8)
            data = self._mapped[shard] = mapped.numpy().data
        return data

    def _bad_sample(self, index: int, shard: int, error: Exception) -> str:
        reason = f"no field {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        return (
            f"{self._paths[shard]}: sample {index:08d} does not decode ({reason}); "
            f"run `python -m data_pipeline verify {self.directory}` and build the dataset again"
        )


def _check_size(path: Path, entry: ShardEntry) -> None:
    try:
        num_bytes = path.stat().st_size
    except OSError:
        raise UserError(f"{path} is named in the manifest but missing; copy it or build the dataset again") from None
    if num_bytes != entry.num_bytes:
        raise UserError(
            f"{path} has {num_bytes} bytes but the manifest says {entry.num_bytes}; copy it or build the dataset again"
        )
