"""Tars that WebDataset's own writer, GNU tar and Python's tarfile have written are indexed and read as they are."""

from __future__ import annotations

import bz2
import errno
import fcntl
import gzip
import io
import json
import logging
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import s3fs
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_pipeline.__main__ import main
from data_pipeline.building import keep_files
from data_pipeline.building.index_tars import describe_index, ensure_index, make_index
from data_pipeline.building.tar_scan import Fields, expand, measured_rows
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.loading.decode import decode
from data_pipeline.loading.stream import ReadConfig, Stream, read_all
from data_pipeline.remote.cache import RemoteConfig
from data_pipeline.storage.manifest import INDEX_NAME, dataset_directory, load_manifest
from data_pipeline.storage.store import SampleStore
from data_pipeline.storage.tar_headers import read_contents, read_headers
from data_pipeline.storage.tar_index import has_remote_tars
from tests.commands import call
from tests.data_pipeline.remote.http_server import FaultyServer, serve
from tests.nursery import PythonProcess
from tests.object_store import served_bucket
from tests.processes import kill_tree

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


def test_every_sample_is_read_in_its_order_with_its_label(tmp_path: Path) -> None:
    store = indexed(simple(tmp_path / "tars", [5, 1, 8]), tmp_path / "index")
    assert len(store) == 14
    assert store.shard_ends.tolist() == [5, 6, 14]
    assert store.manifest.label_names.base == ("0", "1", "2")
    assert store.manifest.counts_base == (5, 5, 4)
    assert numbers_in(store) == list(range(14))
    order = np.array([13, 0, 5, 4, 6, 2])
    decoded = decode(store, order)
    assert decoded.pictures_BCHW is not None
    assert [number_of(pixels) for pixels in decoded.pictures_BCHW.numpy()] == order.tolist()
    assert decoded.labels["base"].tolist() == (order % 3).tolist()
    assert decoded.labels.keys() == {"base"}
    assert (tmp_path / "index" / "samples.bin").stat().st_size == 8 * 14


def test_the_mean_is_of_the_pictures(tmp_path: Path) -> None:
    store = indexed(simple(tmp_path / "tars", [8]), tmp_path / "index")
    assert store.manifest.mean == pytest.approx((14 / 255, 3.5 / 255, 77 / 255), abs=1e-6)
    assert store.manifest.std[2] == pytest.approx(0, abs=1e-6)


