"""Tars are read as files: under names that say their folders, with the bytes that Python's tarfile finds."""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from data_pipeline.core.errors import UserError
from data_pipeline.sources.places import open_files
from data_pipeline.sources.tar_files import TarFiles
from tests.tars import by_tarfile

CASES: dict[str, tuple[Mapping[str, Sequence[str]], list[str]]] = {
    "one tar": ({"x.tar": ["./b/c", "a", "._a", ".hidden/d"]}, ["a", "b/c"]),
    "a tar a class": ({"owl.tar": ["a"], "wren.TAR": ["a"], "._owl.tar": ["z"]}, ["owl/a", "wren/a"]),
    "wordnet": ({"n01440764.tar": ["a"], "n01443537.tar": ["a"]}, ["n01440764/a", "n01443537/a"]),
    "shards": ({"train-0000.tar": ["x/a"], "train-0001.tar": ["x/b", "y/c"]}, ["x/a", "x/b", "y/c"]),
    "splits": ({"train-00.tar": ["a"], "train-01.tar": ["b"], "test-00.tar": ["a"]}, ["test/a", "train/a", "train/b"]),
    "folders": ({"train/0.tar": ["a"], "train/1.tar": ["b"], "val/0.tar": ["a"]}, ["train/a", "train/b", "val/a"]),
    "tars of a build": ({"x.tar": ["a"], "built/0.tar": ["b"], "built/manifest.json": []}, ["a"]),
}


@pytest.mark.parametrize("case", CASES)
def test_names_say_what_is_a_class_and_what_is_a_shard(tmp_path: Path, case: str) -> None:
    tars, names = CASES[case]
    for path, members in tars.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        by_tarfile(tmp_path / path, [(member, f"{path} {member}".encode()) for member in members])
    files = open_files(tmp_path)
    assert isinstance(files, TarFiles)
    assert list(files.names) == names
    copy = pickle.loads(pickle.dumps(files))
    for name in names:
        path, member = copy.read(name).decode().split()
        assert name.endswith(member.removeprefix("./"))
        with tarfile.open(tmp_path / path) as tar:
            file = tar.extractfile(member)
            assert file is not None
            assert file.read() == files.read(name) == files.open(name).read()


def test_tars_in_a_tar_and_what_is_left_out(tmp_path: Path) -> None:
    for name in ("owl", "wren"):
        by_tarfile(tmp_path / f"{name}.tar", [(f"{name}.png", name.encode()), ("twice", b"1"), ("twice", b"2")])
    inner = [(f"birds/{name}.tar", (tmp_path / f"{name}.tar").read_bytes()) for name in ("owl", "wren")]
    path = tmp_path / "outer" / "x.tar"
    path.parent.mkdir()
    by_tarfile(path, [*inner, ("plain.png", b"plain")])
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "plain.png"
        tar.addfile(link)
    files = open_files(path)
    contents = {name: files.read(name) for name in files.names}
    assert contents == {
        "birds/owl/owl.png": b"owl",
        "birds/owl/twice": b"1",
        "birds/wren/twice": b"1",
        "birds/wren/wren.png": b"wren",
        "plain.png": b"plain",
    }
    assert sorted(files.others) == ["birds/owl/twice", "birds/wren/twice", "link.png"]
    path.write_bytes(b"\x1f\x8b no tar")
    with pytest.raises(UserError, match="gunzip"):
        list(open_files(path).names)
