"""A folder of pictures that is packed into tars as its files are."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.__main__ import main
from data_pipeline.loading.decode import decode
from data_pipeline.storage.store import SampleStore
from tests.commands import Call
from tests.tars import number_of, picture, write_folder

KEEP = ["build", "folder", "--keep", "--source-option", "image_size=32", "--workers", "1"]


def test_a_folder_is_packed_without_a_second_encoding(tmp_path: Path, call: Call) -> None:
    root, out = write_folder(tmp_path / "photos"), tmp_path / "kept"
    arguments = [*KEEP, "--root", str(root), "--out", str(out)]
    done = call(main, *arguments, "--samples-per-shard", "4")
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
    assert {store.file_of(index) for index in range(6)} == {str(path.relative_to(root)) for path in root.rglob("*.*")}
    decoded = decode(store, np.arange(6))
    assert decoded.pictures_BCHW is not None
    numbers = [number_of(pixels) for pixels in decoded.pictures_BCHW.numpy()]
    assert sorted(numbers) == list(range(6)) != numbers
    assert decoded.labels["base"].tolist() == [number % 2 for number in numbers]
    again = call(main, *arguments)
    assert again.status == 0, again.stderr
    whole = b"".join(path.read_bytes() for path in sorted(moved.glob("*.tar")))
    assert all(content in whole for content in files)


def contents_of(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build", "folder_shapes", "--keep", "--root", "photos"], "--overlay online"),
        (["build", "procedural", "--keep"], "of a folder"),
        (["build", "folder", "--keep", "--root", "photos", "--repeats", "2"], "leave out --repeats"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_a_sentence(
    tmp_path: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    write_folder(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    done = call(main, *arguments, "--out", tmp_path / "out")
    assert done.status == 2
    assert said in done.stderr


@pytest.mark.parametrize("name", ["a", "a.psd"])
def test_a_picture_without_a_known_ending_is_refused_before_packing(tmp_path: Path, name: str, call: Call) -> None:
    """A reader of tars knows a picture by its ending."""
    (tmp_path / name).write_bytes(picture(0))
    table = tmp_path / "labels.csv"
    table.write_text(f"file,split,base\n{name},train,owl\n")
    words = ["--root", str(tmp_path), "--source-option", f"labels={table}", "--out", str(tmp_path / "kept")]
    done = call(main, *KEEP, *words)
    assert done.status == 2
    assert f"/{name} has no ending of a picture" in done.stderr
