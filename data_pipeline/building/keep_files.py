"""Pack a folder of pictures into tars as they are, without a second encoding, and index them.

The tars hold the bytes of the files and the name of the class, or a JSON of all labels if there are more. Any
WebDataset reader opens them. See `data_pipeline.storage.tar_index` for how they are read.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from webdataset import TarWriter

from data_pipeline.building.index_tars import DrawnOverlay, make_index
from data_pipeline.building.tar_scan import Fields, TarFacts
from data_pipeline.core.errors import UserError
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


def pack_folder(
    folder: ImageFolder | PictureTable,
    out: Path,
    *,
    size: int,
    seed: int = 0,
    num_samples_per_shard: int = 1_000,
    limit: int | None = None,
    overlay: DrawnOverlay | None = None,
) -> tuple[Manifest, list[TarFacts]]:
    """Write the files of a folder as tars into the directory `out`, in an order that `seed` draws, and index them.

    Returns the manifest, and the facts of each tar. Raises `UserError` if `out` is not empty, or as `make_index` does.

    Args:
        size: width and height in pixels to which pictures are brought when they are read.
        limit: the largest number of pictures.
        overlay: what is drawn on the pictures when they are read.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; choose another directory, or remove it")
    out.mkdir(parents=True, exist_ok=True)
    num = min(limit or len(folder.labels), len(folder.labels))
    order = KeyedPermutation(len(folder.labels), seed, "order of a folder")(np.arange(num)).tolist()
    labels = labels_of(folder)
    is_plain = labels.keys() == {BASE}
    with Progress(f"packing {folder.root.name}", total=num) as progress:
        for start in range(0, num, num_samples_per_shard):
            part = order[start : start + num_samples_per_shard]
            # A fixed time, owner and mode, so that the same files give the same bytes.
            with TarWriter(
                str(out / shard_name(start // num_samples_per_shard)),
                encoder=False,
                mtime=0,
                user="",
                group="",
                mode=0o444,
            ) as tar:
                for position, number in enumerate(part, start):
                    path = folder.path(number)
                    content = read_regular(path, max_bytes=MAX_PICTURE_BYTES)
                    words = _words(labels, number)
                    named = {"cls": words[BASE].encode()} if is_plain else {"json": json.dumps(words).encode()}
                    extension = path.suffix.lower().lstrip(".")
                    tar.write({"__key__": f"{position:08d}", extension: content, **named})
            progress.advance(len(part))
    fields = Fields(labels={BASE: "cls"} if is_plain else {name: f"json:{name}" for name in labels})
    classes = {name: label.classes for name, label in labels.items()}
    titles = {name: label.title for name, label in labels.items()}
    return make_index(str(out), out, fields=fields, size=size, classes=classes, titles=titles, overlay=overlay)


def _words(labels: dict[str, LabelColumn], number: int) -> dict[str, str]:
    """Return the class names of one record by label, without the labels that it lacks."""
    numbers = {name: int(label.label_N[number]) for name, label in labels.items()}
    return {name: labels[name].classes[label] for name, label in numbers.items() if label != NO_LABEL}
