"""Locations of tars: directories, patterns and lists of paths, and how others are refused."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline.__main__ import main
from data_pipeline.building.index_tars import ensure_index
from data_pipeline.building.tar_scan import expand
from data_pipeline.core.errors import UserError
from data_pipeline.storage.store import SampleStore
from tests.commands import call
from tests.tars import numbers_in, picture, simple


def test_locations_are_directories_patterns_and_lists(tmp_path: Path) -> None:
    simple(tmp_path, [1, 1, 1])
    tars = [str(tmp_path / f"train-000{number}.tar") for number in range(3)]
    assert expand(str(tmp_path)) == tars
    assert expand(str(tmp_path / "train-{0000..0002}.tar")) == tars
    assert expand(tars[1]) == [tars[1]]
    (tmp_path / "list.txt").write_text("# the last first\ntrain-0002.tar\n\ntrain-0000.tar\n")
    assert expand(str(tmp_path / "list.txt")) == [tars[2], tars[0]]


def test_hidden_files_of_a_directory_are_no_tars(tmp_path: Path) -> None:
    """macOS lays one beside each file that it copies to another file system."""
    simple(tmp_path, [1])
    (tmp_path / "._train-0000.tar").write_bytes(b"\0\5\x16\7Mac OS X")
    assert expand(str(tmp_path)) == [str(tmp_path / "train-0000.tar")]


def test_compressed_tars_of_a_directory_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    simple(tmp_path, [1, 1])
    for name in ("train-0000.tar.gz", "train-0001.tar.md5", ".x.tar.gz"):  # one is unpacked, the others are none
        (tmp_path / name).touch()
    assert len(expand(str(tmp_path))) == 2
    assert not caplog.records
    for name in ("train-0002.TAR.GZ", "train-0003.tgz"):
        (tmp_path / name).touch()
    assert len(expand(str(tmp_path))) == 2
    assert "also holds 2 compressed tars, such as train-0002.TAR.GZ, which are left out" in caplog.text


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
    said = f"{tmp_path / name} {said.format(path=tmp_path / name)}"
    assert f"error: {said}\n" in done.stderr
    with pytest.raises(UserError, match=re.escape(said)):
        ensure_index(str(tmp_path / name))


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
