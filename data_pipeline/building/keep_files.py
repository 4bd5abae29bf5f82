"""Pack a folder of pictures into tars as they are, without a second encoding, and index them.

The tars hold the bytes of the files and the name of the class, and any WebDataset reader opens them. See
`data_pipeline.storage.tar_index` for how they are read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from webdataset import TarWriter

from data_pipeline.building.index_tars import Fields, TarFacts, make_index
from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import BASE
from data_pipeline.loading.permutation import KeyedPermutation
from data_pipeline.sources.folder import ImageFolder
from data_pipeline.storage.files import read_regular
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.shards import shard_name
from data_pipeline.storage.tar_index import MAX_PICTURE_BYTES


def pack_folder(
    folder: ImageFolder,
    out: Path,
    *,
    size: int,
    seed: int = 0,
    num_samples_per_shard: int = 1_000,
    limit: int | None = None,
) -> tuple[Manifest, list[TarFacts]]:
    """Write the files of a folder as tars into the directory `out`, in an order that `seed` draws, and index them.

    Returns the manifest, and the facts of each tar. Raises `UserError` if `out` is not empty, or as `make_index` does.

    Args:
        size: width and height in pixels to which pictures are brought when they are read.
        limit: the largest number of pictures.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; choose another directory, or remove it")
    out.mkdir(parents=True, exist_ok=True)
    num = min(limit or len(folder.labels), len(folder.labels))
    order = KeyedPermutation(len(folder.labels), seed, "order of a folder")(np.arange(num)).tolist()
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
                    name = folder.class_names[int(folder.labels[number])]
                    extension = path.suffix.lower().lstrip(".")
                    tar.write({"__key__": f"{position:08d}", extension: content, "cls": name.encode()})
            progress.advance(len(part))
    fields = Fields(labels={BASE: "cls"})
    return make_index(str(out), out, fields=fields, size=size, classes={BASE: folder.class_names})
