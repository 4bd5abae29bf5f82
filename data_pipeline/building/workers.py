"""Make the tars of a build; one process makes a whole tar.

A worker writes the tar, and scans it as `index` scans somebody else's.

Guarantees: no byte depends on which process made it.

Shapes: B samples of a tar or of one call of the overlay, C channels, H height, W width, T points of a waveform.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.audio.waveform import crop_last, fit_length, to_float
from data_pipeline.building.tar_scan import ScanInputs, ScannedTar, TarTask, scan_tar
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import Record, Sample
from data_pipeline.overlays import Overlay, baked_keys
from data_pipeline.sources import Source, labels_of
from data_pipeline.sources.folder import ImageFolder
from data_pipeline.sources.picture_table import PictureTable
from data_pipeline.storage.manifest import LabelEntry
from data_pipeline.storage.source_digests import content_digest
from data_pipeline.storage.totals import Totals
from data_pipeline.storage.write import encode, encode_labels, shard_name, write_shard

_NUM_SAMPLES_PER_DRAW: Final = 100  # samples in one call of an overlay; 100 sounds take 20 MB


@dataclass(frozen=True)
class BuildInputs:
    """Everything that a worker needs to make any tar of a dataset.

    Attributes:
        overlay: what is drawn into the tars.
        labels: those that are stored, of the source and of `overlay`, without counts.
        keeps_files: whether the files of a folder are stored as they are.
        scan: how a tar is scanned; its directory is that of the tars.
    """

    source: Source
    overlay: Overlay | None
    labels: Mapping[str, LabelEntry]
    split: str
    seed: int
    sample_rate: int | None
    num_points: int | None
    keeps_files: bool
    scan: ScanInputs

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        return {name: label.classes for name, label in self.labels.items()}

    @property
    def paths_of(self) -> ImageFolder | PictureTable:
        """Return the source with the paths of its files, which are kept."""
        assert isinstance(self.source, (ImageFolder, PictureTable))
        return self.source


@dataclass(frozen=True)
class ShardTask:
    """The samples of one tar: from `first_index`, with the records `records_B`.

    The first `num_new` of them are the first samples of their records in the dataset.
    """

    number: int
    first_index: int
    records_B: NDArray[np.int64]
    num_new: int


@dataclass(frozen=True)
class MadeTar:
    """A tar of a build, with the totals of its samples, and the digests of its new records end to end."""

    scanned: ScannedTar
    totals: Totals
    digests: bytes


def shard_path(directory: Path, number: int) -> Path:
    return directory.absolute() / shard_name(number)


def make_shard(inputs: BuildInputs, task: ShardTask) -> MadeTar:
    """Write one tar and scan it."""
    path = shard_path(inputs.scan.directory, task.number)
    totals, digests = Totals(), list[bytes]()

    def drawn() -> Iterator[dict[str, bytes]]:
        nonlocal totals
        for sample, record in _samples(inputs, task):
            if len(digests) < task.num_new:
                digests.append(content_digest(record.content))
            totals += Totals.of(sample.content)
            yield encode(sample, inputs.classes, sample_rate=inputs.sample_rate)

    members = _kept_files(inputs, task) if inputs.keeps_files else drawn()
    write_shard(members, path, first_index=task.first_index)
    scanned = scan_tar(inputs.scan, TarTask(task.number, str(path)), is_built=True)
    if scanned.num_samples != len(task.records_B):
        raise UserError(f"{path} has {scanned.num_left_out} samples of more than 268 MB; make them smaller")
    return MadeTar(scanned, totals, b"".join(digests))


def _kept_files(inputs: BuildInputs, task: ShardTask) -> Iterator[dict[str, bytes]]:
    """Yield the file of each record as it is, with its labels."""
    columns = labels_of(inputs.source)
    for number in task.records_B.tolist():
        path = inputs.paths_of.path(number)
        ending = path.suffix.lower().lstrip(".")
        if ending not in inputs.scan.fields.content:
            raise UserError(f"{path} has no ending of a picture that can be kept; rename it, or build without --keep")
        labels = {name: int(column.label_N[number]) for name, column in columns.items()}
        yield {ending: path.read_bytes(), "json": encode_labels(labels, inputs.classes)}


def _samples(inputs: BuildInputs, task: ShardTask) -> Iterator[tuple[Sample, Record]]:
    """Yield the samples of a tar in order, each with its record."""
    num_at_once = 1 if inputs.overlay is None else _NUM_SAMPLES_PER_DRAW
    columns = labels_of(inputs.source)
    for start in range(0, len(task.records_B), num_at_once):
        numbers_B = task.records_B[start : start + num_at_once]
        records = [inputs.source[number] for number in numbers_B.tolist()]
        labels = {name: column.label_N[numbers_B] for name, column in columns.items()}
        first_index = task.first_index + start
        samples = (
            [Sample(first_index, records[0].content, None, _row(labels, 0))]
            if inputs.overlay is None
            else _overlaid(inputs.overlay, inputs, records, labels, first_index)
        )
        yield from zip(samples, records, strict=True)


def _row(labels: Mapping[str, NDArray[np.int64]], row: int) -> dict[str, int]:
    return {name: int(label_B[row]) for name, label_B in labels.items()}


def _overlaid(
    overlay: Overlay,
    inputs: BuildInputs,
    records: Sequence[Record],
    labels: Mapping[str, NDArray[np.int64]],
    first_index: int,
) -> list[Sample]:
    """Return consecutive samples, with the overlay drawn on all of them in one call."""
    given = {name: torch.from_numpy(label_B) for name, label_B in labels.items()}
    index_B = torch.arange(first_index, first_index + len(records))
    keys = baked_keys(index_B, seed=inputs.seed, split=inputs.split)
    contents = [record.content for record in records]
    if inputs.num_points is None:
        overlaid = overlay(torch.from_numpy(np.stack(contents)).permute(0, 3, 1, 2), keys, given)
        contents_B = overlaid.inputs.permute(0, 2, 3, 1).contiguous().numpy()
    else:
        last_B = crop_last(keys) if inputs.split == "train" else torch.zeros(len(records), dtype=torch.bool)
        clips = [torch.from_numpy(content) for content in contents]
        overlaid = overlay(to_float(fit_length(clips, inputs.num_points, last_B=last_B)), keys, given)
        contents_B = overlaid.inputs.numpy()
    masks_B = [None] * len(records) if overlaid.masks_BHW is None else overlaid.masks_BHW.numpy()
    labels = {**labels, **{name: label_B.numpy() for name, label_B in overlaid.labels.items()}}
    return [
        Sample(index, content, mask, _row(labels, row))
        for row, (index, content, mask) in enumerate(zip(index_B.tolist(), contents_B, masks_B, strict=True))
    ]


def content_digests(inputs: BuildInputs, numbers: NDArray[np.int64]) -> bytes:
    """Return the digests of the contents of some records, end to end."""
    return b"".join(content_digest(inputs.source[number].content) for number in numbers.tolist())
