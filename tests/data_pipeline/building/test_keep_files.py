"""A folder of pictures that is packed into tars as its files are."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.__main__ import main
from data_pipeline.building import keep_files
from data_pipeline.building.index_tars import ensure_index
from data_pipeline.core.errors import UserError
from data_pipeline.loading.decode import decode
from data_pipeline.storage.manifest import INDEX_NAME, load_manifest
from data_pipeline.storage.store import SampleStore
from tests.commands import call
from tests.tars import number_of, numbers_in, picture, write_folder


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
