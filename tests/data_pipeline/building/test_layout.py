"""Which file is a record, of which split and class: directories and zips of every layout, with empty files."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torchvision

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BASE
from data_pipeline.sources.files import Files, open_files
from data_pipeline.sources.layout import Layout, find_layout


def write(root: Path, names: Sequence[str], *, zipped: bool = False) -> Files:
    """Files that hold their own names."""
    if zipped:
        root.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(root, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in names:
                archive.writestr(name, name)
    else:
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(name)
    return open_files(root)


def meaning(layout: Layout) -> dict[str, str]:
    """The split and the class of each record, as SPLIT:CLASS."""
    base = layout.labels.get(BASE)
    splits = [""] * len(layout.names) if layout.split_N is None else layout.split_N.tolist()
    classes = [""] * len(layout.names) if base is None else [base.classes[number] for number in base.label_N]
    return {name: f"{split}:{word}" for name, split, word in zip(layout.names, splits, classes, strict=True)}


LAYOUTS: dict[str, tuple[list[str], str | None, dict[str, str], list[str]]] = {
    # files, class_from, the meaning of each record, and what the notes say
    "class folders": (["b/1.png", "a/2.JPG"], None, {"a/2.JPG": ":a", "b/1.png": ":b"}, []),
    "as Finder sorts them": (["a b/1.png", "a/2.png"], None, {"a/2.png": ":a", "a b/1.png": ":a b"}, []),
    "splits": (
        ["Training/a/1.png", "Training/b/1.png", "testing/a/2.png"],
        None,
        {"Training/a/1.png": "train:a", "Training/b/1.png": "train:b", "testing/a/2.png": "test:a"},
        [],
    ),
    "validation in place of test": (
        ["train/a/1.png", "train/b/1.png", "valid/a/2.png"],
        None,
        {"train/a/1.png": "train:a", "train/b/1.png": "train:b", "valid/a/2.png": "test:a"},
        ["there is no folder test, so the validation files are the test split"],
    ),
    "three splits": (
        ["dev/c/1.png", "test/a/1.png", "train/a/1.png", "train/b/1.png"],
        None,
        {"test/a/1.png": "test:a", "train/a/1.png": "train:a", "train/b/1.png": "train:b"},
        ["left out what lies in a folder of validation files"],
    ),
    "a class called dev": (["dev/1.png", "prod/1.png"], None, {"dev/1.png": ":dev", "prod/1.png": ":prod"}, []),
    "nested": (
        ["a/images/1.png", "a/2021/05/1.png", "b/1.png"],
        None,
        {"a/2021/05/1.png": ":a", "a/images/1.png": ":a", "b/1.png": ":b"},
        [],
    ),
    "another level": (
        ["x/a/1.png", "x/b/1.png", "y/a/1.png", "1.png"],
        "path:-1",
        {"x/a/1.png": ":a", "x/b/1.png": ":b", "y/a/1.png": ":a"},
        ["left out what lies in no class folder"],
    ),
    "below one folder": (
        ["me/photos/train/a/1.png", "me/photos/train/b/1.png", "me/notes.txt"],
        "path:0",
        {"me/photos/train/a/1.png": "train:a", "me/photos/train/b/1.png": "train:b"},
        ["ignored files that are no picture"],
    ),
    "flat": (["2.png", "1.png"], None, {"1.png": ":", "2.png": ":"}, []),
    "one folder": (
        ["1.png", "only/2.png"],
        None,
        {"1.png": ":", "only/2.png": ":"},
        ["there is only one class folder (only), so no picture has a label"],
    ),
    "beside the classes": (
        ["1.png", "a/1.png", "b/1.png", "b/Thumbs.db", "__MACOSX/b/1.png", ".c/1.png", "b/._1.png"],
        None,
        {"a/1.png": ":a", "b/1.png": ":b"},
        ["left out what lies in no class folder"],
    ),
    "two forms of Unicode": (
        ["e\u0301/1.png", "\u00e9/2.png", "f/1.png"],
        None,
        {"e\u0301/1.png": ":\u00e9", "f/1.png": ":f", "\u00e9/2.png": ":\u00e9"},
        ["took class folders that Unicode writes in two ways as one"],
    ),
}


@pytest.mark.parametrize("zipped", [False, True], ids=["folder", "zip"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_its_meaning(layout: str, zipped: bool, tmp_path: Path) -> None:
    names, class_from, expected, said = LAYOUTS[layout]
    found = find_layout(write(tmp_path / "root.zip", names, zipped=zipped), "picture", class_from=class_from)
    assert list(meaning(found).items()) == list(expected.items())  # and in this order
    assert list(found.notes) == said
    noted = {name for about in found.notes.values() for name in about if name.endswith(".png")}
    there = {name for name in names if "__" not in name and "/." not in f"/{name}" and name.endswith(("g", "G"))}
    if "two forms" not in layout:
        assert noted == there - expected.keys()  # nothing is lost without a word


def test_the_classes_are_those_of_torchvision(tmp_path: Path) -> None:
    names = ["b/1.png", "a/x/2.png", "a/1.jpg", "a-b/c.webp", "b/y/z/9.ppm", "B/1.png"]
    write(tmp_path / "root", names)
    (tmp_path / "root" / "linked").symlink_to(tmp_path / "root" / "b")
    peer = torchvision.datasets.ImageFolder(str(tmp_path / "root"))
    found = meaning(find_layout(open_files(tmp_path / "root"), "picture"))
    expected = {str(Path(path).relative_to(tmp_path / "root")): f":{peer.classes[label]}" for path, label in peer.imgs}
    assert found == expected


def test_links_are_followed_and_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path / "other", ["1.png"])
    files = write(tmp_path / "root", ["a/1.png"])
    (tmp_path / "root" / "void").mkdir()
    os.mkfifo(tmp_path / "root" / "pipe")
    links = {"file.png": "a/1.png", "folder": "../other", "a/up": "..", "gone": "nowhere"}
    for link, target in links.items():
        (tmp_path / "root" / link).symlink_to(target)
    (tmp_path / "other" / "round").symlink_to("../root")
    assert list(files.names) == ["a/1.png", "file.png", "folder/1.png"]
    assert files.others == {
        "a/up": "a link to a folder above it",
        "folder/round": "a link to a folder above it",
        "gone": "a broken link",
        "pipe": "no regular file",
        "void/": "an empty folder",
    }


@pytest.mark.parametrize("zipped", [False, True], ids=["folder", "zip"])
def test_a_copy_in_another_process_reads_the_same_also_in_threads(zipped: bool, tmp_path: Path) -> None:
    names = [f"{number % 7}/{number:04}.png" for number in range(300)]
    files = write(tmp_path / "root", names, zipped=zipped)
    copy = pickle.loads(pickle.dumps(files))
    assert len(pickle.dumps(files)) < 300  # also after the names were listed
    for each in (files, copy):
        assert list(each.names) == sorted(names)
        with ThreadPoolExecutor(8) as pool:
            assert [content.decode() for content in pool.map(each.read, each.names)] == list(each.names)
    with files.open(names[0]) as file:
        file.seek(2)
        assert file.read(2) == b"00"


def test_a_damaged_zip_is_named(tmp_path: Path) -> None:
    files = write(tmp_path / "root.zip", ["a/1.png", "b/1.png"], zipped=True)
    data = bytearray((tmp_path / "root.zip").read_bytes())
    data[data.index(b"a/1.png") + 9] ^= 255
    (tmp_path / "root.zip").write_bytes(data)
    with pytest.raises(ValueError, match="it cannot be unpacked"):
        files.read("a/1.png")
    (tmp_path / "root.zip").write_bytes(data[:-30])
    with pytest.raises(UserError, match=r"root\.zip is not a folder, nor a zip; give --root"):
        open_files(tmp_path / "root.zip")