def test_the_mean_is_not_that_of_the_first_pictures_of_sorted_tars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 60 tars has a dark picture, and then three bright ones; one of each is measured."""
    monkeypatch.setattr("data_pipeline.building.index_tars._NUM_MEASURED", 60)
    for tar in range(60):
        by_tarfile(tmp_path / f"{tar:02d}.tar", [(f"{row}.png", picture(60 * (row > 0))) for row in range(4)])
    manifest = indexed(tmp_path, tmp_path / "index", size=8).manifest
    red, deviation = 240 / 255, 240 / 255 * (3 / 16) ** 0.5
    assert manifest.mean[0] == pytest.approx(0.75 * red, abs=0.1 * red)
    assert manifest.std[0] == pytest.approx(deviation, rel=0.15)


def test_a_tar_counts_for_the_mean_by_its_number_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.building.index_tars._NUM_MEASURED", 4)
    by_tarfile(tmp_path / "dark.tar", [(f"{row}.png", picture(0)) for row in range(2)])
    by_tarfile(tmp_path / "large.tar", [(f"{row}.png", picture(60)) for row in range(18)])
    by_tarfile(tmp_path / "unreadable.tar", [("0.png", b"no picture")])
    red = 240 / 255
    assert indexed(tmp_path, tmp_path / "index", size=8).manifest.mean[0] == pytest.approx(0.9 * red)


@given(num_samples=st.integers(0, 300), num=st.integers(1, 40), tar=st.integers(0, 100_000))
def test_measured_pictures_are_spread_over_a_tar(num_samples: int, num: int, tar: int) -> None:
    rows = measured_rows(num_samples, num=num, tar=tar)
    assert rows == sorted(set(rows)) == [row for row in rows if 0 <= row < num_samples]
    assert len(rows) == min(num, num_samples)
    distances = np.diff(rows)
    assert not len(distances) or distances.max() - distances.min() <= 1


SHAPES: dict[str, list[list[Member]]] = {
    "plain": [[("a.png", picture(0)), ("a.cls", b"0"), ("b.png", picture(1)), ("b.cls", b"1")]],
    "label first": [[("a.cls", b"0"), ("a.png", picture(0)), ("b.cls", b"1"), ("b.png", picture(1))]],
    "folders": [[("./x/a.png", picture(0)), ("./x/a.cls", b"0"), ("./y/a.png", picture(1)), ("./y/a.cls", b"1")]],
    "dots in folders": [[("v1.0/a.png", picture(0)), ("v1.0/a.cls", b"0"), ("v1.1/a.png", picture(1))]],
    "JPEG under PNG": [[("a.png", picture(0, kind="JPEG")), ("a.cls", b"0"), ("b.png", picture(1, kind="JPEG"))]],
    "upper case": [[("a.PNG", picture(0)), ("a.CLS", b"0"), ("b.PNG", picture(1)), ("b.CLS", b"1")]],
    "other files": [
        [("README", b"hello"), ("a.png", picture(0)), ("a.cls", b"0"), ("b.png", picture(1)), ("z.txt", b"")]
    ],
    "several pictures": [[("a.seg.png", picture(9)), ("a.png", picture(0)), ("a.cls", b"0"), ("b.png", picture(1))]],
    "two tars": [[("a.png", picture(0)), ("a.cls", b"0")], [("a.png", picture(1)), ("a.cls", b"1")]],
    "an empty tar": [[], [("a.png", picture(0)), ("a.cls", b"0"), ("b.png", picture(1))]],
    "long names": [[(f"{'d' * 120}/{'e' * 90}{key}.png", picture(number)) for number, key in enumerate("ab")]],
}


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("shape", SHAPES)
def test_tars_of_many_shapes_are_read(tmp_path: Path, shape: str, kind: int) -> None:
    for number, members in enumerate(SHAPES[shape]):
        by_tarfile(tmp_path / f"{number}.tar", members, kind=kind)
    assert numbers_in(indexed(tmp_path, tmp_path / "index")) == [0, 1]


def test_a_tar_of_the_tar_command_is_read(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for number in range(3):
        (files / f"{number}.png").write_bytes(picture(number))
    subprocess.run(["tar", "--sort=name", "-cf", tmp_path / "x.tar", "-C", files, "."], check=True)
    assert numbers_in(indexed(tmp_path / "x.tar", tmp_path / "index")) == [0, 1, 2]


@pytest.mark.parametrize(
    ("label", "field", "content"),
    [
        ("json:class.name", "json", lambda word: json.dumps({"class": {"name": word}}).encode()),
        ("json:ids.1", "json", lambda word: json.dumps({"ids": [0, word]}).encode()),
        ("txt", "txt", lambda word: f"{word}\n".encode()),
        ("species", "species", str.encode),
    ],
)
def test_labels_are_words_of_a_field(tmp_path: Path, label: str, field: str, content: Callable[[str], bytes]) -> None:
    words = ["wren", "owl", "wren", "crow"]
    samples = [
        {"__key__": f"{number}", "png": picture(number), field: content(word)} for number, word in enumerate(words)
    ]
    by_webdataset(tmp_path / "x.tar", samples)
    store = indexed(tmp_path, tmp_path / "index", fields=Fields(labels={"base": label}))
    assert store.manifest.label_names.base == ("crow", "owl", "wren")
    assert decode(store, np.arange(4)).labels["base"].tolist() == [2, 1, 2, 0]


@pytest.mark.parametrize("between", ["._{name}", "./._{name}", "d/._{name}", "d/LICENSE", "__meta__/x.json", "__x__"])
def test_members_of_no_sample_do_not_part_a_picture_from_its_label(tmp_path: Path, between: str) -> None:
    """Such as the hidden file that a Mac packs before each other one; WebDataset passes over them too."""
    members = []
    for number in range(4):
        for name, content in ((f"{number}.cls", b"%d" % (number % 2)), (f"{number}.png", picture(number))):
            folder = "./" if between.startswith("./") else "d/" if between.startswith("d/") else ""
            members += [(between.format(name=name), b"\0\5\x16\7"), (folder + name, content)]
    by_tarfile(tmp_path / "x.tar", members)
    store = indexed(tmp_path, tmp_path / "index")
    assert numbers_in(store) == [0, 1, 2, 3]
    assert decode(store, np.arange(4)).labels["base"].tolist() == [0, 1, 0, 1]


def with_json_labels(directory: Path, values: Sequence[object]) -> Path:
    directory.mkdir()
    by_webdataset(
        directory / "x.tar",
        [{"__key__": f"{k}", "png": picture(k), "json": json.dumps({"y": y}).encode()} for k, y in enumerate(values)],
    )
    return directory


@pytest.mark.parametrize(
    ("values", "classes", "labels"),
    [
        ([1, 2.0, "0", None, 2.5, [1]], ("0", "1", "2"), [1, 2, 0, NO_LABEL, NO_LABEL, NO_LABEL]),
        ([-1, 0, 1, -1.0], ("0", "1"), [NO_LABEL, 0, 1, NO_LABEL]),
        (["-1", "cat", "cat"], ("-1", "cat"), [0, 1, 1]),
        ([0, -1, -2], ("-1", "-2", "0"), [2, 0, 1]),
    ],
)
def test_numbers_are_labels_as_their_writers_mean_them(
    tmp_path: Path, values: Sequence[object], classes: tuple[str, ...], labels: list[int]
) -> None:
    """A whole number may be written as 2.0, and -1 among the numbers of classes is no label."""
    tars = with_json_labels(tmp_path / "tars", values)
    manifest, facts = make_index(str(tars), tmp_path / "index", fields=Fields(labels={"base": "json:y"}), size=16)
    assert manifest.label_names.base == classes
    assert decode(SampleStore(tmp_path / "index"), np.arange(len(values))).labels["base"].tolist() == labels
    assert ("-1 among whole numbers is no label" in describe_index(manifest, facts)) == (classes == ("0", "1"))


def test_a_test_set_without_labels_may_say_so_by_minus_one(tmp_path: Path) -> None:
    fields = Fields(labels={"base": "json:y"})
    train = with_json_labels(tmp_path / "train", [0, 1, 2])
    make_index(str(train), train / INDEX_NAME, fields=fields, size=16)
    test = indexed(with_json_labels(tmp_path / "test", [-1, 1]), tmp_path / "t", fields=fields, classes_of=train)
    assert decode(test, np.arange(2)).labels["base"].tolist() == [NO_LABEL, 1]
    manifest, facts = make_index(
        str(with_json_labels(tmp_path / "none", [-1, -1])), tmp_path / "n", fields=fields, size=16
    )
    assert not manifest.labels
    assert "-1 among whole numbers is no label" in describe_index(manifest, facts)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("größe".encode("latin-1"), "0.cls, which is not text in UTF-8"),
        ("wren".encode("utf-16"), "0.cls, which is not text in UTF-8"),
        (b"\x01", "0.cls, which holds a character that cannot be printed"),
        (b"wren\nowl", "0.cls, which holds a character that cannot be printed"),
        (b"w" * 5_000, "0.cls, which has 5,000 characters, more than 4,096"),
        (b"w" * (1 << 21), "0.cls, which has 2,097,152 bytes, more than 1,048,576"),
    ],
)
def test_labels_that_cannot_be_read_are_counted_and_the_first_is_named(
    tmp_path: Path, content: bytes, said: str
) -> None:
    members = [("0.png", picture(0)), ("0.cls", content), ("1.png", picture(1)), ("1.cls", content)]
    by_tarfile(tmp_path / "a.tar", members)
    manifest, facts = make_index(str(tmp_path), tmp_path / "index", fields=Fields(), size=16)
    assert not manifest.labels
    said = f"2 labels cannot be read, such as {said}"
    assert said in describe_index(manifest, facts)
    with pytest.raises(UserError, match=rf"no sample of .* has a label under cls \({said}\); its fields are"):
        make_index(str(tmp_path), tmp_path / "named", fields=Fields(labels={"base": "cls"}), size=16)


def test_json_that_is_no_label_is_told_and_a_missing_entry_is_none(tmp_path: Path) -> None:
    texts = [b"{", b'{"y": [1]}', b'{"y": 2.5}', b'{"y": null}', b"{}", b'{"y": 1}', b'{"y": ""}']
    by_tarfile(
        tmp_path / "a.tar",
        [each for k, text in enumerate(texts) for each in ((f"{k}.png", picture(k)), (f"{k}.json", text))],
    )
    fields = Fields(labels={"site": "json:y"})
    lines = list(describe_index(*make_index(str(tmp_path), tmp_path / "index", fields=fields, size=16)))
    said = "3 labels (site) cannot be read, such as 0.json, which is not JSON"
    assert said in lines
    assert "6 samples have no label (site)" in lines


def test_a_label_may_have_more_than_200_characters_but_not_all_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["owl", "w" * 4_096]
    by_tarfile(
        tmp_path / "a.tar",
        [each for k, word in enumerate(words) for each in ((f"{k}.png", picture(k)), (f"{k}.cls", word.encode()))],
    )
    store = indexed(tmp_path, tmp_path / "index")
    assert store.manifest.label_names.base == tuple(words)
    assert decode(store, np.arange(2)).labels["base"].tolist() == [0, 1]
    monkeypatch.setattr("data_pipeline.building.index_tars.MAX_MANIFEST_BYTES", 4_096)
    with pytest.raises(UserError, match=r"are too long: its manifest would have [\d,]+ bytes, more than 4,096"):
        indexed(tmp_path, tmp_path / "again")
    assert not (tmp_path / "again" / "manifest.json").exists()


def test_a_byte_order_mark_is_no_part_of_a_label(tmp_path: Path) -> None:
    marks = [b"", b"\xef\xbb\xbf"]
    by_tarfile(
        tmp_path / "a.tar",
        [each for k in range(4) for each in ((f"{k}.png", picture(k)), (f"{k}.cls", marks[k // 2] + b"%d" % (k % 2)))],
    )
    store = indexed(tmp_path, tmp_path / "index")
    assert store.manifest.label_names.base == ("0", "1")
    assert decode(store, np.arange(4)).labels["base"].tolist() == [0, 1, 0, 1]


def test_samples_without_a_picture_or_a_label_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    members = [
        ("a.png", picture(0)),
        ("a.cls", b"4"),
        ("b.txt", b"no picture"),
        ("c.png", picture(1)),
        ("d.png", b"no"),
    ]
    by_tarfile(tmp_path / "x.tar", members)
    done = call(main, "index", tmp_path, "--workers", "1", monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 0, done.stderr
    for said in (
        "3 samples in 1 tars",
        "1 labels of 5 classes",
        "fields: png 3, cls 1, txt 1",
        "2 samples have no label",
        "1 samples have no picture and are left out",
        "1 of the pictures that were tried do not decode, such as d.png",
        "224 x 224",
    ):
        assert said in done.stdout
    store = SampleStore(tmp_path)
    decoded = decode(store, np.arange(3))
    assert decoded.labels["base"].tolist() == [4, NO_LABEL, NO_LABEL]
    assert list(decoded.bad) == [2]
    assert decoded.bad[2].shard == "x.tar"


def cut_in_a_content(content: bytes) -> bytes:
    return content[:7_000]


def with_a_wrong_bit_in_a_header(content: bytes) -> bytes:
    start = content.index(b"part0/s00002.png")
    return content[:start] + bytes([content[start] ^ 1]) + content[start + 1 :]


def cut_before_its_end_mark(content: bytes) -> bytes:
    return content.rstrip(b"\0") + bytes(-len(content.rstrip(b"\0")) % 512)


@pytest.mark.parametrize("damage", [cut_in_a_content, with_a_wrong_bit_in_a_header, cut_before_its_end_mark])
def test_a_tar_that_is_cut_short_or_damaged_gives_what_is_before_and_is_not_sound(
    tmp_path: Path,
    damage: Callable[[bytes], bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = simple(tmp_path, [6]) / "train-0000.tar"
    content = damage(path.read_bytes())
    path.write_bytes(content)
    end = read_headers(memoryview(content))[1]
    done = call(main, "index", path, "--workers", "1", monkeypatch=monkeypatch, capsys=capsys)
    assert f"1 tars are cut short or damaged; {len(content) - end:,} bytes behind the cuts are not used" in done.stdout
    said = f"is cut short or damaged at byte {end:,}; the {len(content) - end:,} bytes behind are not used"
    assert f"{path} {said}" in caplog.text
    whole = numbers_in(SampleStore(path))
    assert whole == list(range(len(whole)))
    done = call(main, "verify", path, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 1
    assert done.stdout.startswith(f"train-0000.tar: {said}\n")
    assert "has 1 problem" in done.stdout


def test_what_is_behind_the_end_mark_of_a_tar_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in the concatenation of two tars, of which every reader of tars sees the first."""
    simple(tmp_path / "two", [3, 3])
    first, second = (path.read_bytes() for path in sorted((tmp_path / "two").glob("*.tar")))
    path = tmp_path / "x.tar"
    path.write_bytes(first + second)
    end = read_headers(memoryview(first))[1]
    num_behind = len(first) + len(second) - end
    done = call(main, "index", path, "--workers", "1", monkeypatch=monkeypatch, capsys=capsys)
    assert f"1 tars go on behind their end marks; {num_behind:,} bytes there are not used" in done.stdout
    said = f"goes on behind its end mark at byte {end:,}; the {num_behind:,} bytes behind are not used"
    assert f"{path} {said}" in caplog.text
    done = call(main, "verify", path, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 1
    assert f"x.tar: {said}" in done.stdout


def test_links_are_counted_and_named(tmp_path: Path) -> None:
    """`tar` packs a file that has another name in the tar as a hard link, without its content."""
    long_name = f"{'d' * 90}/{'e' * 90}.png"
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind in ((long_name, tarfile.LNKTYPE), ("b.png", tarfile.REGTYPE), ("c.png", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, "b.png", len(picture(1)) * (kind == tarfile.REGTYPE)
            tar.addfile(info, io.BytesIO(picture(1)))
    manifest, facts = make_index(str(tmp_path), tmp_path / "index", fields=Fields(), size=32)
    assert numbers_in(SampleStore(tmp_path / "index")) == [1]
    (said,) = (line for line in describe_index(manifest, facts) if "links" in line)
    assert said.startswith(f"2 links are not read, such as {long_name}; store files in their place")


@pytest.mark.process
def test_processes_index_the_tars_side_by_side(tmp_path: Path) -> None:
    simple(tmp_path / "tars", [5, 1, 8, 3, 4])
    store = indexed(tmp_path / "tars", tmp_path / "index", num_workers=2)
    assert numbers_in(store) == list(range(21))


def test_locations_are_directories_patterns_and_lists(tmp_path: Path) -> None:
    simple(tmp_path, [1, 1, 1])
    tars = [str(tmp_path / f"train-000{number}.tar") for number in range(3)]
    assert expand(str(tmp_path)) == tars
    assert expand(str(tmp_path / "train-{0000..0002}.tar")) == tars
    assert expand(tars[1]) == [tars[1]]
    (tmp_path / "list.txt").write_text("# the last first\ntrain-0002.tar\n\ntrain-0000.tar\n")
    assert expand(str(tmp_path / "list.txt")) == [tars[2], tars[0]]


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("empty", "holds no file that ends in .tar"),
        ("train-{0000..0009}.tar", r"train-0003.tar, which .* names, does not exist"),
        ("none.txt", "names no tars; write the path of one in each line"),
        ("twice.txt", "names .*train-0000.tar twice; name each tar once"),
        ("two_paths.txt", "names .*train-0000.tar twice, also as .*other/../train-0000.tar; name each tar once"),
        ("link.txt", "names .*train-0000.tar twice, also as .*link.tar; name each tar once"),
    ],
)
def test_a_location_that_names_no_tars_is_refused_in_a_sentence(tmp_path: Path, location: str, said: str) -> None:
    simple(tmp_path, [1, 1, 1])
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.txt").write_text("\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "link.tar").symlink_to("train-0000.tar")
    (tmp_path / "twice.txt").write_text("train-0000.tar\ntrain-0000.tar\n")
    (tmp_path / "two_paths.txt").write_text("train-0000.tar\nother/../train-0000.tar\n")
    (tmp_path / "link.txt").write_text("train-0000.tar\nlink.tar\n")
    with pytest.raises(UserError, match=said):
        expand(location if "://" in location else str(tmp_path / location))


