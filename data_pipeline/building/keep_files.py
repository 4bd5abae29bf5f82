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
from pydantic import ValidationError
from webdataset import TarWriter

from data_pipeline.building.datasets import PICTURE_FIELDS
from data_pipeline.building.index_tars import DrawnOverlay, write_index
from data_pipeline.building.tar_scan import Fields, TarFacts
from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import BASE, NO_LABEL
from data_pipeline.core.validation import describe
from data_pipeline.loading.permutation import KeyedPermutation
from data_pipeline.sources import LabelColumn, labels_of
from data_pipeline.sources.folder import ImageFolder
from data_pipeline.sources.picture_table import PictureTable
from data_pipeline.storage.files import read_regular
from data_pipeline.storage.manifest import LabelEntry, Manifest
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

    Returns the manifest, and the facts of each tar. Raises `UserError` as `write_index` does, if `out` or the name
    of a class cannot be printed, or if a file cannot be read or has no ending of `PICTURE_FIELDS`.

    Args:
        size: width and height in pixels to which pictures are brought when they are read.
        order: the numbers of the pictures to pack, (num_samples,); None for all, in an order that `seed` draws.
        overlay: what is drawn on the pictures when they are read.
    """
    num_pictures = len(folder.labels)
    if order is None:
        order = KeyedPermutation(num_pictures, seed, "order of a folder")(np.arange(num_pictures))
    labels = labels_of(folder)
    if not str(out).isprintable():
        raise UserError(
            f"{out} holds a character that cannot be printed, and its manifest names it; choose another --out"
        )
    _check_names(folder, labels, order)
    for path in unfinished.iterdir():  # of an interrupted build
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    packing = unfinished.absolute() / _PACKING_NAME
    packing.mkdir()
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


def _check_names(folder: ImageFolder | PictureTable, labels: dict[str, LabelColumn], order: NDArray[np.int64]) -> None:
    """Raise `UserError` if an index cannot hold the names of the classes, or would pass over one of the pictures."""
    for name, label in labels.items():
        try:
            LabelEntry(title=label.title, classes=label.classes, counts=())
        except ValidationError as error:
            raise UserError(
                f"the label {name} of {folder.root} cannot be packed: {describe(error, LabelEntry)}"
            ) from None
    for path in map(folder.path, order.tolist()):
        if _ending(path) not in PICTURE_FIELDS:
            known = ", ".join(f".{name}" for name in PICTURE_FIELDS if "." not in name)
            raise UserError(
                f"{path} has none of the endings of pictures that are packed ({known}); rename it, or build without "
                "--keep"
            )


def _ending(path: Path) -> str:
    return path.suffix.lower().lstrip(".")


def _content(path: Path) -> bytes:
    """Return the bytes of a picture. Raises `UserError` if they cannot be read, or are too many for an index."""
    try:
        return read_regular(path, max_bytes=MAX_PICTURE_BYTES)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{path} cannot be packed ({reason}); mend or remove it") from None


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
                    words = _words(labels, number)
                    named = {"cls": words[BASE].encode()} if is_plain else {"json": json.dumps(words).encode()}
                    tar.write({"__key__": f"{position:08d}", _ending(path): _content(path), **named})
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
