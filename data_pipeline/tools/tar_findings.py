"""Find how tars of pictures are indexed as they are, and what an index leaves out of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from data_pipeline.building.index_tars import find_candidates
from data_pipeline.building.pool import run_all
from data_pipeline.building.tar_scan import DOTTED, UNUSED, LeftOut, ScanInputs, TarTask, scan_tar
from data_pipeline.core.sample import BASE
from data_pipeline.sources.tar_files import TarFiles
from data_pipeline.storage.locations import listed_tars
from data_pipeline.storage.manifest import Fields, KeyRule
from data_pipeline.storage.tar_headers import LINKS, SPARSE


@dataclass(frozen=True)
class TarLocation:
    """Tars that one location names, and how they are indexed.

    Attributes:
        location: a folder, a tar, a pattern or a URL.
        key: the rule by which no file is left out because of its name.
        label: the field that could be the label; None if samples have one already, or if nothing could be.
        remarks: what an index leaves out.
    """

    location: str
    key: KeyRule
    label: str | None
    remarks: tuple[str, ...]


def tar_locations(files: TarFiles, *, num_workers: int) -> list[TarLocation]:
    """Return the locations of tars, that of the train set first."""
    folders = {path.parent for path in files.tars} if files.root.is_dir() else {files.root}
    order = sorted(folders, key=lambda folder: (not folder.name.lower().startswith("train"), folder))
    return [_scanned(str(folder), num_workers=num_workers) for folder in order]


def _scanned(location: str, *, num_workers: int) -> TarLocation:
    tasks = [TarTask(number, path) for number, path in enumerate(listed_tars(location))]
    for key in get_args(KeyRule):
        inputs = ScanInputs(fields=Fields(key=key), directory=Path(location))
        tars, left_out = list(run_all(scan_tar, inputs, tasks, num_workers=num_workers)), LeftOut()
        for tar in tars:
            left_out += tar.left_out
        if DOTTED not in left_out.counts:
            break
    label = None if any(tar.labels[BASE] for tar in tars) else next(iter(find_candidates(tars)), None)
    for known in (LINKS, SPARSE, UNUSED):  # which the files of the tars name already
        left_out.counts.pop(known, None)
    return TarLocation(location, key, label, tuple(left_out.lines()))