def test_a_tar_in_upper_case_is_read(tmp_path: Path) -> None:
    path = simple(tmp_path / "tars", [3]) / "train-0000.tar"
    path = path.rename(path.with_name("X.TAR"))
    for location in (path, path.parent):
        ensure_index(str(location))
        assert numbers_in(SampleStore(location)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "mode", "said"),
    [
        ("a.tgz", "gz", "is compressed by gzip; unpack it first, `gunzip < {path} > NEW.tar`"),
        ("a.tar.gz", "gz", "is compressed by gzip; unpack it first, `gunzip < {path} > NEW.tar`"),
        ("a.tar", "gz", "is compressed by gzip; unpack it first, `gunzip < {path} > NEW.tar`"),
        ("a.tar", "bz2", "is compressed by bzip2; unpack it first, `bunzip2 < {path} > NEW.tar`"),
        ("a.txz", "xz", "is compressed by xz; unpack it first, `unxz < {path} > NEW.tar`"),
    ],
)
def test_a_compressed_tar_is_refused_with_what_unpacks_it(
    tmp_path: Path,
    name: str,
    mode: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = simple(tmp_path / "tars", [3]) / "train-0000.tar"
    pack: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    (tmp_path / name).write_bytes(pack[mode](plain.read_bytes()))
    done = call(main, "index", tmp_path / name, "--workers", "1", monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 2
    assert f"error: {tmp_path / name} {said.format(path=tmp_path / name)}\n" in done.stderr


@pytest.mark.parametrize(
    "content", [picture(0), "train-0000.tar".encode("utf-16"), "gr\xf6\xdfe.tar".encode("latin-1")]
)
def test_a_file_that_is_neither_a_tar_nor_a_list_is_refused(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_bytes(content)
    done = call(main, "index", tmp_path / "x", monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 2
    said = "is neither a tar, whose name ends in .tar, nor a text file in UTF-8 that names tars; name one of these\n"
    assert done.stderr == f"error: {tmp_path / 'x'} {said}"


def test_a_byte_order_mark_is_no_part_of_a_list_of_tars(tmp_path: Path) -> None:
    simple(tmp_path, [1, 1])
    names = [str(tmp_path / f"train-{number:04d}.tar") for number in range(2)]
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbftrain-0000.tar\r\ntrain-0001.tar\r\n")
    assert expand(str(tmp_path / "list.txt")) == names


def test_a_tar_whose_path_has_braces_is_named_as_it_is(tmp_path: Path) -> None:
    path = simple(tmp_path / "{a,b}", [2]) / "train-0000.tar"
    assert expand(str(path)) == [str(path)]
    ensure_index(str(path))
    ensure_index(str(path))  # compares the tars of the location with those of its index
    assert numbers_in(SampleStore(path)) == [0, 1]


def test_fields_that_no_sample_has_are_refused_with_those_that_there_are(tmp_path: Path) -> None:
    simple(tmp_path, [3])
    with pytest.raises(UserError, match=r"no sample of .* has a picture under one of webp; its fields are .*png"):
        make_index(str(tmp_path), tmp_path / "index", fields=Fields(picture=("webp",)))
    with pytest.raises(UserError, match=r"no sample of .* has a label under species; its fields are .*cls"):
        make_index(str(tmp_path), tmp_path / "index", fields=Fields(labels={"base": "species"}))
    assert not (tmp_path / "index" / "manifest.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["index", "tars", "--size", "0"],
        ["index", "tars", "--workers", "0"],
        ["build", "folder", "--keep", "--root", "photos", "--out", "out", "--samples-per-shard", "0"],
        ["build", "folder", "--keep", "--root", "photos", "--out", "out", "--limit", "0"],
        ["build", "folder", "--keep", "--root", "photos", "--out", "out", "--image-size", "-1"],
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_is_read(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simple(tmp_path / "tars", [2])
    write_folder(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    done = call(main, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 2
    assert f"{arguments[-2]} must be at least 1, got {arguments[-1]}" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_test_set_takes_the_classes_of_its_train_set(tmp_path: Path) -> None:
    for name, words in (("train", "wren owl crow"), ("test", "wren crow"), ("other", "emu")):
        (tmp_path / name).mkdir()
        by_webdataset(
            tmp_path / name / "x.tar",
            [{"__key__": word, "png": picture(0), "cls": word.encode()} for word in words.split()],
        )
    make_index(str(tmp_path / "train"), tmp_path / "train" / INDEX_NAME, fields=Fields())
    test = indexed(tmp_path / "test", tmp_path / "t", classes_of=tmp_path / "train")
    assert test.manifest.label_names.base == ("crow", "owl", "wren")
    assert test.manifest.counts_base == (1, 0, 1)
    assert decode(test, np.arange(2)).labels["base"].tolist() == [2, 0]
    with pytest.raises(UserError, match=r"has labels that .* lacks, such as emu"):
        indexed(tmp_path / "other", tmp_path / "o", classes_of=tmp_path / "train")


@pytest.fixture
def two_pictures(tmp_path: Path) -> Path:
    """Two sets whose samples have two pictures and two labels. The train set has an index of the second ones."""
    for name in ("train", "test"):
        members = [("a.png", picture(1)), ("a.seg.png", picture(9)), ("a.cls", b"7"), ("a.json", b'{"coarse": "owl"}')]
        (tmp_path / name).mkdir()
        by_tarfile(tmp_path / name / "x.tar", members)
    fields = Fields(picture=("seg.png",), labels={"base": "json:coarse"})
    make_index(str(tmp_path / "train"), tmp_path / "train" / INDEX_NAME, fields=fields, size=16)
    return tmp_path


def assert_alike(root: Path) -> None:
    train, test = (load_manifest(root / name) for name in ("train", "test"))
    assert train.tars is not None
    assert test.tars is not None
    assert test.tars.picture_fields == train.tars.picture_fields == ("seg.png",)
    assert test.tars.label_field == train.tars.label_field == "json:coarse"
    assert test.labels == train.labels
    assert test.input_shape == train.input_shape == (3, 16, 16)
    assert numbers_in(SampleStore(root / "test")) == [9]


def test_training_indexes_a_test_set_with_the_fields_and_the_size_of_its_train_set(two_pictures: Path) -> None:
    ensure_index(str(two_pictures / "test"), classes_of=str(two_pictures / "train"))
    assert_alike(two_pictures)


def test_the_command_takes_what_is_left_out_from_the_train_set(
    two_pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["index", str(two_pictures / "test"), "--classes-of", str(two_pictures / "train"), "--workers", "1"]
    done = call(main, *words, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 0, done.stderr
    assert_alike(two_pictures)
    done = call(main, *words, "--image", "png", "--size", "24", monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 0, done.stderr
    test = load_manifest(two_pictures / "test")
    assert test.tars is not None
    assert (test.tars.picture_fields, test.tars.label_field) == (("png",), "json:coarse")
    assert test.input_shape == (3, 24, 24)


def test_a_tar_that_is_changed_later_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    simple(tmp_path, [4, 4])
    store = indexed(tmp_path, tmp_path / INDEX_NAME)
    path = tmp_path / "train-0001.tar"
    content = path.read_bytes()
    path.write_bytes(content)  # the same again
    assert numbers_in(store) == list(range(8))
    assert "was written again after it was indexed" in caplog.text
    path.write_bytes(content + bytes(512))
    with pytest.raises(UserError, match=r"train-0001.tar has \d+ bytes, but it had \d+ when it was indexed; run"):
        SampleStore(tmp_path)
    path.write_bytes(bytes(512) + content[:-512])  # of the same size
    moved = decode(SampleStore(tmp_path), np.arange(8))
    assert sorted(moved.bad) == [4, 5, 6, 7]
    assert "the tar says otherwise" in moved.bad[4].reason
    path.unlink()
    with pytest.raises(UserError, match=r"train-0001.tar is in the index .* but it is missing"):
        SampleStore(tmp_path)


def test_an_index_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simple(tmp_path / "tars", [3, 3, 3])
    num_scanned = 0

    def scan(data: memoryview) -> Any:
        nonlocal num_scanned
        if num_scanned == 2:
            num_scanned = 10
            raise KeyboardInterrupt
        num_scanned += 1
        return read_contents(data)

    monkeypatch.setattr("data_pipeline.building.tar_scan.read_contents", scan)
    with pytest.raises(KeyboardInterrupt):
        indexed(tmp_path / "tars", tmp_path / "index")
    with pytest.raises(UserError, match=r"holds no manifest.json"):
        SampleStore(tmp_path / "index")
    assert numbers_in(indexed(tmp_path / "tars", tmp_path / "index")) == list(range(9))
    assert num_scanned == 11
    assert not (tmp_path / "index" / ".parts").exists()


def bytes_of(index: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in index.iterdir() if path.is_file()}


def two_fields(directory: Path) -> Path:
    """Write a tar whose samples have a picture, another file that is none, and two fields of labels."""
    directory.mkdir()
    members = [
        (f"{number}.{extension}", content)
        for number in range(4)
        for extension, content in (
            ("png", picture(number)),
            ("other", b"none"),
            ("cls", b"%d" % (number % 3)),
            ("shape", b"%d" % (number % 2)),
        )
    ]
    by_tarfile(directory / "x.tar", members)
    return directory


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--image", "other", "--label", "base=shape"], "none of the pictures decodes"),
        (["--image", "none"], "has a picture under one of none"),
        (["--label", "base=none"], "has a label under none"),
    ],
)
def test_an_index_that_is_not_made_again_stays_as_it_was(
    tmp_path: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tars = two_fields(tmp_path / "tars")
    make_index(str(tars), tars / INDEX_NAME, fields=Fields(), size=32)
    before = bytes_of(tars / INDEX_NAME)
    done = call(main, "index", tars, *arguments, "--workers", "1", monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 2
    assert said in done.stderr
    assert bytes_of(tars / INDEX_NAME) == before


@pytest.mark.parametrize("num_replaced", [0, 1, 3])
def test_an_index_whose_replacement_was_interrupted_is_made_again_and_not_read(
    tmp_path: Path, num_replaced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars = two_fields(tmp_path / "tars")
    make_index(str(tars), tars / INDEX_NAME, fields=Fields(), size=32)
    replace, fields = Path.replace, Fields(labels={"base": "shape", "number": "cls"})
    replaced: list[Path] = []

    def interrupted(self: Path, target: Path) -> Path:
        if target.suffix == ".bin":
            if len(replaced) == num_replaced:
                raise KeyboardInterrupt
            replaced.append(target)
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make_index(str(tars), tars / INDEX_NAME, fields=fields, size=32)
    with pytest.raises(UserError, match="names tars without an index"):
        SampleStore(tars)
    store = indexed(tars, tars / INDEX_NAME, fields=fields)
    assert decode(store, np.arange(4)).labels["number"].tolist() == [0, 1, 2, 0]
    assert decode(store, np.arange(4)).labels["base"].tolist() == [0, 1, 0, 1]


def test_tars_that_cannot_be_written_beside_are_indexed_elsewhere(tmp_path: Path) -> None:
    simple(tmp_path / "tars", [3])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"the index cannot be written to .*; name another place by --out"):
        make_index(str(tmp_path / "tars"), tmp_path / "file" / "index", fields=Fields())


@pytest.mark.parametrize("name", ["tars.txt", "tars.bin", "samples.bin", "label_base.bin"])
def test_a_damaged_index_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    simple(tmp_path, [4])
    make_index(str(tmp_path), tmp_path / INDEX_NAME, fields=Fields())
    path = tmp_path / INDEX_NAME / name
    content = path.read_bytes()
    for wrong in (content[:-2], content + b"x", b""):
        path.write_bytes(wrong)
        with pytest.raises(UserError, match="run `python -m data_pipeline index` again"):
            SampleStore(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="run `python -m data_pipeline index` again"):
        SampleStore(tmp_path)


@settings(deadline=None, database=None, max_examples=100)
@given(content=st.binary(min_size=32, max_size=32))
def test_any_places_in_an_index_are_read_or_named_bad(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    directory = tmp_path_factory.mktemp("any")
    simple(directory, [4])
    make_index(str(directory), directory / INDEX_NAME, fields=Fields(), size=32)
    (directory / INDEX_NAME / "samples.bin").write_bytes(content)
    decoded = decode(SampleStore(directory), np.arange(4))
    assert decoded.pictures_BCHW is not None
    for row in set(range(4)) - set(decoded.bad):
        assert number_of(decoded.pictures_BCHW[row].numpy()) in range(4)
    shutil.rmtree(directory)


def test_training_indexes_what_was_not_indexed_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    simple(tmp_path / "train", [5])
    simple(tmp_path / "test", [2])
    ensure_index(str(tmp_path / "train"))
    ensure_index(str(tmp_path / "test"), classes_of=str(tmp_path / "train"))
    assert "indexing the tars of" in caplog.text
    assert "5 samples in 1 tars" in caplog.text
    assert load_manifest(tmp_path / "test").label_names.base == ("0", "1", "2")
    caplog.clear()
    ensure_index(str(tmp_path / "train"))
    assert not caplog.text
    assert dataset_directory(tmp_path / "train") == tmp_path / "train" / INDEX_NAME


ENSURE = "import logging, sys; logging.basicConfig(level=logging.INFO); " + (
    "from data_pipeline.building.index_tars import ensure_index; ensure_index(sys.argv[1])"
)


@pytest.mark.process
def test_of_processes_that_start_together_one_indexes_and_the_others_wait(tmp_path: Path) -> None:
    tars = simple(tmp_path / "tars", [2] * 8)
    (tars / INDEX_NAME).mkdir()
    processes: list[PythonProcess[str]] = []
    with ExitStack() as exits:
        with (tars / INDEX_NAME / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for _ in range(3):
                words = [sys.executable, "-c", ENSURE, str(tars)]
                process = PythonProcess(words, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
                processes.append(exits.enter_context(process))
                exits.callback(kill_tree, process)
            for process in processes:
                assert process.stderr is not None
                assert "is making the index in" in process.stderr.readline()
            assert not (tars / INDEX_NAME / "manifest.json").exists()
        said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("indexing the tars of" in each for each in said) == 1
    assert numbers_in(SampleStore(tars)) == list(range(16))


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EBADF])
def test_tars_on_a_file_system_without_locks_are_indexed(
    tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(error, "No locks available")

    monkeypatch.setattr("data_pipeline.building.locks.fcntl.flock", no_locks)
    ensure_index(str(simple(tmp_path, [2])))
    assert numbers_in(SampleStore(tmp_path)) == [0, 1]


def test_new_tars_of_a_directory_are_warned_of_and_other_differences_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    simple(tmp_path / "train", [2, 2])
    index = tmp_path / "train" / INDEX_NAME
    fields = Fields(labels={"base": "cls"})
    make_index(str(tmp_path / "train"), index, fields=fields, size=16)
    shutil.copy(tmp_path / "train" / "train-0001.tar", tmp_path / "train" / "train-0002.tar")
    ensure_index(str(tmp_path / "train"))
    assert re.search(r"names 3 tars, and its index has 2 \(\S+/train-0002.tar is new\)", caplog.text)
    assert "those of the index are read" in caplog.text
    (tmp_path / "train" / "train-0000.tar").unlink()
    new_and_gone = r"\(\S+/train-0002.tar is new and \S+/train-0000.tar is gone\)"
    with pytest.raises(UserError, match=new_and_gone) as refused:
        ensure_index(str(tmp_path / "train"), classes_of=str(tmp_path / "other"))
    assert "--size 16 --label base=cls --classes-of" in str(refused.value)
    assert f"or name {index} in place of" in str(refused.value)
    ensure_index(str(index))


def test_an_edited_list_of_tars_is_noticed(tmp_path: Path) -> None:
    simple(tmp_path, [1, 1, 1])
    location = tmp_path / "some_list.txt"
    location.write_text("train-0000.tar\ntrain-0001.tar\n")
    ensure_index(str(location))
    location.write_text("# a comment changes nothing\ntrain-0000.tar\n\ntrain-0001.tar\n")
    ensure_index(str(location))
    for content, said in (
        ("train-0000.tar\n", r"names 1 tars, and its index has 2 \(\S+/train-0001.tar is gone\)"),
        ("train-0001.tar\ntrain-0000.tar\n", r"\(they are in another order\)"),
    ):
        location.write_text(content)
        with pytest.raises(UserError, match=said):
            ensure_index(str(location))


def test_the_same_tars_by_another_path_have_the_same_index(tmp_path: Path) -> None:
    simple(tmp_path / "train", [2, 2])
    (tmp_path / "link").symlink_to(tmp_path / "train")
    ensure_index(str(tmp_path / "train"))
    ensure_index(str(tmp_path / "link"))
    ensure_index(f"{tmp_path}/train/../train")


def test_locations_of_similar_names_have_indexes_of_their_own(tmp_path: Path) -> None:
    simple(tmp_path, [1] * 4)
    for name in ("鳥.tar", "犬.tar", "a-b.tar", "a_b.tar"):
        shutil.copy(tmp_path / "train-0000.tar", tmp_path / name)
    names = ["train-{0000..0003}.tar", "train-{0000,0003}.tar", "鳥.tar", "犬.tar", "a-b.tar", "a_b.tar"]
    for name in names:
        ensure_index(str(tmp_path / name))
    assert [load_manifest(tmp_path / name).num_shards for name in names] == [4, 2, 1, 1, 1, 1]
    assert len({dataset_directory(tmp_path / name) for name in names}) == len(names)
    assert dataset_directory(tmp_path / "a-b.tar").name == ".tar_index-a-b-tar"


def test_an_index_from_before_names_were_distinct_is_read_for_its_own_tars_alone(tmp_path: Path) -> None:
    simple(tmp_path, [1] * 4)
    old = tmp_path / ".tar_index-train-0000-0001-tar"
    own, same, other = (str(tmp_path / f"train-{end}.tar") for end in ("{0000..0001}", "{0000,0001}", "0000-0001"))
    shutil.copy(tmp_path / "train-0003.tar", other)
    make_index(own, old, fields=Fields(), size=16)
    before = load_manifest(old).sha256
    for location in (own, same, other):
        ensure_index(location)
    assert dataset_directory(own) == dataset_directory(same) == old
    assert dataset_directory(other) != old
    assert numbers_in(SampleStore(other)) == [3]
    assert load_manifest(Path(own)).sha256 == before


def test_without_an_index_the_commands_say_how_to_make_one(tmp_path: Path) -> None:
    simple(tmp_path, [3])
    for location in (tmp_path, tmp_path / "train-{0000..0000}.tar"):
        with pytest.raises(UserError, match="names tars without an index; run `python -m data_pipeline index"):
            load_manifest(location)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("shuffle_shards", [None, 2])
def test_batches_of_tars_are_the_same_on_any_ranks_and_resumed(
    tmp_path: Path, world_size: int, shuffle_shards: int | None
) -> None:
    simple(tmp_path, [9, 7, 11, 6], with_labels=False)
    make_index(str(tmp_path), tmp_path / INDEX_NAME, fields=Fields(), size=32)

    def batches(world_size: int, start_step: int) -> list[list[int]]:
        by_rank = []
        for rank in range(world_size):
            stream = Stream(
                tmp_path,
                read=ReadConfig(num_workers=0, placement="stream", shuffle_shards=shuffle_shards),
                global_batch_size=8,
                seed=3,
                rank=rank,
                world_size=world_size,
                start_step=start_step,
                end_step=8,
            )
            by_rank.append([[number_of(pixels) for pixels in batch.inputs_a.numpy()] for batch in stream])
        return [[number for part in parts for number in part] for parts in zip(*by_rank, strict=True)]

    whole = batches(1, 0)
    assert batches(world_size, 3) == whole[3:]
    for epoch in (whole[:4], whole[4:]):
        seen = [number for batch in epoch for number in batch]
        assert len(set(seen)) == 32


def test_samples_with_the_same_key_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    simple(tmp_path, [3, 3])
    make_index(str(tmp_path), tmp_path / INDEX_NAME, fields=Fields())
    assert not caplog.text
    shutil.copy(tmp_path / "train-0000.tar", tmp_path / "train-0002.tar")
    store = indexed(tmp_path, tmp_path / INDEX_NAME)
    assert "3 samples have the key of an earlier one, such as one in" in caplog.text
    assert "train-0000.tar and in" in caplog.text
    assert numbers_in(store) == [0, 1, 2, 3, 4, 5, 0, 1, 2]


def test_a_picture_never_gets_the_label_of_another_one_with_its_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two samples of one key that follow each other, and of a third one a picture without a label."""
    members = [("a.png", picture(0)), ("a.cls", b"0"), ("a.png", picture(1)), ("a.cls", b"1"), ("a.png", picture(2))]
    by_tarfile(tmp_path / "x.tar", members)
    store = indexed(tmp_path, tmp_path / "index")
    assert numbers_in(store) == [0, 1, 2]
    assert decode(store, np.arange(3)).labels["base"].tolist() == [0, 1, NO_LABEL]
    assert "2 samples have the key of an earlier one" in caplog.text


def test_empty_classes_and_several_fields_of_labels_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sample whose label is in another field than that of the others would be of a class of its own."""
    by_tarfile(tmp_path / "x.tar", [("a.png", picture(0)), ("a.cls", b"1"), ("b.png", picture(1)), ("b.label", b"3")])
    done = call(main, "index", tmp_path, "--workers", "1", monkeypatch=monkeypatch, capsys=capsys)
    assert "2 of the 4 classes have no sample, such as 0" in done.stdout
    assert (
        "the label of a sample is the first of its fields cls, label; if they do not say the same, name" in done.stdout
    )
    done = call(main, "index", tmp_path, "--workers", "1", "--label", "cls", monkeypatch=monkeypatch, capsys=capsys)
    assert "is the first of its fields" not in done.stdout


def test_an_index_that_is_made_again_leaves_open_readers_alone(tmp_path: Path) -> None:
    simple(tmp_path, [3, 3])
    store = indexed(tmp_path, tmp_path / INDEX_NAME)
    make_index(str(tmp_path / "train-0000.tar"), tmp_path / INDEX_NAME, fields=Fields(), size=32)
    assert numbers_in(store) == list(range(6))
    assert numbers_in(SampleStore(tmp_path)) == [0, 1, 2]


def test_verify_reads_every_picture_of_the_tars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simple(tmp_path, [4, 5])
    make_index(str(tmp_path), tmp_path / INDEX_NAME, fields=Fields(), size=32)
    done = call(main, "verify", tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert (done.status, done.stdout.count("\n")) == (0, 1)
    assert "is sound: 9 samples in 2 tars" in done.stdout
    path = tmp_path / "train-0001.tar"
    content = path.read_bytes()
    place = content.index(b"IDAT")
    path.write_bytes(content[:place] + bytes(40) + content[place + 40 :])
    done = call(main, "verify", tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 1
    assert "train-0001.tar: 00000004: " in done.stdout
    assert "8 of 9 samples sound in 2 tars" in done.stdout
    path.write_bytes(content[:-512])
    done = call(main, "verify", tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 1
    assert "but it had" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ["preview", "--out", "x.png"],
        ["trace", "--batch-size", "3"],
        ["bench", "--seconds", "0.01", "--max-workers", "0"],
    ],
)
def test_the_other_commands_take_tars(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simple(tmp_path, [4, 5])
    make_index(str(tmp_path), tmp_path / INDEX_NAME, fields=Fields(), size=32)
    monkeypatch.chdir(tmp_path)
    more = ["--batch-size", "4"] if command[0] == "bench" else []
    done = call(main, command[0], tmp_path, *command[1:], *more, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 0, done.stderr
    assert done.stdout


# Remote tars


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """An S3-compatible server on the loopback address, with an empty bucket. Its URL is in AWS_ENDPOINT_URL."""
    with served_bucket("pictures") as name:
        yield f"s3://{name}"


def upload(directory: Path, bucket: str, prefix: str) -> str:
    client = boto3.client("s3")
    for path in sorted(directory.glob("*.tar")):
        client.upload_file(str(path), bucket.removeprefix("s3://"), f"{prefix}/{path.name}")
    return f"{bucket}/{prefix}"


def test_tars_in_an_object_store_are_indexed_and_read_through_the_cache(bucket: str, tmp_path: Path) -> None:
    where = upload(simple(tmp_path / "tars", [5, 6, 7]), bucket, "read")
    make_index(f"{where}/train-{{0000..0002}}.tar", tmp_path / "index", fields=Fields(), size=32)
    remote = RemoteConfig(cache_dir=str(tmp_path / "cache"))
    store = SampleStore(tmp_path / "index", remote=remote)
    assert store.is_remote
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").rglob("*.tar"))
    assert numbers_in(store) == list(range(18))
    assert len(list((tmp_path / "cache").rglob("*.tar"))) == 3
    assert has_remote_tars(tmp_path / "index")
    assert (tmp_path / "index" / "tars.sha256").stat().st_size == 3 * 32


def test_a_remote_tar_that_was_replaced_is_refused(bucket: str, tmp_path: Path) -> None:
    tars = simple(tmp_path / "tars", [5])
    where = upload(tars, bucket, "replaced")
    make_index(f"{where}/train-0000.tar", tmp_path / "index", fields=Fields(), size=32)
    path = tars / "train-0000.tar"
    content = bytearray(path.read_bytes())
    content[3_600] ^= 1
    path.write_bytes(content)
    upload(tars, bucket, "replaced")
    store = SampleStore(tmp_path / "index", remote=RemoteConfig(cache_dir=str(tmp_path / "cache"), num_attempts=1))
    with pytest.raises(UserError, match="is not the file that the manifest names"):
        decode(store, np.arange(5))


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("s3://pictures/none/train-0000.tar", "there is no such object"),
        ("pipe:cat /data/train-{0000..0001}.tar", "is a command, which an index does not keep"),
        ("ftp://host/train-0000.tar", "is not a location of a dataset"),
    ],
)
def test_remote_tars_that_cannot_be_read_are_named(bucket: str, tmp_path: Path, location: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_index(location, tmp_path / "index", fields=Fields())


def test_missing_credentials_are_named_by_their_variables(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UserError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"):
        make_index(f"{bucket}/x/train-0000.tar", tmp_path / "index", fields=Fields())
    s3fs.S3FileSystem.clear_instance_cache()


def test_remote_tars_as_a_dataset_say_how_to_index_them(bucket: str) -> None:
    with pytest.raises(UserError, match="names tars; index them with `python -m data_pipeline index"):
        SampleStore(f"{bucket}/train-{{0000..0002}}.tar")


@pytest.mark.parametrize(("num_cached", "num_workers"), [(2, 0), (4, 0), (4, 2)])
def test_remote_tars_are_read_in_windows_with_a_small_cache(
    bucket: str, tmp_path: Path, num_cached: int, num_workers: int
) -> None:
    tars = simple(tmp_path / "tars", [6] * 8, with_labels=False)
    where = upload(tars, bucket, f"windows{num_cached}")
    make_index(f"{where}/train-{{0000..0007}}.tar", tmp_path / "index", fields=Fields(), size=32)
    largest = max(path.stat().st_size for path in tars.glob("*.tar"))
    gigabytes = (num_cached + 0.5) * largest / 1e9
    remote = RemoteConfig(cache_dir=str(tmp_path / "cache"), cache_gigabytes=gigabytes)

    def batches(start_step: int) -> list[list[int]]:
        stream = Stream(
            tmp_path / "index",
            read=ReadConfig(num_workers=num_workers, placement="stream", shuffle_shards=num_cached // 2, remote=remote),
            global_batch_size=8,
            seed=0,
            rank=0,
            world_size=1,
            start_step=start_step,
            end_step=6,
        )
        return [[number_of(pixels) for pixels in batch.inputs_a.numpy()] for batch in stream]

    whole = batches(0)
    assert sorted(number for batch in whole for number in batch) == list(range(48))
    assert batches(3) == whole[3:]
    assert len(list((tmp_path / "cache").rglob("*.tar"))) <= num_cached


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """A web server with two tars of three samples each, of which fetches wait only a moment between attempts."""
    monkeypatch.setattr("data_pipeline.remote.fetch._LONGEST_PAUSE", 0.01)
    with serve(simple(tmp_path / "served", [3, 3])) as server:
        yield server


BOTH = "train-{0000..0001}.tar"


@pytest.mark.parametrize("answer", ["truncate", "page", "nothing", "no file"])
def test_a_remote_tar_that_is_not_whole_is_fetched_again_and_then_refused(
    server: FaultyServer, tmp_path: Path, answer: str
) -> None:
    path = server.directory / "train-0001.tar"
    content = path.read_bytes()
    if answer == "truncate":
        server.faults[path.name] = ["truncate"]
        assert numbers_in(indexed_remote(server, tmp_path / "once")) == list(range(6))
        server.for_ever = True
    else:
        path.write_bytes({"page": b"<html>please log in</html>" * 40, "nothing": b"", "no file": bytes(10_240)}[answer])
    server.requests.clear()
    server.faults[path.name] = ["truncate"] * (answer == "truncate")
    with pytest.raises(UserError, match=rf"{path.name} could not be fetched: .* not a whole tar .*5 attempts"):
        indexed_remote(server, tmp_path / "index")
    assert not (tmp_path / "index" / "manifest.json").exists()
    server.faults.clear()
    path.write_bytes(content)
    assert numbers_in(indexed_remote(server, tmp_path / "index")) == list(range(6))
    assert server.requests.count("train-0000.tar") == 2  # for the index, and to read the pictures


def indexed_remote(server: FaultyServer, out: Path) -> SampleStore:
    make_index(f"{server.url}/{BOTH}", out, fields=Fields(), size=32)
    return SampleStore(out, remote=RemoteConfig(cache_dir=str(out / "cache")))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([("a.txt", b"")], "has a picture under one of"),
        ([("a.png", b"no"), ("a.cls", b"0")], "none of the pictures decodes"),
        ([("a.png", picture(0))], "has a label under cls"),
    ],
)
def test_a_remote_tar_that_was_mended_after_a_refusal_is_fetched_again(
    server: FaultyServer, tmp_path: Path, wrong: list[Member], said: str
) -> None:
    location, fields = f"{server.url}/train-0000.tar", Fields(labels={"base": "cls"})
    whole = (server.directory / "train-0000.tar").read_bytes()
    by_tarfile(server.directory / "train-0000.tar", wrong)
    with pytest.raises(UserError, match=said):
        make_index(location, tmp_path / "index", fields=fields, size=32)
    (server.directory / "train-0000.tar").write_bytes(whole)
    make_index(location, tmp_path / "index", fields=fields, size=32)
    assert load_manifest(tmp_path / "index").num_samples == 3
    assert len(server.requests) == 2


def test_a_remote_tar_without_a_picture_is_fetched_again_after_an_interruption(
    server: FaultyServer, tmp_path: Path
) -> None:
    whole = (server.directory / "train-0000.tar").read_bytes()
    by_tarfile(server.directory / "train-0000.tar", [("a.txt", b"")])
    server.faults["train-0001.tar"] = [404]
    with pytest.raises(UserError, match="404"):
        indexed_remote(server, tmp_path / "index")
    (server.directory / "train-0000.tar").write_bytes(whole)
    assert numbers_in(indexed_remote(server, tmp_path / "index")) == list(range(6))


def test_a_remote_tar_that_is_named_twice_is_refused(server: FaultyServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"names http://\S+/train-0000.tar twice; name each tar once"):
        make_index(f"{server.url}/train-{{0000,0001,0000}}.tar", tmp_path / "index", fields=Fields())
    assert not server.requests


# A folder that is packed as it is


def write_folder(root: Path, *, split: str = "train", num: int = 6) -> Path:
    for number in range(num):
        path = root / split / ("owl" if number % 2 else "crow") / f"{number}.{'PNG' if number % 3 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number, height=40 + number, kind="PNG" if number % 3 else "JPEG"))
    return root


def test_a_folder_is_packed_without_a_second_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = write_folder(tmp_path / "photos"), tmp_path / "kept"
    arguments = ["build", "folder", "--keep", "--root", str(root), "--out", str(out), "--image-size", "32"]
    done = call(main, *arguments, "--samples-per-shard", "4", monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 0, done.stderr
    assert "6 samples in 2 tars" in done.stdout
    files = {path.read_bytes() for path in root.rglob("*.*")}
    stored = {
        bytes(content) for path in out.glob("*.tar") for name, content in contents_of(path) if not name.endswith(".cls")
    }
    assert stored == files
    moved = out.rename(tmp_path / "moved")
    store = SampleStore(moved)
    assert store.manifest.label_names.base == ("crow", "owl")
    decoded = decode(store, np.arange(6))
    assert decoded.pictures_BCHW is not None
    numbers = [number_of(pixels) for pixels in decoded.pictures_BCHW.numpy()]
    assert sorted(numbers) == list(range(6)) != numbers
    assert decoded.labels["base"].tolist() == [number % 2 for number in numbers]
    again = call(main, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert again.status == 0, again.stderr
    whole = b"".join(path.read_bytes() for path in sorted(moved.glob("*.tar")))
    assert all(content in whole for content in files)


def contents_of(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["build", "folder_digits", "--keep", "--root", "photos"],
            "or folder_digits or another with `--overlay online`",
        ),
        (["build", "folder", "--keep", "--root", "photos", "--overlay", "online"], "build folder without --overlay"),
        (["build", "folder", "--keep", "--root", "photos", "--digits", "sklearn"], "--digits is about an overlay"),
        (["build", "cifar10", "--keep", "--root", "photos"], "use it with folder, folder_digits or another"),
        (["build", "folder", "--keep"], "name it with --root"),
        (["build", "folder", "--keep", "--root", "photos", "--repeats", "2"], "without --repeats"),
        (["build", "folder", "--keep", "--root", "nothing"], "is not a folder"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_a_sentence(
    tmp_path: Path,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_folder(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    done = call(main, *arguments, "--out", tmp_path / "out", monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 2
    assert said in done.stderr


def test_a_packed_class_has_the_name_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a long one, or one with spaces at its ends, which a reader of a `cls` file strips."""
    names = sorted([" crow", "crow", "owl ", "w" * 250])
    for number, name in enumerate(names):
        path = tmp_path / "photos" / "train" / name / "a.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(picture(number))
    words = ["--root", str(tmp_path / "photos"), "--out", str(tmp_path / "kept"), "--image-size", "32"]
    done = call(main, "build", "folder", "--keep", *words, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 0, done.stderr
    assert "4 labels of 4 classes" in done.stdout
    store = SampleStore(tmp_path / "kept")
    assert store.manifest.label_names.base == tuple(names)
    assert decode(store, np.arange(4)).labels["base"].tolist() == numbers_in(store)


def test_a_copied_packed_folder_says_how_to_copy_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`index` would not make its index again: that lies beside the tars, and `index` writes into .tar_index."""
    kept = tmp_path / "kept"
    words = ["--root", str(write_folder(tmp_path / "photos")), "--out", str(kept), "--image-size", "32"]
    assert call(main, "build", "folder", "--keep", *words, monkeypatch=monkeypatch, capsys=capsys).status == 0
    shutil.copytree(kept, tmp_path / "exact")  # keeps the times, as `cp -a` does
    numbers = numbers_in(SampleStore(tmp_path / "exact"))
    assert not caplog.messages
    shutil.copytree(kept, tmp_path / "copied", copy_function=shutil.copy)
    assert numbers_in(SampleStore(tmp_path / "copied")) == numbers
    mend = "copy the dataset again with `cp -a`, which keeps the times, or make it again"
    assert caplog.messages[0].endswith(f"written again after it was indexed; to be sure of its content, {mend}")
    (tar,) = (tmp_path / "copied").glob("*.tar")
    tar.write_bytes(b"")
    with pytest.raises(UserError, match=f"; {mend}"):
        SampleStore(tmp_path / "copied")


def broken_link(path: Path) -> None:
    path.symlink_to("nothing.png")


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Path.mkdir, "not a regular file"), (os.mkfifo, "not a regular file"), (broken_link, "no such file or directory")],
)
def test_an_entry_of_a_folder_that_is_no_file_is_not_packed(
    tmp_path: Path,
    make: Callable[[Path], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = write_folder(tmp_path / "photos")
    make(root / "train" / "owl" / "x.png")
    words = ["--root", str(root), "--out", str(tmp_path / "kept"), "--image-size", "32"]
    done = call(main, "build", "folder", "--keep", *words, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 2
    assert f"owl/x.png cannot be packed ({reason}); mend or remove it\n" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_a_picture_that_is_too_large_for_an_index_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keep_files, "MAX_PICTURE_BYTES", 10)
    words = ["--root", str(write_folder(tmp_path / "photos")), "--out", str(tmp_path / "kept"), "--image-size", "32"]
    done = call(main, "build", "folder", "--keep", *words, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 2
    assert "cannot be packed (larger than 10 bytes); mend or remove it" in done.stderr


@pytest.mark.parametrize("name", ["a\nb", "a\u00a0b", os.fsdecode(b"a\xff")])
def test_a_class_whose_name_cannot_be_printed_is_refused_before_packing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_folder(tmp_path / "photos")
    (root / "train" / "owl").rename(root / "train" / name)
    monkeypatch.setattr(keep_files, "_write_tars", None)
    words = ["--root", str(root), "--out", str(tmp_path / "kept"), "--image-size", "32"]
    done = call(main, "build", "folder", "--keep", *words, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 2
    assert re.search(r"the label base of .*photos/train .* cannot be printed; leave it out", done.stderr)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["a\nb", os.fsdecode(b"a\xff")])
def test_a_folder_is_not_packed_into_a_path_that_cannot_be_printed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--root", str(write_folder(tmp_path / "photos")), "--out", str(tmp_path / name), "--image-size", "32"]
    done = call(main, "build", "folder", "--keep", *words, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 2
    assert "holds a character that cannot be printed, and its manifest names it; choose another --out\n" in done.stderr


@pytest.mark.parametrize("name", ["a", "a.jp2"])
def test_a_picture_without_a_known_ending_is_refused_before_packing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reader of tars knows a picture by its ending."""
    (tmp_path / name).write_bytes(picture(0))
    table = tmp_path / "labels.csv"
    table.write_text(f"file,split,base\n{name},train,owl\n")
    words = ["--root", str(tmp_path), "--labels", str(table), "--out", str(tmp_path / "kept"), "--image-size", "32"]
    done = call(main, "build", "folder", "--keep", *words, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 2
    assert f"/{name} has none of the endings of pictures that are packed (.jpg, .jpeg," in done.stderr


class Killed(BaseException):
    """Stands for the end of the process: nothing is cleaned up after it."""


@pytest.mark.parametrize("killed_at", ["read_regular", "write_index"])
def test_a_packing_that_was_killed_is_no_dataset_and_is_packed_again(
    tmp_path: Path, killed_at: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = write_folder(tmp_path / "photos", num=12), tmp_path / "kept"
    arguments = ["build", "folder", "--keep", "--root", str(root), "--out", str(out), "--image-size", "32"]
    function, num_calls = getattr(keep_files, killed_at), 0

    def killed(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        result = function(*args, **options)
        if num_calls == (6 if killed_at == "read_regular" else 1):
            raise Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(keep_files, killed_at, killed)
        patch.setattr("data_pipeline.building.build.shutil.rmtree", lambda *args, **options: None)
        with pytest.raises(Killed):
            call(main, *arguments, "--samples-per-shard", "4", monkeypatch=monkeypatch, capsys=capsys)
    partial = tmp_path / "kept.partial"
    assert not out.exists()
    assert list((partial / ".shard-packing").glob("*.tar"))
    for location in (out, partial):
        with pytest.raises(UserError, match="build it with"):
            load_manifest(location)
        ensure_index(str(location))
        assert not (location / INDEX_NAME).exists()
    done = call(main, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 0, done.stderr
    assert not partial.exists()
    assert sorted(numbers_in(SampleStore(out))) == list(range(12))
    assert str(partial) not in (out / "manifest.json").read_text()
    assert {path.name for path in out.iterdir() if path.name.startswith(".")} == set()


def test_what_another_build_has_left_is_no_part_of_a_packed_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In both orders: what a packing has left is no part of a built dataset either."""
    arguments = ["build", "folder", "--root", str(write_folder(tmp_path / "photos")), "--image-size", "32"]
    partial = tmp_path / "kept.partial"
    partial.mkdir()
    for name in ("build.json", "shard-000007.tar", "shard-000007.index", ".shard-000007.finished"):
        (partial / name).write_text("")
    done = call(main, *arguments, "--keep", "--out", tmp_path / "kept", monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 0, done.stderr
    assert len(list((tmp_path / "kept").glob("*shard*"))) == 1
    assert not (tmp_path / "kept" / "build.json").exists()
    (tmp_path / "built.partial" / ".shard-packing").mkdir(parents=True)
    done = call(main, *arguments, "--out", tmp_path / "built", monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 0, done.stderr
    assert not (tmp_path / "built" / ".shard-packing").exists()


def test_a_limit_of_a_packed_folder_is_balanced_over_the_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_folder(tmp_path / "photos", num=24)
    for path in sorted((root / "train" / "owl").iterdir())[3:]:
        path.unlink()
    words = ["--limit", "6", "--out", str(tmp_path / "kept")]
    done = call(main, "build", "folder", "--keep", "--root", root, *words, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 0, done.stderr
    assert load_manifest(tmp_path / "kept").counts_base == (3, 3)


def test_a_folder_is_not_packed_over_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("")
    words = ["--root", str(write_folder(tmp_path / "photos")), "--out", str(tmp_path / "out")]
    done = call(main, "build", "folder", "--keep", *words, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 2
    assert "is not empty; choose another directory" in done.stderr
    assert [path.name for path in tmp_path.glob("out*/*")] == ["mine.txt"]
