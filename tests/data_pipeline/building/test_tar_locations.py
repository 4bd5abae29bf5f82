"""Locations of tars: directories, patterns and lists of paths, and how others are refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from data_pipeline.__main__ import main
from data_pipeline.building.tar_scan import expand
from data_pipeline.core.errors import UserError
from data_pipeline.storage.locations import index_directory
from tests.commands import call
from tests.tars import indexed, numbers_in, picture, simple


def test_locations_are_directories_patterns_and_lists(tmp_path: Path) -> None:
    simple(tmp_path, [1, 1, 1])
    tars = [str(tmp_path / f"train-000{number}.tar") for number in range(3)]
    assert expand(str(tmp_path)) == tars
    assert expand(str(tmp_path / "train-{0000..0002}.tar")) == tars
    assert expand(tars[1]) == [tars[1]]
    (tmp_path / "._train-0000.tar").write_bytes(b"macOS lays one beside each file that it copies")
    assert expand(str(tmp_path)) == tars
    (tmp_path / "list.txt").write_text("# the last first\ntrain-0002.tar\n\ntrain-0000.tar\n")
    assert expand(str(tmp_path / "list.txt")) == [tars[2], tars[0]]


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("empty", "holds no file that ends in .tar"),
        ("train-{0000..0009}.tar", r"train-0003.tar, which .* names, does not exist"),
        ("none.txt", "names no tars; write the path of one in each line"),
        ("twice.txt", "names .*train-0000.tar 2 times"),
        ("two_paths.txt", "names .*train-0000.tar 2 times"),
        (
            "https://a.org/tars/",
            r"is a directory, which is not listed if it is remote; name its tars, as in https://a.org",
        ),
        ("link.txt", "names .*train-0000.tar 2 times"),
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


def test_a_compressed_tar_and_other_files_are_refused(tmp_path: Path) -> None:
    content = (simple(tmp_path, [3]) / "train-0000.tar").read_bytes()
    for wrong in (gzip.compress(content), b"no tar at all"):
        (tmp_path / "x.tar").write_bytes(wrong)
        with pytest.raises(UserError, match=r"x.tar is not a plain tar"):
            indexed(tmp_path, tmp_path / "index")


def test_a_tar_in_upper_case_is_read(tmp_path: Path) -> None:
    path = simple(tmp_path / "tars", [3]) / "train-0000.tar"
    path = path.rename(path.with_name("X.TAR"))
    for location in (path, path.parent):
        assert numbers_in(indexed(location, index_directory(location))) == [0, 1, 2]


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


def test_a_tar_whose_path_has_braces_is_named_as_it_is(tmp_path: Path) -> None:
    path = simple(tmp_path / "{a,b}", [2]) / "train-0000.tar"
    assert expand(str(path)) == [str(path)]
    assert numbers_in(indexed(path, index_directory(path))) == [0, 1]
