"""Tars as others have packed them: classes in folders, tars in a tar, names with dots, sparse files, bad pictures."""

from __future__ import annotations

import tarfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.__main__ import main
from data_pipeline.building.build import build_dataset
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.loading.decode import decode
from data_pipeline.storage.store import SampleStore
from tests.commands import Call, Done
from tests.tars import Member, by_tarfile, numbers_in, picture


def words_in(location: Path, label: str = "base") -> list[str]:
    """The label of each sample as a word; "" if it has none."""
    store = SampleStore(location)
    numbers = decode(store, np.arange(len(store))).labels[label].tolist()
    classes = store.manifest.labels[label].classes
    return ["" if number == NO_LABEL else classes[number] for number in numbers]


@pytest.fixture
def index(call: Call):  # type: ignore[no-untyped-def]
    def indexed(location: Path, *words: str) -> Done:
        return call(main, "index", location, "--workers", "1", *words)

    return indexed


E = "e\u0301"  # as a Mac writes é

TARS: dict[str, dict[str, Sequence[Member]]] = {
    "folders": {"x.tar": [("./owl/2021/a.png", picture(0)), ("wren/b.png", picture(1)), ("c.png", picture(2))]},
    "a tar a class": {"owl.tar": [("a.png", picture(0))], "wren.TAR": [("a.png", picture(1)), ("b.png", picture(2))]},
    "a field, too": {"x.tar": [("owl/a.png", picture(0)), ("owl/a.cls", b"5"), ("wren/b.png", picture(1))]},
    "two Unicodes": {"x.tar": [(f"{E}/a.png", picture(0)), ("\u00e9/a.png", picture(1)), (f"{E}b/c.png", picture(2))]},
}


@pytest.mark.parametrize(
    ("shape", "options", "labels"),
    [
        ("folders", ["path:0"], {"base": ["owl", "wren", ""]}),
        ("folders", ["path:-1", "top=path:0"], {"base": ["2021", "wren", ""], "top": ["owl", "wren", ""]}),
        ("folders", ["path:1"], {"base": ["2021", "", ""]}),
        ("a tar a class", ["tar"], {"base": ["owl", "wren", "wren"]}),
        ("a field, too", ["base=path:0", "number=cls"], {"base": ["owl", "wren"], "number": ["5", ""]}),
        ("two Unicodes", ["path:0"], {"base": ["\u00e9", "\u00e9", "\u00e9b"]}),
    ],
)
def test_folders_and_names_of_tars_are_labels(  # type: ignore[no-untyped-def]
    tmp_path: Path, index, shape: str, options: Sequence[str], labels: dict[str, list[str]]
) -> None:
    for name, members in TARS[shape].items():
        by_tarfile(tmp_path / name, members)
    done = index(tmp_path, *(word for option in options for word in ("--label", option)))
    assert done.status == 0, done.stderr
    assert {name: words_in(tmp_path, name) for name in labels} == labels
    assert numbers_in(SampleStore(tmp_path)) == list(range(len(labels["base"])))


def test_a_tar_of_tars_is_read_in_its_place(  # type: ignore[no-untyped-def]
    tmp_path: Path, index, caplog: pytest.LogCaptureFixture
) -> None:
    """As ImageNet's train set comes: one tar of a tar for each class. A Mac has packed a hidden file before one."""
    numbers = iter(range(100))
    inner = []
    for wordnet_id in ("n01440764", "n01443537"):
        members = [(f"{wordnet_id}_{row}.JPEG", picture(next(numbers), kind="JPEG")) for row in range(3)]
        by_tarfile(tmp_path / "inner", members)
        inner.append((f"./{wordnet_id}.tar", (tmp_path / "inner").read_bytes()))
    cut = inner[1][1][:2_000]
    members = [("._n0.tar", b"Mac"), *inner, ("n2.tar", b"\x1f\x8b no tar"), ("n3.tar", cut), ("z.png", picture(6))]
    by_tarfile(tmp_path / "train.tar", members)
    done = index(tmp_path / "train.tar", "--image", "jpeg,png", "--label", "tar", "--size", "16")
    assert done.status == 0, done.stderr
    assert words_in(tmp_path / "train.tar") == ["train", *["n01440764"] * 3, *["n01443537"] * 3, "n3"]
    assert numbers_in(SampleStore(tmp_path / "train.tar")) == [6, 0, 1, 2, 3, 4, 5, 3]
    for name in ("n2", "n3"):
        assert f"train.tar holds {name}.tar, which is cut short or damaged at byte" in caplog.text


def test_keys_with_dots(tmp_path: Path, index) -> None:  # type: ignore[no-untyped-def]
    members = []
    for number in range(3):
        members += [(f"IMG_2021.03.0{number}.jpg", picture(number)), (f"IMG_2021.03.0{number}.cls", b"%d" % number)]
    by_tarfile(tmp_path / "x.tar", members)
    said = "3 files are left out, because their names have several dots; `build folder --keep` packs them anew"
    assert said in index(tmp_path).stderr
    by_tarfile(tmp_path / "x.tar", [*members, ("plain.jpg", picture(3))])
    assert said in index(tmp_path).stdout
    assert numbers_in(SampleStore(tmp_path)) == [3]
    options = {"test_share": 0.25, "image_size": 16}
    build_dataset("folder", tmp_path / "built", root=tmp_path / "x.tar", keep=True, source_options=options)
    assert len({*numbers_in(SampleStore(tmp_path / "built"))}) == 3


def test_a_key_that_unicode_writes_in_two_ways_is_one(tmp_path: Path, index) -> None:  # type: ignore[no-untyped-def]
    by_tarfile(tmp_path / "x.tar", [(f"caf{E}.png", picture(0)), ("caf\u00e9.cls", b"1")], kind=tarfile.PAX_FORMAT)
    assert index(tmp_path).status == 0
    assert words_in(tmp_path) == ["1"]
    assert unicodedata.is_normalized("NFC", "caf\u00e9")
