"""Tars of numbered pictures, as others write them, and folders to pack."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import webdataset
from PIL import Image

from data_pipeline.building.index_tars import make_index
from data_pipeline.loading.whole import read_all
from data_pipeline.storage.manifest import Fields
from data_pipeline.storage.store import SampleStore

Member = tuple[str, bytes]  # name and content


def picture(number: int, *, height: int = 40, width: int = 50, kind: str = "PNG") -> bytes:
    """A picture of one colour, whose red is four times its number, below 64."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), (4 * number, number, 77)).save(file, kind)
    return file.getvalue()


def number_of(pixels: np.ndarray[Any, Any]) -> int:
    return round(float(pixels[0].mean()) / 4)


def by_webdataset(path: Path, samples: Sequence[Mapping[str, Any]]) -> None:
    with webdataset.TarWriter(str(path), encoder=False) as writer:
        for sample in samples:
            writer.write(sample)


def by_tarfile(path: Path, members: Sequence[Member], *, kind: int = tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, "w", format=kind) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def simple(directory: Path, num_per_tar: Sequence[int], *, with_labels: bool = True) -> Path:
    """Tars whose samples are numbered from 0, with the label `number % 3`."""
    directory.mkdir(parents=True, exist_ok=True)
    number = 0
    for tar, num in enumerate(num_per_tar):
        samples = []
        for _ in range(num):
            labels = {"cls": b"%d" % (number % 3)} if with_labels else {}
            samples.append({"__key__": f"part{tar}/s{number:05d}", "png": picture(number), **labels})
            number += 1
        by_webdataset(directory / f"train-{tar:04d}.tar", samples)
    return directory


def indexed(location: Path | str, out: Path, **options: Any) -> SampleStore:
    make_index(str(location), out, fields=options.pop("fields", Fields()), size=options.pop("size", 32), **options)
    return SampleStore(out)


def numbers_in(store: SampleStore) -> list[int]:
    return [number_of(pixels) for batch in read_all(store, batch_size=7) for pixels in batch.inputs_a.numpy()]


def write_folder(root: Path, *, split: str = "train", num: int = 6) -> Path:
    for number in range(num):
        path = root / split / ("owl" if number % 2 else "crow") / f"{number}.{'PNG' if number % 3 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number, height=40 + number, kind="PNG" if number % 3 else "JPEG"))
    return root


def unpack_tar(tar: tarfile.TarFile, directory: Path, members: Sequence[tarfile.TarInfo] | None = None) -> None:
    # Python 3.11 before 3.11.4, such as Debian 12's, has no filters; newer ones want to be told one.
    tar.extraction_filter = getattr(tarfile, "data_filter", None)
    tar.extractall(directory, members=members)
