"""A folder of pictures that is packed into tars as its files are."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.__main__ import main
from data_pipeline.loading.decode import decode
from data_pipeline.storage.manifest import load_manifest
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
    assert "6 samples in 2 shards" in done.stdout
    files = {path.read_bytes() for path in root.rglob("*.*")}
    stored = {
        bytes(content)
        for path in out.glob("*.tar")
        for name, content in contents_of(path)
        if not name.endswith(".json")
    }
    assert stored == files
    moved = out.rename(tmp_path / "moved")
    store = SampleStore(moved)
    assert store.manifest.labels["base"].classes == ("crow", "owl")
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
            ["build", "folder_shapes", "--keep", "--root", "photos"],
            "--overlay online",
        ),
        (["build", "folder", "--keep", "--root", "photos", "--overlay", "online"], "takes no --overlay"),
        (["build", "folder", "--keep", "--root", "photos", "--digits", "sklearn"], "no option digits"),
        (["build", "procedural", "--keep"], "of a folder"),
        (["build", "folder", "--keep"], "name it with --root"),
        (["build", "folder", "--keep", "--root", "photos", "--repeats", "2"], "leave out --repeats"),
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
    store = SampleStore(tmp_path / "kept")
    assert store.manifest.labels["base"].classes == tuple(names)
    assert decode(store, np.arange(4)).labels["base"].tolist() == numbers_in(store)


@pytest.mark.parametrize("name", ["a\nb", os.fsdecode(b"a\xff")])
def test_a_class_whose_name_cannot_be_printed_is_refused_before_packing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_folder(tmp_path / "photos")
    (root / "train" / "owl").rename(root / "train" / name)
    words = ["--root", str(root), "--out", str(tmp_path / "kept"), "--image-size", "32"]
    done = call(main, "build", "folder", "--keep", *words, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 2
    assert "printed" in done.stderr or "unicode" in done.stderr
    assert done.stderr.count("\n") == 1


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
    assert f"/{name} has no ending of a picture" in done.stderr


def test_a_limit_of_a_packed_folder_is_balanced_over_the_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_folder(tmp_path / "photos", num=24)
    for path in sorted((root / "train" / "owl").iterdir())[3:]:
        path.unlink()
    words = ["--limit", "6", "--out", str(tmp_path / "kept")]
    done = call(main, "build", "folder", "--keep", "--root", root, *words, monkeypatch=monkeypatch, capsys=capsys)
    assert done.status == 0, done.stderr
    assert load_manifest(tmp_path / "kept").labels["base"].counts == (3, 3)
