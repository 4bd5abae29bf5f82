"""Random access to a built dataset: any samples by their indices, decoded from memory-mapped shards.

Comes in: where a dataset lies, and indices of samples. Goes out: their pictures or sounds, masks and labels, as stored.
A sample that cannot be read is told in its place, with the reason, and never stops the others.

Invariants: no sample is given out under another's index, since the tar's own header of each member is compared with its
key when the sample is first read. Nothing is read outside a file that is shorter than it should be. Nothing is decoded
that is larger than the manifest says.

Shapes: B samples asked for, C channels, H height, W width.
"""

from __future__ import annotations

import json
import logging
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.audio.waveform import decode_wav
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import MASK_OUTSIDE, NO_LABEL, BadSample, Sample
from data_pipeline.overlays import Overlay
from data_pipeline.overlays.registry import load_overlay
from data_pipeline.remote.cache import RemoteConfig, RemoteShards, is_remote
from data_pipeline.storage.manifest import OVERLAY_NAME, Manifest, load_manifest
from data_pipeline.storage.png import decode_pngs
from data_pipeline.storage.shards import MISSING, EncodedSample, load_index, names_member

logger = logging.getLogger(__name__)

_MEND = "copy it again or build the dataset again"
_NUM_ATTEMPTS = 5
_MIN_SHARE = 0.1  # of a local dataset; what is less is not worth the memory that its list of bad samples takes
_REMOTE = RemoteConfig()


@dataclass(frozen=True)
class Stored:
    """Some samples as stored, in the order in which they were asked for.

    Attributes:
        index_B: (B,) int64, their indices.
        pictures_BCHW: (B, C, H, W) uint8; None for sounds.
        clips: B waveforms (T,) of their own lengths, int16, or float32 where something was mixed in; None for pictures.
        masks_BHW: (B, H, W) uint8, zeros where nothing was drawn; None for sounds.
        label_base_B, label_overlay_B: (B,) int64; `NO_LABEL` where there is none.
        bad: by their places in the batch, the samples that could not be read: black, or one point of silence, without
            labels.
        read_seconds: of what it took to get them, the part before anything was decoded.
    """

    index_B: Tensor
    pictures_BCHW: Tensor | None
    clips: tuple[Tensor, ...] | None
    masks_BHW: Tensor | None
    label_base_B: Tensor
    label_overlay_B: Tensor
    bad: Mapping[int, BadSample]
    read_seconds: float = 0.0


