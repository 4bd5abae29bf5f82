"""Ways in which people keep pictures and sounds, each written by one small function.

A few small files stand for published datasets and for what programs write: AudioMNIST, FSDD, the `datasets` library,
GNU tar, pandas.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import tarfile
import unicodedata
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image

ANIMALS = ("cat", "owl")


@dataclass(frozen=True)
class Layout:
    """What lies there, and what must come of it.

    Attributes:
        write: writes the files below a directory.
        looked_at: the paths below it that the user names.
        samples: how many samples the printed commands give in all splits together; None if the layout is refused.
        classes: the classes of `label`; empty if there is no label.
        label: the name of the label.
        said: words that `look` must say, such as what is left out.
    """

    write: Callable[[Path], None]
    looked_at: tuple[str, ...] = (".",)
    samples: int | None = None
    classes: tuple[str, ...] = ()
    label: str = "base"
    said: tuple[str, ...] = ()


LAYOUTS: dict[str, Layout] = {}


def accepted(
    samples: int,
    classes: tuple[str, ...] = ANIMALS,
    *,
    looked_at: tuple[str, ...] = (".",),
    label: str = "base",
    said: tuple[str, ...] = (),
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Add a layout that `look` accepts to the table."""

    def add(write: Callable[[Path], None]) -> Callable[[Path], None]:
        LAYOUTS[write.__name__] = Layout(write, looked_at, samples, classes, label, said)
        return write

    return add


def refused(*said: str, looked_at: tuple[str, ...] = (".",)) -> Callable[[Callable[[Path], None]], None]:
    """Add a layout that `look` refuses to the table, with the words of the mend."""

    def add(write: Callable[[Path], None]) -> None:
        LAYOUTS[write.__name__] = Layout(write, looked_at, None, said=said)

    return add


# The files


def picture(number: int, *, mode: str = "RGB") -> Image.Image:
    """Return a picture of 40 x 36 pixels, another one for each number."""
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (36, 40, 3), np.uint8)).convert(mode)


