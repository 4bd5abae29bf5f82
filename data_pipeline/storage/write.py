"""Write samples as plain WebDataset tars, which any WebDataset reader can open.

A sample has the members `KEY.json`, the class name of each of its labels and the file from which it was made, and
`KEY.wav` or `KEY.png`, of 1 or 3 channels, and also `KEY.mask.png` if an overlay is drawn on it. KEY is its index in
eight digits. Samples are written in the order of their index to `shard-00000.tar`, ...

Guarantees: the same samples give the same bytes on any machine, for any user, at any time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from webdataset import TarWriter

from data_pipeline.audio.wav import encode_wav
from data_pipeline.core.sample import FILE_ENTRY, NO_LABEL, Sample, sample_key
from data_pipeline.storage.png import encode_png


def encode(
    sample: Sample, classes: Mapping[str, tuple[str, ...]], *, sample_rate: int | None = None, file: str = ""
) -> dict[str, bytes]:
    """Return the members of one sample, by extension. `classes` are the class names of each label.

    `sample_rate` is in points a second for a sound, None for a picture. `file` is that of `Record`.
    """
    members = {"json": encode_labels(sample.labels, classes, file=file)}
    content: NDArray[Any] = sample.content
    if content.ndim == 1:
        assert sample_rate is not None
        members["wav"] = encode_wav(content, sample_rate=sample_rate)
    else:
        if sample.mask is not None:
            members["mask.png"] = encode_png(sample.mask)
        members["png"] = encode_png(content)
    return members


def encode_labels(labels: Mapping[str, int], classes: Mapping[str, tuple[str, ...]], *, file: str = "") -> bytes:
    """Return the JSON of a sample: the class name of each label that it has, and its file if it has one."""
    entries = {name: classes[name][number] for name, number in labels.items() if number != NO_LABEL}
    return json.dumps({**entries, FILE_ENTRY: file} if file else entries).encode()


def shard_name(number: int) -> str:
    """Return the file name of a tar of a built dataset.

    Examples:
        >>> shard_name(7)
        'shard-00007.tar'
    """
    return f"shard-{number:05d}.tar"


def write_shard(samples: Iterable[Mapping[str, bytes]], path: Path, *, first_index: int) -> None:
    """Write the members of consecutive samples as a tar, of which the first has the index `first_index`.

    Holds one sample in memory. The tar is on disk at the end; after an error, a part of it is there.
    """
    with path.open("wb") as file:
        # Fixed time, owner and mode: the same samples give the same bytes.
        with TarWriter(file, encoder=False, mtime=0, user="", group="", mode=0o444) as writer:
            for index, members in enumerate(samples, first_index):
                writer.write({"__key__": sample_key(index), **members})
        file.flush()
        os.fsync(file.fileno())
