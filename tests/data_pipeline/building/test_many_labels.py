"""Datasets with any number of named labels: from a table, from tars, from overlays; and older ones with two."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from data_pipeline.__main__ import main
from data_pipeline.building.build import build_dataset
from data_pipeline.building.index_tars import make_index, parse_labels
from data_pipeline.core.counter_rng import DrawKeys, integers
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import MASK_OBJECT, NO_LABEL
from data_pipeline.loading.decode import decode
from data_pipeline.loading.whole import read_all
from data_pipeline.overlays import FIRST_PURPOSE, Layer, PictureOverlay
from data_pipeline.overlays.registry import NAMES
from data_pipeline.storage.locations import INDEX_NAME
from data_pipeline.storage.manifest import Fields, LabelEntry, describe_manifest, load_manifest
from data_pipeline.storage.store import SampleStore
from tests.commands import Call
from tests.data_pipeline.folders import open_folder
from tests.data_pipeline.stored_samples import decode_sample, find_problems
from tests.tars import by_webdataset, picture
from tests.tiny_data import damage

SEX, SITES = ("f", "m"), ("Bonn", "Kiel", "Ulm")


def write_table(path: Path, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return path


def hospital(root: Path, *, num: int = 24) -> tuple[Path, dict[str, dict[str, str]]]:
    """Pictures in folders, a table of their labels, and the labels by file. Every fifth picture has no site."""
    (root / "a").mkdir(parents=True)
    labels = {}
    for number in range(num):
        name = f"a/{number:04d}.png"
        (root / name).write_bytes(picture(number, height=32, width=32))
        labels[name] = {
            "sex": SEX[number % 2],
            "site": "" if number % 5 == 0 else SITES[number % 3],
            "grade": str(number % 3),
            "split": "test" if number % 4 == 3 else "train",
        }
    head = ["file", "split", "sex", "site", "grade"]
    rows = [[name, *(cells[column] for column in head[1:])] for name, cells in labels.items()]
    return write_table(root.parent / "labels.csv", head, rows), labels


def found_labels(location: Path, labels: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """The labels of each stored picture, by the file that has its pixels."""
    pixels_of = {np.asarray(Image.open(location.parent / "pics" / name)).tobytes(): name for name in labels}
    store, found = SampleStore(location), {}
    for index in range(len(store)):
        sample = decode_sample(store, index)
        name = pixels_of[sample.content.tobytes()]
        assert store.file_of(index) == name
        found[name] = {
            label: "" if number == NO_LABEL else store.manifest.labels[label].classes[number]
            for label, number in sample.labels.items()
        }
    return found


@pytest.mark.parametrize("keep", [False, True])
def test_a_table_gives_each_picture_its_labels(tmp_path: Path, keep: bool, call: Call) -> None:
    table, labels = hospital(tmp_path / "pics")
    out = tmp_path / "train"
    words: list[str | Path] = ["build", "folder", "--root", tmp_path / "pics", "--source-option", f"labels={table}"]
    words += ["--out", out]
    words += ["--workers", "1", *(["--keep", "--source-option", "image_size=32"] if keep else [])]
    done = call(main, *words)
    assert done.status == 0, done.stderr
    manifest = load_manifest(out)
    assert {name: label.classes for name, label in manifest.labels.items()} == {
        "sex": SEX,
        "site": SITES,
        "grade": ("0", "1", "2"),
    }
    train = {name: cells for name, cells in labels.items() if cells["split"] == "train"}
    assert found_labels(out, labels) == {
        name: {label: cells[label] for label in ("sex", "site", "grade")} for name, cells in train.items()
    }
    for name, label in manifest.labels.items():
        cells = [cells[name] for cells in train.values()]
        assert label.counts == tuple(cells.count(word) for word in label.classes)
    assert find_problems(out) == []
    assert "label_sex, sex: 2 classes" in done.stdout
    assert "made from: folder with a table of labels" in done.stdout
    name = SampleStore(out).file_of(3)
    damage(out, [3])
    assert decode(SampleStore(out), np.arange(5)).bad[3].reason.startswith(f"{name}: it ")


@pytest.mark.parametrize("overlay", ["baked", "online"])
def test_a_table_and_an_overlay_give_their_labels_together(tmp_path: Path, overlay: str) -> None:
    table, _ = hospital(tmp_path / "pics")
    manifest = build_dataset(
        "folder_shapes",
        tmp_path / "out",
        root=tmp_path / "pics",
        source_options={"labels": str(table)},
        overlay=overlay,
    )
    assert list(manifest.labels) == ["overlay", "sex", "site", "grade"]
    assert [label.given_by for label in manifest.labels.values()] == ["overlay", "source", "source", "source"]
    assert find_problems(tmp_path / "out") == []
    [batch] = read_all(tmp_path / "out", batch_size=100)
    stored = decode(SampleStore(tmp_path / "out"), np.arange(len(batch)))
    assert {name: label_B.tolist() for name, label_B in batch.labels.items() if name != "overlay"} == {
        name: label_B.tolist() for name, label_B in stored.labels.items() if name != "overlay"
    }
    assert ((stored.labels["overlay"] == NO_LABEL) == (overlay == "online")).all()
    assert set(batch.labels["overlay"].tolist()) <= {0, 1, 2}


def test_a_flat_folder_is_a_dataset_without_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hospital(tmp_path / "pics", num=10)
    pics = tmp_path / "pics" / "a"
    assert build_dataset("folder", tmp_path / "all", root=pics).labels == {}
    with pytest.raises(UserError, match=r"so both splits would hold the same pictures; .* test_share=0\.2 to both"):
        build_dataset("folder", tmp_path / "none", root=pics, split="test")
    share = {"test_share": 0.2}
    counts = {}
    for split in ("train", "test"):
        manifest = build_dataset("folder_shapes", tmp_path / split, root=pics, split=split, source_options=share)
        assert list(manifest.labels) == ["overlay"]
        counts[split] = manifest.num_samples
        [batch] = read_all(tmp_path / split, batch_size=10)
        assert set(batch.labels) == {"overlay"}
    assert counts == {"train": 8, "test": 2}
    assert build_dataset("folder", tmp_path / "above", root=tmp_path / "pics").num_samples == 10
    assert not caplog.messages


@pytest.mark.parametrize(
    ("head", "rows", "said"),
    [
        (["file", "Finding Labels"], [["a.png", "x"]], '"Finding Labels" is not a valid name of a label'),
        (["file", "sex"], [["c.png", "f"]], "names 1 files that are not in .*, such as c.png"),
        (["file", "sex", "split"], [["a.png", "f", "val"]], "has no picture in the split train; add some"),
        (["file", "sex"], [["a.png", "f"], ["a.png", "m"]], r"names a\.png 2 times"),
        (["file", "sex"], [["a.png", "f", "m"]], r"line 2 of .*labels\.csv has 3 cells, but its header has 2"),
        (["file", "overlay"], [["a.png", "f"]], "overlay is the label of what a build draws"),
    ],
)
def test_a_wrong_table_is_told_in_one_sentence(
    tmp_path: Path, head: list[str], rows: list[list[str]], said: str
) -> None:
    (tmp_path / "root").mkdir()
    for name in "ab":
        (tmp_path / "root" / f"{name}.png").write_bytes(picture(0))
    table = write_table(tmp_path / "labels.csv", head, rows)
    with pytest.raises(UserError, match=said):
        open_folder(tmp_path / "root", labels=table, split="train")


def test_pictures_in_neither_split_are_counted_by_what_the_table_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table, labels = hospital(tmp_path / "pics")
    names = list(labels)
    splits = ["train", "test", "val", "val", "tset", ""]
    rows = [[name, "f", split] for name, split in zip(names, splits, strict=False)]
    write_table(table, ["file", "sex", "split"], rows)
    for split in ("train", "test"):
        assert open_folder(tmp_path / "pics", labels=table, split=split).num_records == 1
    said = [
        f"{tmp_path}/pics: left out what the table of labels does not name (18, such as a/0006.png)",
        f'{tmp_path}/pics: left out what is in neither split: 2 in "val", 1 in "tset", 1 in "" (4, such as a/0002.png)',
    ]
    assert caplog.messages == said * 2


# --- tars


def write_tar(path: Path, samples: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    by_webdataset(
        path, [{"__key__": f"{number}", "png": picture(number), **sample} for number, sample in enumerate(samples)]
    )


def attributes(**values: Any) -> bytes:
    return json.dumps({"attr": values}).encode()


BIRDS = [
    {"cls": b"wren", "json": attributes(colour="brown", ring=1)},
    {"cls": b"owl", "json": attributes(colour="white")},
    {"cls": b"wren", "json": attributes(ring=0)},
    {"json": b"{"},
]
WANTED = {"base": "cls", "colour": "json:attr.colour", "ring": "json:attr.ring"}


def test_tars_have_a_label_for_each_field_that_is_named(tmp_path: Path, call: Call) -> None:
    write_tar(tmp_path / "tars" / "a.tar", BIRDS[:3])
    write_tar(tmp_path / "tars" / "b.tar", BIRDS[3:])
    words = [word for name, field in WANTED.items() for word in ("--label", f"{name}={field}")]
    done = call(main, *("index", str(tmp_path / "tars"), "--size", "32", "--workers", "1", *words))
    assert done.status == 0, done.stderr
    for said in (
        "label_base, base: 2 classes of 1 to 2 samples each",
        "1 samples have no label (base)\n",
        "no label (ring)",
    ):
        assert said in done.stdout
    store = SampleStore(tmp_path / "tars")
    assert store.manifest.tars.fields.labels == WANTED
    assert {name: label.classes for name, label in store.manifest.labels.items()} == {
        "base": ("owl", "wren"),
        "colour": ("brown", "white"),
        "ring": ("0", "1"),
    }
    found = decode(store, np.array([2, 0, 3, 1])).labels
    assert {name: label_B.tolist() for name, label_B in found.items()} == {
        "base": [1, 1, -1, 0],
        "colour": [-1, 0, -1, 1],
        "ring": [0, 1, -1, -1],
    }
    assert find_problems(tmp_path / "tars") == []
    assert (tmp_path / "tars" / INDEX_NAME / "label_ring.bin").stat().st_size == 4 * 4
    # Another index in its place leaves no label of the first behind.
    make_index(str(tmp_path / "tars"), tmp_path / "tars" / INDEX_NAME, fields=Fields(), size=32)
    assert sorted(path.name for path in (tmp_path / "tars" / INDEX_NAME).glob("label_*")) == ["label_base.bin"]


def test_a_test_set_takes_every_label_of_its_train_set(tmp_path: Path) -> None:
    write_tar(tmp_path / "train" / "a.tar", BIRDS)
    write_tar(tmp_path / "test" / "a.tar", [BIRDS[1], {"cls": b"wren", "json": attributes(colour="brown", ring=0)}])
    make_index(str(tmp_path / "train"), tmp_path / "train" / INDEX_NAME, fields=Fields(labels=WANTED), size=32)
    options = {"fields": Fields(labels=WANTED), "size": 32, "classes_of": tmp_path / "train"}
    make_index(str(tmp_path / "test"), tmp_path / "test" / INDEX_NAME, **options)  # type: ignore[arg-type]
    train, test = load_manifest(tmp_path / "train"), load_manifest(tmp_path / "test")
    assert {name: label.classes for name, label in train.labels.items()} == {
        name: label.classes for name, label in test.labels.items()
    }
    assert test.labels["colour"].counts == (1, 1)
    write_tar(tmp_path / "other" / "a.tar", [{"cls": b"owl", "json": attributes(colour="green", ring=0)}])
    with pytest.raises(UserError, match=r"has labels that .* lacks, such as green; index both with the same --label"):
        make_index(str(tmp_path / "other"), tmp_path / "index", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "field"),
    [
        *((word, "json:a=b") for word in ("json:a=b", "base=json:a=b")),
        *((word, "json:Attr.B") for word in ("Json:Attr.B", ".json:Attr.B", "base=.JSON:Attr.B")),
    ],
)
def test_a_field_may_hold_an_equals_sign_and_its_extension_capitals_and_a_dot(word: str, field: str) -> None:
    assert parse_labels([word]) == {"base": field}


# --- overlays


def test_a_label_that_is_named_twice_is_refused() -> None:
    with pytest.raises(UserError, match=r"--label names a twice \(cls and txt\); give each label once"):
        parse_labels(["a=cls", "a=txt"])


@NAMES.register("bar")
class Bar(PictureOverlay):
    """A bar with two labels, whose colour class is the base label of the picture if that is given."""

    class_names = ("row", "column")
    title = "direction"
    more_labels = {"shade": LabelEntry(title="shade", classes=("dark", "light"))}  # noqa: RUF012

    def draw(self, keys: DrawKeys) -> Layer:
        return self.draw_given(keys, {"base": torch.zeros_like(keys.index_B)})

    def draw_given(self, keys: DrawKeys, labels: Mapping[str, Tensor]) -> Layer:
        label_B, shade_B = integers(keys, 1, 2, purpose=FIRST_PURPOSE)[:, 0], labels["base"] % 2
        mask_BHW = torch.zeros(len(label_B), self.drawn_size, self.drawn_size, dtype=torch.uint8)
        mask_BHW[label_B == 0, 3] = MASK_OBJECT
        mask_BHW[label_B == 1, :, 3] = MASK_OBJECT
        colour_B = (20 + 200 * shade_B).to(torch.uint8)
        return Layer(label_B, colour_B[:, None, None, None], mask_BHW, mask_BHW, {"shade": shade_B})


@pytest.mark.parametrize("drawn", ["baked", "online"])
def test_an_overlay_may_give_several_labels_and_ask_for_those_of_the_source(
    tmp_path: Path, drawn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = "procedural_bar"
    manifest = build_dataset(dataset, tmp_path / "out", limit=40, overlay=drawn)
    assert list(manifest.labels) == ["base", "overlay", "shade"]
    assert manifest.labels["shade"].given_by == "overlay"
    assert (manifest.labels["shade"].counts == ()) == (drawn == "online")
    assert find_problems(tmp_path / "out") == []
    assert describe_manifest(manifest)[3].startswith("label_shade, shade: 2 classes")
    [batch] = read_all(tmp_path / "out", batch_size=40)
    assert batch.labels["shade"].tolist() == (batch.labels["base"] % 2).tolist()
    assert set(batch.labels["overlay"].tolist()) == {0, 1}
    assert (batch.inputs_a[:, :, 3, 3] == (20 + 200 * batch.labels["shade"])[:, None]).all()
    monkeypatch.setattr(Bar, "more_labels", {"base": LabelEntry(title="shade", classes=("dark",))})
    with pytest.raises(UserError, match="the source and the overlay both give the label base; rename it in one"):
        build_dataset(dataset, tmp_path / "again", limit=4)
