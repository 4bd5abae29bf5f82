"""Read every byte of a dataset, local or remote, and report every problem by shard and key.

The dataset may come from a stranger. Invariants:

- Only regular files are read.
- A shard is mapped into memory, and never read as a whole.
- No member is decoded that is larger than the manifest allows.
- At most one shard of a remote dataset is on this machine at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import logging
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from data_pipeline.audio.waveform import decode_wav
from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE, Sample, sample_key
from data_pipeline.loading.decode import decode, decode_label, label_ranges
from data_pipeline.overlays import PixelOverlay
from data_pipeline.overlays.registry import kind_of, load_overlay
from data_pipeline.remote.cache import RemoteConfig, fetch_manifest, fetched, is_remote
from data_pipeline.remote.fetch import Expected
from data_pipeline.storage.files import map_regular, read_regular
from data_pipeline.storage.manifest import (
    MANIFEST_NAME,
    OVERLAY_NAME,
    SHARD_TABLE_NAME,
    SOURCE_DIGESTS_NAME,
    Manifest,
    ShardEntry,
    dataset_directory,
    load_manifest,
)
from data_pipeline.storage.png import wrong_size
from data_pipeline.storage.shard_list import ListedShards, ShardList, ShardTable
from data_pipeline.storage.shards import index_content, index_members, index_num_bytes, index_path
from data_pipeline.storage.source_digests import check_source_digests, num_digest_bytes
from data_pipeline.storage.store import SampleStore
from data_pipeline.storage.tar_headers import TarMember, read_contents, tar_end
from data_pipeline.storage.tar_index import has_remote_tars, tar_ranges
from data_pipeline.storage.totals import Totals

logger = logging.getLogger(__name__)

_NUM_ZEROS_AT_END = 2 * tarfile.BLOCKSIZE  # zero bytes at the end of every whole tar
_MASK_LEVELS = torch.tensor([MASK_OUTSIDE, MASK_BOX, MASK_OBJECT], dtype=torch.uint8)
_LOUDEST = 1 << 20  # times full scale; `Totals` adds up points as whole numbers of 64 bits
_REMOTE = RemoteConfig()
_SLACK = 1 << 20  # bytes by which an index may be too long and is still fetched, so that its hash can be compared
_BLOCK = 1 << 20
_CHUNK = 256  # pictures of tars that are decoded at a time


@dataclass(frozen=True)
class DatasetProblem:
    """One problem of a dataset: the file, the key of the sample if it concerns one sample, and a description."""

    file: str
    key: str | None
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {f'{self.key}: ' if self.key else ''}{self.what}"


class Verification:
    """A check of a dataset, in a local directory or at a remote location.

    Attributes:
        location: the location as given.
        manifest: the manifest of the dataset.
        num_problems, num_sound, num_bytes: the number of problems, intact samples, and bytes of shards so far.

    The constructor raises `UserError` if `location` holds no dataset, or if the table of its shards is wrong.
    """

    def __init__(self, location: str | Path, *, remote: RemoteConfig = _REMOTE) -> None:
        self.location = location
        self._remote = remote
        self._directory = None if is_remote(location) else Path(location)
        self.manifest = (
            fetch_manifest(str(location), config=remote) if self._directory is None else load_manifest(self._directory)
        )
        self._shards: ShardList = ListedShards(self.manifest.shards)
        if (table := self.manifest.shard_table) is not None:
            with self._file(SHARD_TABLE_NAME, Expected(sha256=table.sha256)) as path:
                self._shards = ShardTable(path, self.manifest)
        self.num_problems = self.num_sound = self.num_bytes = 0

    def problems(self) -> Iterator[DatasetProblem]:
        """Yield every problem, in the order of the shards. If there is none, each byte is as it was built.

        Checks:

        - Each shard has the size and sha256 in the manifest, and its index is right.
        - Each tar is whole and holds the expected samples in order, each with its members side by side.
        - Pictures or sounds, masks and labels decode and fit the manifest.
        - Counts, mean and std in the manifest agree with the samples.
        - The source digests and the online overlay are right.

        For tars of others: each has the size that it had when it was indexed, and a local one is whole and holds
        nothing behind its end mark. Its own headers confirm the place of each picture, each picture decodes, and the
        counts of the labels agree with the manifest.
        """
        self.num_problems = self.num_sound = self.num_bytes = 0
        for problem in self._problems() if self.manifest.tars is None else self._problems_of_tars():
            self.num_problems += 1
            yield problem

    def _problems(self) -> Iterator[DatasetProblem]:
        manifest = self.manifest
        totals = Totals({name: len(label.classes) for name, label in manifest.stored_labels.items()})
        first_index, is_sound = 0, True
        name = self.location if self._directory is None else self._directory.name
        with Progress(f"verifying {name}", total=manifest.num_samples) as progress:
            for entry in self._shards:
                due = range(first_index, first_index + entry.num_samples)
                for key, what in self._shard_problems(entry, due, totals):
                    is_sound = False
                    yield DatasetProblem(entry.name, key, what)
                first_index = due.stop
                progress.advance(entry.num_samples)
        for path in sorted(self._directory.glob("*.tar")) if self._directory is not None else ():
            if self._shards.number(path.name) is None:
                yield DatasetProblem(path.name, None, f"is not listed in {MANIFEST_NAME}")
        if manifest.is_online and (wrong := self._overlay_problem()) is not None:
            yield DatasetProblem(OVERLAY_NAME, None, wrong)
        if manifest.source_digests_sha256 is not None and (wrong := self._digests_problem()) is not None:
            yield DatasetProblem(SOURCE_DIGESTS_NAME, None, wrong)
        if is_sound:
            yield from self._wrong_counts(totals.counts)
            for field in ("mean", "std"):
                if (said := getattr(manifest, field)) != (found := getattr(totals, field)):
                    yield DatasetProblem(MANIFEST_NAME, None, f"{field} is {said}, but the samples give {found}")

    def _wrong_counts(self, counts: Mapping[str, tuple[int, ...]]) -> Iterator[DatasetProblem]:
        """Yield a problem for each label whose classes have other counts than the manifest says."""
        for name, label in self.manifest.stored_labels.items():
            if label.counts != counts[name]:
                field = f"more_labels.{name}.counts" if name in self.manifest.more_labels else f"counts_{name}"
                what = f"{field} is {label.counts}, but the samples give {counts[name]}"
                yield DatasetProblem(MANIFEST_NAME, None, what)

    def _problems_of_tars(self) -> Iterator[DatasetProblem]:
        manifest = self.manifest
        assert manifest.tars is not None
        try:
            store = SampleStore(self.location, remote=self._remote)
        except UserError as error:
            yield DatasetProblem(str(self.location), None, str(error))
            return
        yield from self._wrong_ends_of_tars()
        counts = {name: Counter[int]() for name in manifest.labels}
        with Progress(f"verifying {self.location}", total=len(store)) as progress:
            for start in range(0, len(store), _CHUNK):
                decoded = decode(store, np.arange(start, min(start + _CHUNK, len(store))))
                for bad in decoded.bad.values():
                    yield DatasetProblem(bad.shard, bad.key, bad.reason)
                self.num_sound += len(decoded) - len(decoded.bad)
                for name, label_B in (store.labels(decoded.index_B.numpy()) or {}).items():
                    counts[name].update(label_B.tolist())
                progress.advance(len(decoded))
        self.num_bytes = manifest.tars.num_bytes
        yield from self._wrong_counts(
            {
                name: tuple(counts[name][number] for number in range(len(label.classes)))
                for name, label in manifest.labels.items()
            }
        )

    def _wrong_ends_of_tars(self) -> Iterator[DatasetProblem]:
        """Yield a problem for each local tar that is cut short or damaged, or goes on behind its end mark."""
        index = dataset_directory(self.location)
        if has_remote_tars(index):  # they have the hashes of when they were indexed, and a tar that is cut was refused
            return
        for name in tar_ranges(index):
            with map_regular(Path(name)) as data:
                if (problem := tar_end(data, end=read_contents(data).end).problem) is not None:
                    yield DatasetProblem(Path(name).name, None, problem)

    @property
    def summary(self) -> str:
        """Return one line about the result: samples, shards, bytes, sizes and classes."""
        manifest = self.manifest
        found = f"has {self.num_problems} problem{'s' * (self.num_problems > 1)}" if self.num_problems else "is sound"
        samples = f"{manifest.num_samples} samples"
        if self.num_problems:
            samples = f"{self.num_sound} of {manifest.num_samples} samples sound"
        shape = "x".join(map(str, manifest.input_shape))
        if manifest.medium == "picture":
            size = f"pictures of {shape}"
        else:
            size = f"sounds for inputs of {shape} points at {manifest.sample_rate} a second"
        files = f"{manifest.num_shards} {'shards' if manifest.tars is None else 'tars'}"
        parts = [f"{samples} in {files}", f"{self.num_bytes:,} bytes", size]
        for name, label in manifest.labels.items():
            how = f"of {min(label.counts)} to {max(label.counts)} samples" if label.counts else "drawn at each reading"
            parts.append(f"{len(label.classes)} {name} classes {how}")
        return f"{self.location} {found}: {'; '.join(parts)}"

    @property
    def remedy(self) -> str:
        """Return what to do about the problems."""
        again = "build it again" if self.manifest.tars is None else "index it again if its tars were changed"
        return (
            "to mend it, copy the files that are named above again from a whole copy, or "
            f"{again}; training leaves out bad samples up to the share data.max_bad_share"
        )

    @contextmanager
    def _file(self, name: str, expected: Expected) -> Iterator[Path]:
        """Give the path of a file of the dataset on this machine; a fetched file exists only inside the block.

        Raises `UserError` if the file cannot be fetched or is not as `expected`.
        """
        if self._directory is not None:
            yield self._directory / name
        else:
            with fetched(str(self.location), name, expected=expected, config=self._remote) as path:
                yield path

    def _overlay_problem(self) -> str | None:
        manifest = self.manifest
        assert manifest.overlay is not None
        try:
            with self._file(OVERLAY_NAME, Expected(sha256=manifest.overlay.sha256)) as path:
                overlay = load_overlay(path, sha256=manifest.overlay.sha256)
        except UserError as error:
            return str(error) if self._directory is None else str(error).removeprefix(f"{path} ")
        more = {name: label for name, label in manifest.more_labels.items() if label.given_by == "overlay"}
        said: tuple[object, ...] = (manifest.overlay.kind, manifest.label_names.overlay)
        found: tuple[object, ...] = (kind_of(overlay), overlay.class_names)
        if more or overlay.more_labels:
            said += ({name: label.classes for name, label in more.items()},)
            found += ({name: label.classes for name, label in overlay.more_labels.items()},)
        if isinstance(overlay, PixelOverlay):
            said += (manifest.overlay.layout, manifest.batch_shape, manifest.overlay.options)
            channels, height, width = manifest.input_shape
            try:
                found += (overlay.layout, overlay.output_shape((channels, height, width)), dict(overlay.chosen))
            except UserError as error:
                return f"holds the overlay {manifest.overlay.kind}, which does not fit the pictures ({error})"
        return None if found == said else f"holds the overlay and classes {found}, but {MANIFEST_NAME} says {said}"

    def _digests_problem(self) -> str | None:
        expected = Expected(num_bytes=num_digest_bytes(self.manifest), sha256=self.manifest.source_digests_sha256)
        try:
            with self._file(SOURCE_DIGESTS_NAME, expected) as path:
                check_source_digests(path, self.manifest)
        except UserError as error:
            return str(error) if self._directory is None else str(error).removeprefix(f"{path} ")
        return None

    def _shard_problems(self, entry: ShardEntry, due: range, totals: Totals) -> Iterator[tuple[str | None, str]]:
        """Yield key and description of each problem of one shard; add its intact samples to `totals`."""
        try:
            with (
                self._file(entry.name, Expected(num_bytes=entry.num_bytes, sha256=entry.sha256)) as path,
                map_regular(path) as data,
            ):
                yield from self._tar_problems(data, entry, due, totals)
        except UserError as error:
            yield None, str(error)
        except OSError as error:
            yield None, f"cannot be read ({error.strerror})"
        if (index := self._index(entry)) is not None and hashlib.sha256(index).hexdigest() != entry.index_sha256:
            yield (
                None,
                f"{index_path(Path(entry.name)).name} beside it is not the index that {MANIFEST_NAME} names; remove it",
            )

    def _tar_problems(
        self, data: memoryview, entry: ShardEntry, due: range, totals: Totals
    ) -> Iterator[tuple[str | None, str]]:
        self.num_bytes += len(data)
        if len(data) != entry.num_bytes:
            yield None, f"has {len(data)} bytes, but {MANIFEST_NAME} says {entry.num_bytes}"
        if (sha256 := hashlib.sha256(data).hexdigest()) != entry.sha256:
            yield None, f"has the sha256 {sha256}, but {MANIFEST_NAME} says {entry.sha256}"
        contents = read_contents(data)
        samples: dict[str, dict[str, TarMember]] = {}
        last_key = None
        for member in contents.members:
            key, _, extension = member.name.partition(".")
            if key != last_key and key in samples:
                yield key, f"its members are not side by side: {member.name} comes after members of {last_key}"
            if extension in samples.setdefault(key, {}):
                yield key, f"{member.name} is there twice"
            samples[key][extension] = member
            last_key = key
        if not _ends_in_zeros(data, contents.end):
            yield None, f"is cut short or damaged after sample {last_key}"
        keys = [sample_key(index) for index in due]
        for key in sorted(samples.keys() ^ set(keys)):
            yield key, f"does not belong among {keys[0]} to {keys[-1]}" if key in samples else "is missing"
        if list(samples) != keys and sorted(samples) == keys:
            yield None, "its samples are not in the order of their keys"
        for key, fields in samples.items():
            if not (key.isascii() and key.isdigit()):
                continue  # already reported as not belonging here
            try:
                sample = _decode(key, _contents(data, key, fields, self.manifest), self.manifest)
            except ValueError as error:
                yield key, " ".join(str(error).split())
            else:
                totals.add(sample)
                self.num_sound += key in keys
        index = index_content(index_members(contents.members, members=self.manifest.members, due=due))
        if sha256 == entry.sha256 and hashlib.sha256(index).hexdigest() != entry.index_sha256:
            yield None, f"the offsets of its members do not match {MANIFEST_NAME} (index_sha256)"

    def _index(self, entry: ShardEntry) -> bytes | None:
        """Return the index beside a shard; None if there is none, which is no problem because readers rebuild it."""
        name, num_bytes = index_path(Path(entry.name)).name, index_num_bytes(entry, self.manifest.members)
        try:
            with self._file(name, Expected()) as path:
                return read_regular(path, max_bytes=num_bytes + _SLACK)
        except FileNotFoundError:
            return None
        except UserError as error:
            logger.info("%s", error)
            return None
        except OSError:
            return b""


def _ends_in_zeros(data: memoryview, end: int) -> bool:
    """Return whether a tar has its end marker after the last member, so that it is not cut short or overwritten."""
    starts = range(end, len(data), _BLOCK)
    return len(data) - end >= _NUM_ZEROS_AT_END and not any(any(data[start : start + _BLOCK]) for start in starts)


def _contents(data: memoryview, key: str, fields: Mapping[str, TarMember], manifest: Manifest) -> dict[str, bytes]:
    """Return the members of a sample. Raises `ValueError` if one is missing, unknown or too large."""
    for extension in sorted(fields.keys() ^ set(manifest.members)):
        raise ValueError(f"{key}.{extension} is {'not known' if extension in fields else 'missing'}")
    for extension, member in fields.items():
        if member.size > (max_bytes := manifest.max_member_bytes[extension]):
            raise ValueError(f"{member.name} has {member.size} bytes, but at most {max_bytes} are allowed")
    return {extension: bytes(data[member.offset : member.offset + member.size]) for extension, member in fields.items()}


def _decode(key: str, fields: dict[str, bytes], manifest: Manifest) -> Sample:
    """Decode a sample. Raises `ValueError` with the reason if it does not decode or does not fit the manifest."""
    labels = decode_label(fields["json"], int(key), label_ranges(manifest))
    content: NDArray[Any]
    mask = None
    if manifest.medium == "sound":
        content = _decode_wav(f"{key}.wav", fields["wav"], sample_rate=manifest.sample_rate)
    else:
        num_channels, height, width = manifest.input_shape
        content = _decode_png(f"{key}.png", fields["png"], (num_channels, height, width)).permute(1, 2, 0).numpy()
        if "mask.png" in fields:
            mask_1HW = _decode_png(f"{key}.mask.png", fields["mask.png"], (1, height, width))
            if not torch.isin(mask_1HW, _MASK_LEVELS).all():
                raise ValueError(f"{key}.mask.png has other levels than {_MASK_LEVELS.tolist()}")
            mask = mask_1HW[0].numpy()
    return Sample(int(key), content, mask, labels)


def _decode_wav(name: str, data: bytes, *, sample_rate: int | None) -> NDArray[np.int16] | NDArray[np.float32]:
    try:
        points = decode_wav(data)
        found_rate = soundfile.info(io.BytesIO(data)).samplerate
    except (ValueError, soundfile.LibsndfileError) as error:
        raise ValueError(f"{name} does not decode ({error})") from None
    if found_rate != sample_rate:
        raise ValueError(f"{name} has {found_rate} points a second, not {sample_rate}")
    if not np.isfinite(points).all():
        raise ValueError(f"{name} holds points that are not numbers")
    if np.abs(points.astype(np.float64)).max() > _LOUDEST * (1 << 15 if points.dtype == np.int16 else 1):
        raise ValueError(f"{name} holds points beyond {_LOUDEST} times full scale")
    return points


def _decode_png(name: str, data: bytes, shape: tuple[int, int, int]) -> torch.Tensor:
    from torchvision.io import ImageReadMode, decode_png  # takes a second to import

    if (wrong := wrong_size(data, *shape[1:])) is not None:
        raise ValueError(f"{name} does not decode ({wrong})")
    try:
        pixels: torch.Tensor = decode_png(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.UNCHANGED)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{name} does not decode ({error})") from None
    if pixels.shape != shape or pixels.dtype != torch.uint8:
        raise ValueError(f"{name} is {tuple(pixels.shape)} {pixels.dtype}, not {shape} torch.uint8")
    return pixels


def run(args: argparse.Namespace) -> None:
    verification = Verification(args.location)
    for problem in verification.problems():
        print(problem)
    print(verification.summary)
    if verification.num_problems:
        print(verification.remedy, file=sys.stderr)
        raise SystemExit(1)
