"""Tars that WebDataset's writer, GNU tar and Python's tarfile have written are read as they are, with their labels."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.__main__ import main
from data_pipeline.building.index_tars import describe_tars, make_index
from data_pipeline.building.tar_scan import measured_rows
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.loading.decode import decode
from data_pipeline.storage.manifest import Fields
from data_pipeline.storage.store import SampleStore
from data_pipeline.storage.tar_headers import LINKS, read_contents
from tests.commands import Call
from tests.tars import Member, by_tarfile, by_webdataset, indexed, number_of, numbers_in, picture, simple


def test_every_sample_is_read_in_its_order_with_its_label(tmp_path: Path) -> None:
    store = indexed(simple(tmp_path / "tars", [5, 1, 8]), tmp_path / "index")
    assert len(store) == 14
    assert store.shard_ends.tolist() == [5, 6, 14]
    assert store.manifest.labels["base"].classes == ("0", "1", "2")
    assert store.manifest.labels["base"].counts == (5, 5, 4)
    assert numbers_in(store) == list(range(14))
    order = np.array([13, 0, 5, 4, 6, 2])
    decoded = decode(store, order)
    assert decoded.pictures_BCHW is not None
    assert [number_of(pixels) for pixels in decoded.pictures_BCHW.numpy()] == order.tolist()
    assert decoded.labels["base"].tolist() == (order % 3).tolist()
    assert decoded.labels.keys() == {"base"}
    assert (tmp_path / "index" / "samples.bin").stat().st_size == 8 * 14


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


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        *((shape, tarfile.GNU_FORMAT) for shape in SHAPES),
        ("long names", tarfile.USTAR_FORMAT),
        ("long names", tarfile.PAX_FORMAT),
    ],
)
def test_tars_of_many_shapes_are_read(tmp_path: Path, shape: str, kind: int) -> None:
    for number, members in enumerate(SHAPES[shape]):
        by_tarfile(tmp_path / f"{number}.tar", members, kind=kind)
    assert numbers_in(indexed(tmp_path, tmp_path / "index")) == [0, 1]


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
    assert store.manifest.labels["base"].classes == ("crow", "owl", "wren")
    assert decode(store, np.arange(4)).labels["base"].tolist() == [2, 1, 2, 0]


@pytest.mark.parametrize("between", ["./._{name}", "d/LICENSE", "__meta__/x.json"])
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
        ([1, 2.0, "0", None, "NaN", [1]], ("0", "1", "2"), [1, 2, 0, NO_LABEL, NO_LABEL, NO_LABEL]),
        ([-1, 0, 1, -1.0], ("0", "1"), [NO_LABEL, 0, 1, NO_LABEL]),
        (["Caf\u00e9", "Cafe\u0301", "N/A", "none"], ("Caf\u00e9", "none"), [0, 0, NO_LABEL, 1]),
    ],
)
def test_numbers_are_labels_as_their_writers_mean_them(
    tmp_path: Path, values: Sequence[object], classes: tuple[str, ...], labels: list[int]
) -> None:
    """A whole number may be written as 2.0, and -1 among the numbers of classes is no label."""
    tars = with_json_labels(tmp_path / "tars", values)
    manifest, _ = make_index(str(tars), tmp_path / "index", fields=Fields(labels={"base": "json:y"}), size=16)
    assert manifest.labels["base"].classes == classes
    assert decode(SampleStore(tmp_path / "index"), np.arange(len(values))).labels["base"].tolist() == labels


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("größe".encode("latin-1"), "that of 0.png: 'utf-8' codec can't decode byte"),
        (b"wren\nowl", "that of 0.png: its text of"),
    ],
)
def test_labels_that_cannot_be_read_are_counted_and_the_first_is_named(
    tmp_path: Path, content: bytes, said: str
) -> None:
    members = [("0.png", picture(0)), ("0.cls", content), ("1.png", picture(1)), ("1.cls", content)]
    by_tarfile(tmp_path / "a.tar", members)
    manifest, facts = make_index(str(tmp_path), tmp_path / "index", fields=Fields(), size=16)
    assert not manifest.labels
    lines = list(describe_tars(facts, Fields()))
    (line,) = (line for line in lines if line.startswith("2 labels cannot be read, such as "))
    assert said in line
    with pytest.raises(UserError, match=f"has a label under cls .{said}"):
        make_index(str(tmp_path), tmp_path / "named", fields=Fields(labels={"base": "cls"}), size=16)


def test_samples_without_a_picture_or_a_label_are_counted(tmp_path: Path, call: Call) -> None:
    members = [
        ("a.png", picture(0)),
        ("a.cls", b"4"),
        ("b.txt", b"no picture"),
        ("c.png", picture(1)),
        ("d.png", b"no"),
    ]
    by_tarfile(tmp_path / "x.tar", members)
    done = call(main, "index", tmp_path, "--workers", "1")
    assert done.status == 0, done.stderr
    for said in (
        "3 samples in 1 tars",
        "label_base, base: 5 classes",
        "fields: png 3, cls 1, txt 1",
        "2 samples have no label",
        "1 samples without a picture",
        "1 of the pictures that were tried do not decode",
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
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture, call: Call
) -> None:
    path = simple(tmp_path, [6]) / "train-0000.tar"
    content = damage(path.read_bytes())
    path.write_bytes(content)
    end = read_contents(memoryview(content)).end
    done = call(main, "index", path, "--workers", "1")
    assert done.status == 0
    said = f"is cut short or damaged at byte {end:,}; the {len(content) - end:,} bytes behind are not used"
    assert f"{path} {said}" in caplog.text
    whole = numbers_in(SampleStore(path))
    assert whole == list(range(len(whole)))
    done = call(main, "verify", path)
    assert done.status == 1
    assert done.stdout.startswith(f"train-0000.tar: {said}\n")
    assert "has 1 problem" in done.stdout


def test_what_is_behind_the_end_mark_of_a_tar_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: Call
) -> None:
    """As in the concatenation of two tars, of which every reader of tars sees the first."""
    simple(tmp_path / "two", [3, 3])
    first, second = (path.read_bytes() for path in sorted((tmp_path / "two").glob("*.tar")))
    path = tmp_path / "x.tar"
    path.write_bytes(first + second)
    end = read_contents(memoryview(first)).end
    num_behind = len(first) + len(second) - end
    done = call(main, "index", path, "--workers", "1")
    said = f"goes on behind its end mark at byte {end:,}; the {num_behind:,} bytes behind are not used"
    assert f"{path} {said}" in caplog.text
    done = call(main, "verify", path)
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
    _, tars = make_index(str(tmp_path), tmp_path / "index", fields=Fields(), size=32)
    assert numbers_in(SampleStore(tmp_path / "index")) == [1]
    (said,) = (line for line in describe_tars(tars, Fields()) if "links" in line)
    assert said == f"2 {LINKS}, such as {long_name}"
