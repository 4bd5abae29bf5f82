"""Make the tars of a build; one process makes a whole tar.

A worker writes the tar, and scans it as `index` scans somebody else's.

Guarantees: no byte depends on which process made it.

Shapes: B samples of a tar or of one call of the overlay, C channels, H height, W width, T points of a waveform.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.audio.waveform import crop_last, fit_length, to_float
from data_pipeline.building.catalogue import Ingredients
from data_pipeline.building.tar_scan import LeftOut, ScanInputs, ScannedTar, scan_tar
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import Record, Sample
from data_pipeline.overlays import Overlay, baked_keys
from data_pipeline.sources.files import ending_of
from data_pipeline.sources.folder import PictureFiles
from data_pipeline.storage.manifest import HowMade, LabelEntry, OverlayEntry
from data_pipeline.storage.source_digests import content_digest
from data_pipeline.storage.totals import Totals
from data_pipeline.storage.write import encode, encode_labels, shard_name, write_shard

_NUM_SAMPLES_PER_DRAW: Final = 100  # samples in one call of an overlay; 100 sounds take 20 MB


@dataclass(frozen=True)
class BuildPlan:
    """A dataset to build: everything that a worker needs to make any of its tars.

    Attributes:
        ingredients: the source, and the overlay.
        overlay: the entry of the overlay in the manifest, which says when it is drawn.
        labels: every label of the source and the overlay, without counts.
        order: the record of each sample, (num_records,); each repeat begins again.
        input_shape: (C, H, W) of the stored pictures, or (T,) of sounds in a batch.
        keeps_files: whether the files of a folder are stored as they are.
        scan: how a tar is scanned; its directory is that of the tars.
    """

    ingredients: Ingredients
    how_made: HowMade
    overlay: OverlayEntry | None
    labels: Mapping[str, LabelEntry]
    order: NDArray[np.int64]
    input_shape: tuple[int, ...]
    num_samples_per_shard: int
    keeps_files: bool
    scan: ScanInputs

    @property
    def num_samples(self) -> int:
        return self.how_made.repeats * len(self.order)

    @property
    def num_shards(self) -> int:
        return -(-self.num_samples // self.num_samples_per_shard)

    @property
    def baked(self) -> Overlay | None:
        """Return the overlay if it is drawn into the tars."""
        is_baked = self.overlay is not None and self.overlay.drawn == "baked"
        return self.ingredients.overlay if is_baked else None

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """Return the class names of each label that is stored."""
        return {name: self.labels[name].classes for name in self.scan.fields.labels or ()}


@dataclass(frozen=True)
class MadeTar:
    """A tar of a build.

    Attributes:
        totals: of its samples.
        digests: of its new records, end to end.
        remarks: what is odd about the files of new records, and the number of these files.
    """

    scanned: ScannedTar
    totals: Totals
    digests: bytes
    remarks: LeftOut


class UnreadableError(UserError):
    """A record that its source cannot read."""


def make_tar(plan: BuildPlan, number: int) -> MadeTar:
    """Write the tar of a number and scan it. Raises `UnreadableError` if a record cannot be read."""
    path = plan.scan.directory.absolute() / shard_name(number)
    first_index = number * plan.num_samples_per_shard
    index_B = np.arange(first_index, min(first_index + plan.num_samples_per_shard, plan.num_samples))
    totals, digests, remarks = Totals(), list[bytes](), LeftOut()

    def drawn() -> Iterator[dict[str, bytes]]:
        nonlocal totals
        for sample, record in _samples(plan, index_B):
            if sample.index < len(plan.order):  # the first sample of its record
                digests.append(content_digest(record.content))
                for remark in record.remarks:
                    remarks.add(f"of {len(plan.order):,} files: it {remark}", record.file)
            totals += Totals.of(sample.content)
            yield encode(sample, plan.classes, sample_rate=plan.ingredients.sample_rate, file=record.file)

    write_shard(_kept_files(plan, index_B) if plan.keeps_files else drawn(), path, first_index=first_index)
    scanned = scan_tar(plan.scan, (number, str(path)), is_built=True)
    if scanned.num_samples != len(index_B):
        num = len(index_B) - scanned.num_samples
        raise UserError(f"{path} has {num} samples of more than 268 MB; make them smaller")
    return MadeTar(scanned, totals, b"".join(digests), remarks)


def _kept_files(plan: BuildPlan, index_B: NDArray[np.int64]) -> Iterator[dict[str, bytes]]:
    """Yield the file of each record as it is, with its labels."""
    source = plan.ingredients.source
    assert isinstance(source, PictureFiles)
    for number in plan.order[index_B].tolist():
        name = source.name(number)
        ending = ending_of(name).lstrip(".")
        if ending not in plan.scan.fields.content:
            raise UserError(
                f"{source.files.root / name} has no ending of a picture that can be kept; rename it, or build without "
                "--keep"
            )
        labels = {name: int(column.label_N[number]) for name, column in source.labels.items()}
        yield {ending: source.files.read(name), "json": encode_labels(labels, plan.classes, file=name)}


def _samples(plan: BuildPlan, index_B: NDArray[np.int64]) -> Iterator[tuple[Sample, Record]]:
    """Yield samples in order, each with its record."""
    columns = plan.ingredients.source.labels
    num_at_once = 1 if plan.baked is None else _NUM_SAMPLES_PER_DRAW
    for start in range(0, len(index_B), num_at_once):
        some_B = index_B[start : start + num_at_once]
        numbers_B = plan.order[some_B % len(plan.order)]
        records = [_record(plan, number) for number in numbers_B.tolist()]
        labels = {name: column.label_N[numbers_B] for name, column in columns.items()}
        if plan.baked is None:
            yield Sample(int(some_B[0]), records[0].content, None, _row(labels, 0)), records[0]
        else:
            yield from zip(_overlaid(plan, plan.baked, records, labels, some_B), records, strict=True)


def _row(labels: Mapping[str, NDArray[np.int64]], row: int) -> dict[str, int]:
    return {name: int(label_B[row]) for name, label_B in labels.items()}


def _overlaid(
    plan: BuildPlan,
    overlay: Overlay,
    records: list[Record],
    labels: Mapping[str, NDArray[np.int64]],
    index_B: NDArray[np.int64],
) -> list[Sample]:
    """Return samples with the overlay drawn on all of them in one call."""
    split, num_points = plan.how_made.split, plan.ingredients.num_points
    given = {name: torch.from_numpy(label_B) for name, label_B in labels.items()}
    keys = baked_keys(torch.from_numpy(index_B), seed=plan.how_made.seed, split=split)
    contents = [record.content for record in records]
    if num_points is None:
        overlaid = overlay(torch.from_numpy(np.stack(contents)).permute(0, 3, 1, 2), keys, given)
        contents_B = overlaid.inputs.permute(0, 2, 3, 1).contiguous().numpy()
    else:
        last_B = crop_last(keys) if split == "train" else torch.zeros(len(records), dtype=torch.bool)
        clips = [torch.from_numpy(content) for content in contents]
        overlaid = overlay(to_float(fit_length(clips, num_points, last_B=last_B)), keys, given)
        contents_B = overlaid.inputs.numpy()
    masks_B = [None] * len(records) if overlaid.masks_BHW is None else overlaid.masks_BHW.numpy()
    labels = {**labels, **{name: label_B.numpy() for name, label_B in overlaid.labels.items()}}
    return [
        Sample(index, content, mask, _row(labels, row))
        for row, (index, content, mask) in enumerate(zip(index_B.tolist(), contents_B, masks_B, strict=True))
    ]


def _record(plan: BuildPlan, number: int) -> Record:
    try:
        return plan.ingredients.source[number]
    except UserError as error:
        raise UnreadableError(str(error)) from None


def content_digests(plan: BuildPlan, numbers: NDArray[np.int64]) -> bytes:
    """Return the digests of the contents of some records, end to end."""
    return b"".join(content_digest(_record(plan, number).content) for number in numbers.tolist())


def unreadable(plan: BuildPlan, numbers: NDArray[np.int64]) -> dict[int, str]:
    """Try each of some records, and return those that cannot be read, with the error of each."""
    found: dict[int, str] = {}
    for number in numbers.tolist():
        try:
            _record(plan, number)
        except UnreadableError as error:
            found[number] = str(error)
    return found