def encoded(number: int, kind: str = "JPEG", *, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    picture(number, mode=mode).save(file, kind)
    return file.getvalue()


def sound(
    number: int,
    *,
    rate: int = 8_000,
    seconds: float = 0.5,
    kind: str = "WAV",
    coding: str = "PCM_16",
    channels: int = 1,
) -> bytes:
    points = np.random.default_rng(number).normal(scale=0.1, size=(round(rate * seconds), channels))
    file = io.BytesIO()
    soundfile.write(file, points, rate, format=kind, subtype=coding)
    return file.getvalue()


def write(root: Path, files: Mapping[str, bytes | str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def animals(form: str, *, num: int = 5, start: int = 0) -> dict[str, bytes]:
    """Return pictures of two classes, named as `form` says: {c} is the class, {i} the number of the picture."""
    return {form.format(c=c, i=i): encoded(start + 100 * n + i) for n, c in enumerate(ANIMALS) for i in range(num)}


def packed(files: Mapping[str, bytes | str]) -> bytes:
    """Return a tar of files in their order."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def table(root: Path, name: str, lines: str, encoding: str = "utf-8") -> None:
    """Write twelve pictures and a table of them; each line of `lines` is filled with the number of a picture."""
    write(root, {f"img/{i}.jpg": encoded(i) for i in range(12)})
    head, line = lines.splitlines()
    text = "\n".join([head, *(line.format(i=i, c=ANIMALS[i % 2]) for i in range(12))]) + "\n"
    (root / name).write_text(text, encoding=encoding)


# Folders of pictures


@accepted(8, (), said=("no labels",))
def flat_folder(root: Path) -> None:
    write(root, {f"IMG_{i:04}.JPG": encoded(i) for i in range(8)})


@accepted(10)
def class_folders(root: Path) -> None:
    write(root, animals("{c}/{i}.jpg"))


@accepted(16)
def train_and_val(root: Path) -> None:
    write(root, animals("train/{c}/{i}.jpg") | animals("val/{c}/{i}.jpg", num=3, start=1_000))


@accepted(14, said=("val",))
def train_validation_and_test(root: Path) -> None:
    write(root, animals("train/{c}/{i}.jpg") | animals("test/{c}/{i}.jpg", num=2, start=1_000))
    write(root, animals("validation/{c}/{i}.jpg", num=1, start=2_000))


@accepted(10, said=("class_from=path:-1",))
def nested_class_folders(root: Path) -> None:
    write(root, animals("{c}/2021/0{i}/x.jpg"))


@accepted(10, ("Kühe", "Öl"))
def unicode_in_two_forms(root: Path) -> None:
    """The train folder was packed on a Mac, the test folder on another system."""
    for n, c in enumerate(("Kühe", "Öl")):
        for split, form, num in (("train", "NFD", 3), ("test", "NFC", 2)):
            name = unicodedata.normalize(form, c)  # type: ignore[arg-type]
            write(root, {f"{split}/{name}/{i}.jpg": encoded(100 * n + 10 * num + i) for i in range(num)})


@accepted(11, said=("3 ", "--skip-bad", "b.jpg"))
def some_damaged(root: Path) -> None:
    write(root, animals("{c}/{i}.jpg") | {"cat/other.png": encoded(7_000)})
    write(root, {"cat/b.jpg": encoded(8_000)[:-400], "owl/page.jpg": "<html>404</html>", "owl/empty.png": b""})


@accepted(6, looked_at=("animals.zip",))
def a_zip(root: Path) -> None:
    with zipfile.ZipFile(root / "animals.zip", "w") as file:
        for name, content in animals("animals/{c}/{i}.jpg", num=3).items():
            file.writestr(name, content)
        file.writestr("__MACOSX/animals/cat/._0.jpg", b"\0\x05\x16\x07")


@accepted(10, said=("ignored files that are no picture (1)",))
def a_sound_among_pictures(root: Path) -> None:
    write(root, animals("{c}/{i}.jpg") | {"cat/s.wav": sound(3)})


# Tables of labels


@accepted(12, label="animal")
def metadata_csv(root: Path) -> None:
    table(root, "metadata.csv", "file_name,animal\nimg/{i}.jpg,{c}")


@accepted(12, looked_at=("labels.csv",), label="animal")
def csv_of_excel_with_semicolons(root: Path) -> None:
    table(root, "labels.csv", "file;animal\nimg/{i}.jpg;{c}")


@accepted(12, looked_at=("labels.csv",), label="animal")
def csv_of_pandas_with_an_index(root: Path) -> None:
    table(root, "labels.csv", ",file,animal\n{i},img/{i}.jpg,{c}")


@accepted(12, ("0", "1", "2"), looked_at=("labels.csv",), label="grade", said=("4 ",))
def csv_with_missing_values(root: Path) -> None:
    table(root, "labels.csv", "file,grade\nimg/{i}.jpg,{c}")
    grades = ["0.0", "nan", "1.0", "NA", "2.0", "", "0.0", "<NA>", "1.0", "2.0", "0.0", "1.0"]
    (root / "labels.csv").write_text("file,grade\n" + "".join(f"img/{i}.jpg,{g}\n" for i, g in enumerate(grades)))


@accepted(12, tuple(str(20.5 + i) for i in range(12)), looked_at=("labels.csv",), label="age", said=("number",))
def labels_that_are_numbers(root: Path) -> None:
    table(root, "labels.csv", "file,age\nimg/{i}.jpg,{c}")
    (root / "labels.csv").write_text("file,age\n" + "".join(f"img/{i}.jpg,{20.5 + i}\n" for i in range(12)))


# Tars


def shards(root: Path, files: Mapping[str, bytes | str]) -> None:
    """Pack files in their order into a tar of train and one of test."""
    names = list(files)
    cut = len(names) * 2 // 3
    for split, some in (("train", names[:cut]), ("test", names[cut:])):
        write(root, {f"{split}/{split}-000000.tar": packed({name: files[name] for name in some})})


@accepted(12)
def webdataset_with_cls(root: Path) -> None:
    shards(root, {f"{i:06}.{e}": v for i in range(12) for e, v in (("jpg", encoded(i)), ("cls", ANIMALS[i % 2]))})


@accepted(12)
def shards_of_both_splits_in_one_folder(root: Path) -> None:
    files: list[dict[str, bytes | str]] = [{f"{i}.jpg": encoded(i), f"{i}.cls": ANIMALS[i % 2]} for i in range(12)]
    for number, name in enumerate(("train-0", "train-1", "test-0")):
        some = {name: content for each in files[4 * number : 4 * number + 4] for name, content in each.items()}
        write(root, {f"shards/{name}.tar": packed(some)})


@accepted(12, label="animal", said=("--root .",))
def webdataset_with_json(root: Path) -> None:
    about = [json.dumps({"id": f"x{i}", "animal": ANIMALS[i % 2]}) for i in range(12)]
    shards(root, {f"{i:06}.{e}": v for i in range(12) for e, v in (("jpg", encoded(i)), ("json", about[i]))})


@accepted(12, said=("--root .",))
def tar_of_class_folders(root: Path) -> None:
    shards(root, {f"{ANIMALS[i % 2]}/{i}.jpg": encoded(i) for i in range(12)})


@accepted(12, said=("--root .",))
def one_tar_a_class(root: Path) -> None:
    for split, num, start in (("train", 4, 0), ("test", 2, 100)):
        for n, c in enumerate(ANIMALS):
            files = {f"{c}_{i}.JPEG": encoded(start + 10 * n + i) for i in range(num)}
            write(root, {f"{split}/{c}.tar": packed(files)})


@accepted(12, ("n01440764", "n01443537"), said=("--root .",))
def tar_of_tars_as_imagenet(root: Path) -> None:
    for split, num, start in (("train", 4, 0), ("val", 2, 100)):
        inner = {}
        for n, c in enumerate(("n01440764", "n01443537")):
            inner[f"{c}.tar"] = packed({f"{c}_{i}.JPEG": encoded(start + 10 * n + i) for i in range(num)})
        write(root, {f"{split}.tar": packed(inner)})


@refused("look at", "which holds them all", looked_at=("train.tar", "val.tar"))
def tars_of_tars_one_by_one(root: Path) -> None:
    tar_of_tars_as_imagenet(root)


@accepted(10)
def one_tar_without_a_test_set(root: Path) -> None:
    write(root, {"animals.tar": packed(animals("{c}/{i}.jpg"))})


@accepted(12, said=("--root .",))
def keys_with_dots(root: Path) -> None:
    names = [f"{ANIMALS[i % 2]}/IMG_2021.03.{i:02}" for i in range(12)]
    shards(root, {f"{name}.jpg": encoded(i) for i, name in enumerate(names)})


# The Hub


def _table_of_the_hub(num: int, start: int) -> Any:
    datasets = importlib.import_module("datasets")  # here, because it takes seconds
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(ANIMALS))})
    rows = {"image": [{"bytes": encoded(start + i, "PNG"), "path": None} for i in range(num)]}
    return datasets.Dataset.from_dict({**rows, "label": [i % 2 for i in range(num)]}, features=features)


@accepted(10)
def parquet_of_the_hub(root: Path) -> None:
    (root / "data").mkdir()
    for split, num in (("train", 6), ("test", 4)):
        _table_of_the_hub(num, 100 * num).to_parquet(str(root / "data" / f"{split}-00000-of-00001.parquet"))


# Sounds


@accepted(12, looked_at=("train",), said=("16,000", "8,000"))
def flac_ogg_and_mp3(root: Path) -> None:
    kinds = {"flac": "PCM_16", "ogg": "VORBIS", "mp3": "MPEG_LAYER_III"}
    for n, c in enumerate(ANIMALS):
        for i, (kind, coding) in enumerate(kinds.items()):
            for rate in (8_000, 16_000):
                data = sound(1_000 * n + 10 * i + rate, rate=rate, kind=kind.upper(), coding=coding)
                write(root, {f"train/{c}/{rate}_{i}.{kind}": data})


@accepted(12, tuple("0123456789")[:3])
def audiomnist(root: Path) -> None:
    write(root, {f"{s:02}/{d}_{s:02}_0.wav": sound(10 * s + d, rate=48_000) for s in range(1, 5) for d in range(3)})


@accepted(12)
def tar_of_sounds(root: Path) -> None:
    shards(
        root,
        {f"{i:06}.{e}": v for i in range(12) for e, v in (("flac", sound(i, kind="FLAC")), ("cls", ANIMALS[i % 2]))},
    )


# Refused


@refused("no pictures or sounds")
def only_text(root: Path) -> None:
    write(root, {"README.md": "x", "notes/a.txt": "y"})


@refused("git lfs pull")
def pointers_of_git_lfs(root: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    write(root, {f"{c}/{i}.jpg": pointer for c in ANIMALS for i in range(3)})


@refused("gunzip", looked_at=("train.tar.gz",))
def compressed_tar(root: Path) -> None:
    write(root, {"train.tar.gz": gzip.compress(packed(animals("{c}/{i}.jpg")))})


@refused("img/12.jpg", looked_at=("labels.csv",))
def table_of_missing_files(root: Path) -> None:
    table(root, "labels.csv", "file,animal\nimg/{i}.jpg,{c}")
    with (root / "labels.csv").open("a") as file:
        file.write("img/12.jpg,cat\n")


@refused("there is a test split alone", looked_at=("photos",))
def a_test_split_alone(root: Path) -> None:
    write(root, animals("photos/test/{c}/{i}.jpg"))


@refused("one split of a dataset", "photos, which holds them all", looked_at=("photos/train", "photos/test"))
def splits_one_by_one(root: Path) -> None:
    write(root, animals("photos/train/{c}/{i}.jpg") | animals("photos/test/{c}/{i}.jpg", num=3, start=1_000))


@refused("to draw a test split")
def one_picture_of_a_class(root: Path) -> None:
    write(root, animals("{c}/{i}.jpg", num=1))
