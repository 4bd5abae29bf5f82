"""Which file is a record, of which split and class: directories and zips of every layout, with empty files."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torchvision

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import BASE
from data_pipeline.sources.files import Files
from data_pipeline.sources.layout import Layout, find_layout
from data_pipeline.sources.places import open_files


def write(root: Path, files: Mapping[str, str | bytes | None], *, zipped: bool = False) -> Files:
    """Files with these contents; None is the name of the file."""
    contents = {name: name if content is None else content for name, content in files.items()}
    if zipped:
        root.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(root, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in contents.items():
                archive.writestr(name, content)
    else:
        for name, content in contents.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return open_files(root)


def meaning(layout: Layout) -> dict[str, str]:
    """The split and the class of each record, as SPLIT:CLASS, and other labels after it."""
    found = {}
    for number, name in enumerate(layout.names):
        words = {label: column.label_N[number] for label, column in layout.labels.items()}
        words = {label: layout.labels[label].classes[word] if word >= 0 else "" for label, word in words.items()}
        found[name] = f"{'' if layout.split_N is None else layout.split_N[number]}:{words.pop(BASE, '')}"
        found[name] += "".join(f" {label}={word}" for label, word in words.items())
    return found


FLAT = dict.fromkeys(["1.png", "2.png", "3.png", "4.png"])
# The files of a layout, and the meaning of each record, sorted.
TABLES: dict[str, tuple[dict[str, str | bytes | None], dict[str, str], list[str]]] = {
    "the Hub's imagefolder": (
        {"metadata.csv": "file_name,label,site\n2.png,owl,\n1.png,wren,Bonn\n", "1.png": None, "2.png": None},
        {"1.png": ":wren site=Bonn", "2.png": ":owl site="},
        [],
    ),
    "a table in each split": (
        {
            "train/metadata.jsonl": '{"file_name": "a/1.png", "n": 1, "box": [1]}\n{"file_name": "2.png", "n": null}\n',
            "train/a/1.png": None,
            "train/2.png": None,
            "validation/metadata.csv": "file_name,n\n3.png,2\n",
            "validation/3.png": None,
        },
        {"train/2.png": "train: n=", "train/a/1.png": "train: n=1", "validation/3.png": "test: n=2"},
        ["there is no test split, so the validation files are it"],
    ),
    "a table that names no files": (
        {"metadata.csv": "isic_id,sex\n1,f\n", "a/1.png": None, "b/2.png": None},
        {"a/1.png": ":a", "b/2.png": ":b"},
        ["ignored files that are no picture"],
    ),
    "a file of classes beside each": (
        {**FLAT, "1.cls": "3\n", "2.cls": "0", "3.cls": "", "4.txt": "a caption"},
        {"1.png": ":3", "2.png": ":0", "3.png": ":", "4.png": ":"},
        ["ignored files that are no picture"],
    ),
    "captions": (
        {**FLAT, "1.txt": "an owl", "2.txt": "a wren", "3.txt": "a tree", "4.txt": "a bird"},
        dict.fromkeys(FLAT, ":"),
        ["ignored files that are no picture"],
    ),
    "captions in a table": (
        {
            "metadata.csv": "file_name,text,age\n" + "".join(f"{i:04}.png,an owl {i},{i}.5\n" for i in range(1_001)),
            **{f"{i:04}.png": b"" for i in range(1_001)},
        },
        {f"{i:04}.png": f": age={i}.5" for i in range(1_001)},
        ["left out the label text, which has 1001 different values"],
    ),
    "an object of JSON beside each": (
        {
            "a/1.png": None,
            "a/1.json": '{"sex": "f", "age": 2.5, "box": {"x": 1}}',
            "b/2.png": None,
            "b/2.json": '{"sex": null}',
        },
        {"a/1.png": ":a sex=f age=2.5", "b/2.png": ":b sex= age="},
        [],
    ),
}


@pytest.mark.parametrize("zipped", [False, True], ids=["folder", "zip"])
@pytest.mark.parametrize("layout", TABLES)
def test_labels_in_files_are_those_of_the_records(layout: str, zipped: bool, tmp_path: Path) -> None:
    files, expected, said = TABLES[layout]
    found = find_layout(write(tmp_path / "root.zip", files, zipped=zipped), "picture")
    assert list(meaning(found).items()) == list(expected.items())
    assert list(found.notes) == said


def test_folders_that_the_user_names_are_the_classes_beside_the_labels_of_a_table(tmp_path: Path) -> None:
    table = "file_name,label,sex\na\\1.png,x,f\nb/2.png,y,m\n"  # the first as Windows writes it
    files = write(tmp_path / "root", {"metadata.csv": table, "a/1.png": None, "b/2.png": None})
    assert meaning(find_layout(files, "picture")) == {"a/1.png": ":x sex=f", "b/2.png": ":y sex=m"}
    found = find_layout(files, "picture", class_from="path:0")
    assert meaning(found) == {"a/1.png": ":a sex=f", "b/2.png": ":b sex=m"}
    assert not found.has_class_folders  # groups of labels are split, so one may have no record in a split


def test_spoken_digits_have_their_published_split(tmp_path: Path) -> None:
    for names in (["data/04/3_04_1.wav", "data/05/7_05_9.wav"], ["2_theo_0.wav", "2_yweweler_10.wav"]):
        found = find_layout(write(tmp_path / f"root {len(names[0])}", dict.fromkeys(names)), "sound")
        digits = [name.rpartition("/")[2][0] for name in names]
        assert meaning(found) == {names[0]: f"train:{digits[0]}", names[1]: f"test:{digits[1]}"}
    found = find_layout(write(tmp_path / "one", {"a/0_ann_0.wav": None, "b/1_bob_0.wav": None}), "sound")
    assert meaning(found) == {"a/0_ann_0.wav": ":0", "b/1_bob_0.wav": ":1"}


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
        ["there is no test split, so the validation files are it"],
    ),
    "three splits": (
        ["dev/c/1.png", "test/a/1.png", "train/a/1.png", "train/b/1.png"],
        None,
        {"test/a/1.png": "test:a", "train/a/1.png": "train:a", "train/b/1.png": "train:b"},
        ['left out what is in neither split: 1 in "dev"'],
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
        [],
    ),
}


@pytest.mark.parametrize("zipped", [False, True], ids=["folder", "zip"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_its_meaning(layout: str, zipped: bool, tmp_path: Path) -> None:
    names, class_from, expected, said = LAYOUTS[layout]
    found = find_layout(
        write(tmp_path / "root.zip", dict.fromkeys(names), zipped=zipped), "picture", class_from=class_from
    )
    assert list(meaning(found).items()) == list(expected.items())  # and in this order
    assert list(found.notes) == said
    noted = {name for about in found.notes.values() for name in about if name.endswith(".png")}
    there = {name for name in names if "__" not in name and "/." not in f"/{name}" and name.endswith(("g", "G"))}
    assert noted == there - expected.keys()  # nothing is lost without a word


def test_the_classes_are_those_of_torchvision(tmp_path: Path) -> None:
    names = ["b/1.png", "a/x/2.png", "a/1.jpg", "a-b/c.webp", "b/y/z/9.ppm", "B/1.png"]
    write(tmp_path / "root", dict.fromkeys(names))
    (tmp_path / "root" / "linked").symlink_to(tmp_path / "root" / "b")
    peer = torchvision.datasets.ImageFolder(str(tmp_path / "root"))
    found = meaning(find_layout(open_files(tmp_path / "root"), "picture"))
    expected = {str(Path(path).relative_to(tmp_path / "root")): f":{peer.classes[label]}" for path, label in peer.imgs}
    assert found == expected


def test_links_are_followed_but_for_those_to_a_folder_above(tmp_path: Path) -> None:
    write(tmp_path / "other", {"1.png": None})
    write(tmp_path / "root", {"a/1.png": None})
    links = {"file.png": "a/1.png", "folder": "../other", "a/up": "..", "gone.png": "nowhere"}
    for link, target in links.items():
        (tmp_path / "root" / link).symlink_to(target)
    (tmp_path / "other" / "round").symlink_to("../root")
    files = open_files(tmp_path / "root")
    assert list(files.names) == ["a/1.png", "file.png", "folder/1.png", "gone.png"]
    with pytest.raises(UserError, match=r"gone\.png cannot be read, because it is not there"):
        files.decoded("gone.png", bytes)


@pytest.mark.parametrize("zipped", [False, True], ids=["folder", "zip"])
def test_a_copy_in_another_process_reads_the_same_also_in_threads(zipped: bool, tmp_path: Path) -> None:
    names = [f"{number % 7}/{number:04}.png" for number in range(300)]
    files = write(tmp_path / "root", dict.fromkeys(names), zipped=zipped)
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
    files = write(tmp_path / "root.zip", {"a/1.png": None, "b/1.png": None}, zipped=True)
    data = bytearray((tmp_path / "root.zip").read_bytes())
    data[data.index(b"a/1.png") + 9] ^= 255
    (tmp_path / "root.zip").write_bytes(data)
    with pytest.raises(ValueError, match="it cannot be unpacked"):
        files.read("a/1.png")
    (tmp_path / "root.zip").write_bytes(data[:-30])
    with pytest.raises(UserError, match=r"root\.zip is no folder, zip, tar or table of files; name"):
        open_files(tmp_path / "root.zip")