class _Files(Protocol):
    """The files of a dataset on this machine. `max_shards` of them may be there at a time (None: all)."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def max_shards(self) -> int | None: ...

    def path(self, name: str) -> Path: ...

    def prefetch(self, names: Iterable[str]) -> None: ...


@dataclass(frozen=True)
class _LocalFiles:
    directory: Path
    manifest: Manifest
    max_shards: None = None

    def path(self, name: str) -> Path:
        return self.directory / name

    def prefetch(self, names: Iterable[str]) -> None:
        pass  # they are here


class SampleStore:
    """Every sample of a dataset by its index: maps the shards into memory as they are first touched.

    A mapping needs no open file and no seek, and its pages are shared with all other readers on the machine. Shards of
    a remote dataset are fetched when they are first touched.

    Attributes:
        location: the local directory, or the remote location as it was given.
        manifest: what the dataset says of itself.
        overlay: what a reader draws on the samples, on the CPU; None unless the dataset's overlay is online.
        known_bad: samples that are not whole in the local shards, found without reading them; () for a remote dataset.
        shard_ends: (num_shards,) int64, the index behind the last sample of each shard.

    Raises `UserError` at once if the manifest, a shard or the overlay of a local dataset is missing, or more than nine
    tenths of its bytes or of its samples are.
    """

    def __init__(self, location: str | Path, *, remote: RemoteConfig = _REMOTE) -> None:
        self.location: str | Path
        self._files: _Files
        if is_remote(location):
            self.location = str(location)
            self._files = RemoteShards(self.location, config=remote)
        else:
            self.location = Path(location)
            self._files = _LocalFiles(self.location, load_manifest(self.location))
        self.manifest: Manifest = self._files.manifest
        self.overlay: Overlay | None = None
        if self.manifest.overlay is not None and self.manifest.is_online:
            self.overlay = load_overlay(self._files.path(OVERLAY_NAME), sha256=self.manifest.overlay.sha256)
        self._members = self.manifest.members
        self._ends = list(accumulate(entry.num_samples for entry in self.manifest.shards))
        self.shard_ends: NDArray[np.int64] = np.array(self._ends, dtype=np.int64)
        num_samples = self._ends[-1] if self._ends else 0
        # Offset and size of each member of each sample; zeros, which take no memory, until a shard is first touched.
        self._rows = np.zeros((num_samples, 2 * len(self._members)), dtype=np.int64)
        self._is_indexed = [False] * len(self._ends)
        # Whether the tar's headers were found to say the same as `_rows`, by sample.
        self._is_checked: NDArray[np.bool_] = np.zeros(num_samples, dtype=np.bool_)
        most = self.manifest.max_member_bytes
        self._max_bytes = [(extension.encode(), most[extension]) for extension in self._members]
        self._mapped: dict[int, tuple[Path, memoryview]] = {}
        self.known_bad: tuple[BadSample, ...] = ()
        if isinstance(self._files, _LocalFiles):
            self.known_bad = self._index_all([self._files.path(entry.name) for entry in self.manifest.shards])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": {}}  # another process maps the shards anew

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def max_shards(self) -> int | None:
        """How many shards can be on this machine at a time; None where all can."""
        return self._files.max_shards

    def prefetch(self, shards: Iterable[int]) -> None:
        """Fetch shards of a remote dataset in the background, in this order, instead of those asked for before."""
        self._files.prefetch(self.manifest.shards[shard].name for shard in shards)

    def __getitem__(self, index: int) -> Sample:
        """One sample, decoded. Raises `UserError` where it cannot be read, `IndexError` past the end."""
        stored = self.decode(np.array([range(len(self))[index]], dtype=np.int64))
        for bad in stored.bad.values():
            raise UserError(
                f"{self.location}: sample {bad.key} in {bad.shard} cannot be read ({bad.reason}); "
                f"find all that is wrong with `python -m data_pipeline verify`, then {_MEND}"
            )
        content: NDArray[Any]
        mask = None
        if stored.pictures_BCHW is not None:
            content = stored.pictures_BCHW[0].permute(1, 2, 0).contiguous().numpy()
            if stored.masks_BHW is not None and "mask.png" in self._members:
                mask = stored.masks_BHW[0].numpy()
        else:
            assert stored.clips is not None
            content = stored.clips[0].numpy()
        return Sample(
            index=int(stored.index_B[0]),
            content=content,
            mask=mask,
            label_base=int(stored.label_base_B[0]),
            label_overlay=int(stored.label_overlay_B[0]),
        )

    def encoded(self, index: int) -> EncodedSample:
        """The stored bytes of one sample, not decoded; what is missing in its shard is missing here.

        Raises `IndexError` below 0 and past the end, `UserError` if the shard's index points at something else.
        """
        if not 0 <= index < len(self._rows):
            raise IndexError(f"sample {index} is not one of {len(self._rows)}")
        data = self._map_shard(self._shard_of(index))
        if not self._is_checked[index] and (wrong := self._check(index, data)) is not None:
            raise UserError(f"{self.location}: sample {index:08d} cannot be read ({wrong}); {_MEND}")
        row = self._rows[index].tolist()
        members = {
            extension: bytes(data[offset : offset + size])
            for extension, offset, size in zip(self._members, row[::2], row[1::2], strict=True)
            if offset != MISSING
        }
        return EncodedSample(index, members)

    def decode(self, indices: NDArray[np.int64]) -> Stored:
        """The samples at `indices`, (B,) int64, in that order. Raises `IndexError` below 0 and past the end."""
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"samples {indices.min()} to {indices.max()} are not all among {len(self)}")
        began = time.perf_counter()
        shards = np.searchsorted(self.shard_ends, indices, side="right")
        data = {shard: self._map_shard(shard) for shard in np.unique(shards).tolist()}
        # A member that is missing becomes an empty view, so that only its own decoding fails.
        views = [
            [view[offset : offset + size] for offset, size in zip(row[::2], row[1::2], strict=True)]
            for view, row in zip(map(data.__getitem__, shards.tolist()), self._rows[indices].tolist(), strict=True)
        ]
        untrusted: dict[int, str] = {}
        for place in np.flatnonzero(~self._is_checked[indices]).tolist():
            if (wrong := self._check(int(indices[place]), data[int(shards[place])])) is not None:
                untrusted[place] = wrong
                views[place] = [memoryview(b"")] * len(self._members)
        files = {name: [sample[number] for sample in views] for number, name in enumerate(self._members)}
        read_seconds = time.perf_counter() - began
        labels_B2, errors = _read_labels(files["json"], indices, *label_ranges(self.manifest))
        pictures_BCHW = masks_BHW = clips = None
        if "wav" in files:
            clips, wav_errors = _decode_clips(files["wav"])
            errors |= wav_errors
        else:
            num_channels, height, width = self.manifest.input_shape
            pictures_BCHW, png_errors = decode_pngs(files["png"], (num_channels, height, width))
            errors |= png_errors
            if "mask.png" in files:
                masks_B1HW, mask_errors = decode_pngs(files["mask.png"], (1, height, width))
                masks_BHW = masks_B1HW[:, 0]
                errors |= mask_errors
            else:
                masks_BHW = torch.full((len(views), height, width), MASK_OUTSIDE, dtype=torch.uint8)
        bad: dict[int, BadSample] = {}
        for place, error in sorted((errors | untrusted).items()):
            index = int(indices[place])
            bad[place] = self._bad_sample(index, self._what_is_missing(index) or error)
            labels_B2[place] = NO_LABEL
            if clips is not None:
                clips[place] = torch.zeros_like(clips[place][:1])
            if pictures_BCHW is not None and masks_BHW is not None:
                pictures_BCHW[place] = 0
                masks_BHW[place] = MASK_OUTSIDE
        return Stored(
            index_B=torch.from_numpy(indices.astype(np.int64)),
            pictures_BCHW=pictures_BCHW,
            clips=None if clips is None else tuple(clips),
            masks_BHW=masks_BHW,
            label_base_B=labels_B2[:, 0].contiguous(),
            label_overlay_B=labels_B2[:, 1].contiguous(),
            bad=bad,
            read_seconds=read_seconds,
        )

    def _shard_of(self, index: int) -> int:
        return bisect_right(self._ends, index)

    def _bad_sample(self, index: int, reason: str) -> BadSample:
        return BadSample(index, self.manifest.shards[self._shard_of(index)].name, reason)

    def _what_is_missing(self, index: int) -> str | None:
        """The reason why a sample is not whole in its shard, None if it is."""
        offsets = self._rows[index, ::2].tolist()
        missing = [f"{index:08d}.{name}" for name, at in zip(self._members, offsets, strict=True) if at == MISSING]
        return f"the shard holds no whole {' and no whole '.join(missing)}" if missing else None

    def _check(self, index: int, data: memoryview) -> str | None:
        """Compare what the index says of a sample with the headers in its tar, `data`; the first disagreement in words.

        A sample without one is not looked at again.
        """
        key, row = b"%08d." % index, iter(self._rows[index].tolist())
        for (extension, most), offset, size in zip(self._max_bytes, row, row, strict=True):
            if offset == MISSING:
                continue
            if not names_member(data, name=key + extension, offset=offset, size=size):
                return f"where its shard's index says that {(key + extension).decode()} lies, the tar says otherwise"
            if size > most:
                return f"{(key + extension).decode()} has {size} bytes, more than the {most} that it may have"
        self._is_checked[index] = True
        return None

    def _index_all(self, paths: Sequence[Path]) -> tuple[BadSample, ...]:
        """Find the rows of all shards of a local dataset; returns the samples that are not whole in them."""
        for path in paths:
            if not path.is_file():
                raise UserError(f"{path} is named in the manifest but missing or no regular file; {_MEND}")
        num_bytes, due = sum(path.stat().st_size for path in paths), sum(e.num_bytes for e in self.manifest.shards)
        if num_bytes < _MIN_SHARE * due:
            raise UserError(
                f"{self.location} holds only {num_bytes} of the {due} bytes that its manifest names; {_MEND}"
            )
        not_whole: list[NDArray[np.int64]] = []
        for shard, path in enumerate(paths):
            rows = self._load_rows(shard, path)
            not_whole.append(np.flatnonzero((rows == MISSING).any(axis=1)) + self._ends[shard] - len(rows))
        num_whole = len(self) - sum(map(len, not_whole))
        if num_whole < _MIN_SHARE * len(self):
            raise UserError(
                f"{self.location} holds only {num_whole} of the {len(self)} samples that it should; {_MEND}"
            )
        indices = [index for found in not_whole for index in found.tolist()]
        return tuple(self._bad_sample(index, self._what_is_missing(index) or "") for index in indices)

    def _load_rows(self, shard: int, path: Path) -> NDArray[np.int64]:
        entry = self.manifest.shards[shard]
        num_bytes = path.stat().st_size
        if num_bytes != entry.num_bytes:
            logger.warning("%s has %d bytes but the manifest says %d; %s", path, num_bytes, entry.num_bytes, _MEND)
        end = self._ends[shard]
        due = range(end - entry.num_samples, end)
        rows = self._rows[due.start : end]
        rows[:] = load_index(path, entry, members=self._members, due=due)
        self._is_indexed[shard] = True
        return rows

    def _map_shard(self, shard: int) -> memoryview:
        """The bytes of one shard, which is fetched and indexed if it was not touched before."""
        if (mapped := self._mapped.get(shard)) is not None:
            return mapped[1]
        name = self.manifest.shards[shard].name
        for _ in range(_NUM_ATTEMPTS):
            path = self._files.path(name)
            try:
                data = _map_file(path)
                if not self._is_indexed[shard]:
                    self._load_rows(shard, path)
            except FileNotFoundError:
                continue  # evicted by another process since the line before
            self._mapped[shard] = (path, data)
            self._let_go()
            return data
        raise UserError(f"{name} of {self.location} was removed {_NUM_ATTEMPTS} times before it could be read; {_MEND}")

    def _let_go(self) -> None:
        """Unmap shards that the cache has evicted, whose room on the disk is only then free, and the oldest above
        `max_shards`."""
        if isinstance(self._files, _LocalFiles):
            return
        mapped = list(self._mapped.items())
        gone = [shard for shard, (path, _) in mapped if not path.exists()]
        kept = [shard for shard, _ in mapped if shard not in gone]
        limit = max(1, self._files.max_shards or len(kept))
        for shard in gone + kept[:-limit]:
            self._mapped.pop(shard, None)


def label_ranges(manifest: Manifest) -> tuple[range, range]:
    """The base labels and the overlay labels that a stored sample may have; `NO_LABEL` alone where there are none."""
    names = manifest.label_names
    num_base, num_overlay = len(names.base), 0 if manifest.is_online else len(names.overlay)
    nothing = range(NO_LABEL, NO_LABEL + 1)
    return range(num_base) if num_base else nothing, range(num_overlay) if num_overlay else nothing


def _read_labels(
    files: Sequence[memoryview], indices: NDArray[np.int64], valid_base: range, valid_overlay: range
) -> tuple[Tensor, dict[int, str]]:
    """The labels in the samples' JSON, (B, 2) int64, and why a sample's cannot be read, by its place."""
    try:  # all at once, which is five times as fast as one by one
        table = np.array([_numbers(stored) for stored in json.loads(b"[" + b",".join(files) + b"]")])
        if table.shape == (len(files), 3) and table.dtype == np.int64 and (table[:, 0] == indices).all():
            base_B, overlay_B = table[:, 1], table[:, 2]
            if _all_within(base_B, valid_base) and _all_within(overlay_B, valid_overlay):
                return torch.from_numpy(table[:, 1:].copy()), {}
    except (ValueError, KeyError, TypeError):
        pass  # one of them is bad: found below
    labels_B2 = torch.full((len(files), 2), NO_LABEL, dtype=torch.int64)
    errors: dict[int, str] = {}
    for place, (file, index) in enumerate(zip(files, indices.tolist(), strict=True)):
        try:
            labels_B2[place] = torch.tensor(read_labels(bytes(file), index, valid_base, valid_overlay))
        except ValueError as error:
            errors[place] = str(error)
    return labels_B2, errors


def read_labels(text: bytes, index: int, valid_base: range, valid_overlay: range) -> tuple[int, int]:
    """`label_base` and `label_overlay` out of the JSON of sample `index`.

    Raises `ValueError` that says what is wrong.
    """
    try:
        stored_index, label_base, label_overlay = _numbers(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index:08d}.json does not decode ({error!r})") from None
    if stored_index != index:
        raise ValueError(f"{index:08d}.json says that it is sample {stored_index!r}")
    for name, label, valid in (
        ("label_base", label_base, valid_base),
        ("label_overlay", label_overlay, valid_overlay),
    ):
        if not isinstance(label, int) or label not in valid:
            raise ValueError(f"{name} is {label!r}, not one of {valid.start} to {valid.stop - 1}")
    return label_base, label_overlay


def _numbers(stored: Any) -> tuple[Any, Any, Any]:
    return stored["index"], stored["label_base"], stored["label_overlay"]


def _all_within(labels_B: NDArray[np.int64], valid: range) -> bool:
    return bool(((labels_B >= valid.start) & (labels_B < valid.stop)).all())


def _decode_clips(files: Sequence[memoryview]) -> tuple[list[Tensor], dict[int, str]]:
    """The waveforms of WAV files, and why one does not decode, by its place; there it is one point of silence."""
    clips: list[Tensor | None] = []
    errors: dict[int, str] = {}
    for place, file in enumerate(files):
        try:
            # Torch needs numbers at multiples of their own size, and a WAV's header may be of any length.
            clips.append(torch.from_numpy(np.require(decode_wav(file), requirements="A")))
        except ValueError as error:
            clips.append(None)
            errors[place] = str(error)
    dtype = next((clip.dtype for clip in clips if clip is not None), torch.int16)
    return [torch.zeros(1, dtype=dtype) if clip is None else clip for clip in clips], errors


def _map_file(path: Path) -> memoryview:
    """The bytes of a file as memory that may be written to, which changes no file. No descriptor stays open."""
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        return memoryview(bytearray())
    try:
        mapped = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None
    return mapped.numpy().data
