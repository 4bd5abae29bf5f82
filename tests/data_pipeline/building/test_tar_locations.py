"""Locations of tars: directories, tars and patterns, and how others are refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from data_pipeline.core.errors import UserError
from data_pipeline.storage.locations import listed_tars
from tests.tars import indexed, simple


def test_locations_are_directories_tars_and_patterns(tmp_path: Path) -> None:
    simple(tmp_path, [1, 1, 1])
    tars = [str(tmp_path / f"train-000{number}.tar") for number in range(3)]
    assert listed_tars(str(tmp_path)) == tars
    assert listed_tars(str(tmp_path / "train-{0000..0002}.tar")) == tars
    assert listed_tars(tars[1]) == [tars[1]]
    (tmp_path / "._train-0000.tar").write_bytes(b"macOS lays one beside each file that it copies")
    assert listed_tars(str(tmp_path)) == tars


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("empty", "holds no file that ends in .tar"),
        ("train-{0000..0009}.tar", r"train-0003.tar, which .* names, does not exist"),
        ("train-{0000,0000}.tar", "names .*train-0000.tar 2 times"),
        (
            "https://a.org/tars/",
            r"is a directory, which is not listed if it is remote; name its tars, as in https://a.org",
        ),
        ("{train-0000,link}.tar", "names .*train-0000.tar 2 times"),
    ],
)
def test_a_location_that_names_no_tars_is_refused_in_a_sentence(tmp_path: Path, location: str, said: str) -> None:
    simple(tmp_path, [1, 1, 1])
    (tmp_path / "empty").mkdir()
    (tmp_path / "link.tar").symlink_to("train-0000.tar")
    with pytest.raises(UserError, match=said):
        listed_tars(location if "://" in location else str(tmp_path / location))


def test_a_compressed_tar_and_other_files_are_refused(tmp_path: Path) -> None:
    content = (simple(tmp_path, [3]) / "train-0000.tar").read_bytes()
    for name, wrong, mend in (
        ("x.tar.gz", gzip.compress(content), "unpack it"),
        ("x.tar", b"no", "leave it"),
    ):
        (tmp_path / name).write_bytes(wrong)
        with pytest.raises(UserError, match=rf"{name} is not a plain tar; .*{mend}"):
            indexed(tmp_path / name, tmp_path / "index")
