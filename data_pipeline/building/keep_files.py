"""Pack a folder of pictures into tars as they are, without a second encoding, and index them.

The tars hold the bytes of the files and the name of the class, or a JSON of all labels if there are more. Any
WebDataset reader opens them. See `data_pipeline.storage.tar_index` for how they are read.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from webdataset import TarWriter

from data_pipeline.building.index_tars import DrawnOverlay, write_index
from data_pipeline.building.tar_scan import Fields, TarFacts
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import BASE, NO_LABEL
from data_pipeline.loading.permutation import KeyedPermutation
from data_pipeline.sources import LabelColumn, labels_of
from data_pipeline.sources.folder import ImageFolder
from data_pipeline.sources.picture_table import PictureTable
from data_pipeline.storage.files import read_regular
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.shards import shard_name
from data_pipeline.storage.tar_index import MAX_PICTURE_BYTES

_PACKING_NAME: Final = ".shard-packing"  # in DIR.partial; no tars beside such a name are taken for a dataset


def pack_folder(
    folder: ImageFolder | PictureTable,
    unfinished: Path,
    out: Path,
    *,
    size: int,
    seed: int = 0,
    order: NDArray[np.int64] | None = None,
    num_samples_per_shard: int = 1_000,
    overlay: DrawnOverlay | None = None,
) -> tuple[Manifest, list[TarFacts]]:
    """Write the files of a folder as tars into `unfinished`, which will be renamed to `out`, and index them.

    Call it with `unfinished` locked against other builds. Until all is written, the files are in a folder in it, which
    a killed build leaves behind and the next one removes. So no reader takes a part of the tars for the whole.

    Returns the manifest, and the facts of each tar. Raises `UserError` as `write_index` does.

    Args:
        size: width and height in pixels to which pictures are brought when they are read.
        order: the numbers of the pictures to pack, (num_samples,); None for all, in an order that `seed` draws.
        overlay: what is drawn on the pictures when they are read.
    """
    num_pictures = len(folder.labels)
    if order is None:
        order = KeyedPermutation(num_pictures, seed, "order of a folder")(np.arange(num_pictures))
    for path in unfinished.iterdir():  # of an interrupted build
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    packing = unfinished.absolute() / _PACKING_NAME
    packing.mkdir()
    labels = labels_of(folder)
    paths = _write_tars(folder, packing, labels=labels, order=order, num_samples_per_shard=num_samples_per_shard)
    manifest, facts = write_index(
        str(out),
        paths,
        packing,
        fields=Fields(labels={BASE: "cls"} if _is_plain(labels) else {name: f"json:{name}" for name in labels}),
        size=size,
        classes={name: label.classes for name, label in labels.items()},
        titles={name: label.title for name, label in labels.items()},
        overlay=overlay,
    )
    for path in packing.iterdir():
        path.rename(unfinished / path.name)
    packing.rmdir()
    return manifest, facts


def _write_tars(
    folder: ImageFolder | PictureTable,
    directory: Path,
    *,
    labels: dict[str, LabelColumn],
    order: NDArray[np.int64],
    num_samples_per_shard: int,
) -> list[str]:
    """Write some pictures of a folder and their labels as tars into a directory. Return the paths of the tars."""
    is_plain, paths = _is_plain(labels), []
    with Progress(f"packing {folder.root.name}", total=len(order)) as progress:
        for start in range(0, len(order), num_samples_per_shard):
            part = order[start : start + num_samples_per_shard].tolist()
            paths.append(str(directory / shard_name(start // num_samples_per_shard)))
            # A fixed time, owner and mode, so that the same files give the same bytes.
            with TarWriter(paths[-1], encoder=False, mtime=0, user="", group="", mode=0o444) as tar:
                for position, number in enumerate(part, start):
                    path = folder.path(number)
                    content = read_regular(path, max_bytes=MAX_PICTURE_BYTES)
                    words = _words(labels, number)
                    named = {"cls": words[BASE].encode()} if is_plain else {"json": json.dumps(words).encode()}
                    extension = path.suffix.lower().lstrip(".")
                    tar.write({"__key__": f"{position:08d}", extension: content, **named})
            progress.advance(len(part))
    return paths


def _is_plain(labels: dict[str, LabelColumn]) -> bool:
    """Return whether a `cls` file can hold all labels of a folder: one label, without spaces around it.

    A reader of a `cls` file strips them.
    """
    return labels.keys() == {BASE} and all(name == name.strip() for name in labels[BASE].classes)


def _words(labels: dict[str, LabelColumn], number: int) -> dict[str, str]:
    """Return the class names of one record by label, without the labels that it lacks."""
    numbers = {name: int(label.label_N[number]) for name, label in labels.items()}
    return {name: labels[name].classes[label] for name, label in numbers.items() if label != NO_LABEL}
