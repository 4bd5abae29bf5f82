"""The copy of the code that a job runs from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launch.snapshot import PACKAGES, Snapshot, python_environment, read_snapshot, write_snapshot
from trainer import provenance
from trainer.provenance import this_code

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Make a repository of two small files and one that is no code."""
    for package in PACKAGES:
        (tmp_path / "repository" / package / "__pycache__").mkdir(parents=True)
    root = tmp_path / "repository"
    (root / "trainer" / "a.py").write_text("a = 1\n")
    (root / "launch" / "b.txt").write_bytes(b"\x00\xff")
    (root / "launch" / "__pycache__" / "a.pyc").write_bytes(b"old")
    (root / "README.md").write_text("no code")
    return root


def test_the_snapshot_holds_every_file_of_the_packages_and_its_hash_changes_with_each(small: Path) -> None:
    before = read_snapshot(small)
    assert dict(before.files) == {"trainer/a.py": b"a = 1\n", "launch/b.txt": b"\x00\xff"}
    hashes = {before.sha256}
    (small / "trainer" / "a.py").write_text("a = 2\n")
    hashes.add(read_snapshot(small).sha256)
    (small / "trainer" / "a.py").rename(small / "trainer" / "c.py")
    hashes.add(read_snapshot(small).sha256)
    assert len(hashes) == 3
    (small / "launch" / "__pycache__" / "a.pyc").write_bytes(b"new")
    (small / "README.md").write_text("still no code")
    assert read_snapshot(small).sha256 in hashes
    moved = Snapshot({"a": b"bc"}), Snapshot({"ab": b"c"})
    assert moved[0].sha256 != moved[1].sha256, "where a name ends is part of the hash"


def test_two_processes_at_once_write_it_once(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of a search start in one directory at the same time."""
    snapshot, rename = read_snapshot(small), Path.rename

    def second(partial: Path, folder: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        write_snapshot(snapshot, into=tmp_path)  # the other process, whose partial copy has another name
        partial.mkdir(exist_ok=True)
        return rename(partial, folder)

    monkeypatch.setattr(Path, "rename", second)
    folder = write_snapshot(snapshot, into=tmp_path)
    assert (folder / "trainer" / "a.py").read_text() == "a = 1\n"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_it_is_there_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = read_snapshot()

    def full_disk(path: Path, content: bytes) -> int:
        if path.name == "train.py":
            raise OSError(28, "No space left on device")
        return len(content)

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_snapshot(snapshot, into=tmp_path)
    assert list((tmp_path / "code").iterdir()) == []
    monkeypatch.undo()
    folder = write_snapshot(snapshot, into=tmp_path)
    assert folder == snapshot.folder(tmp_path)
    assert {path.name for path in folder.iterdir()} == {*PACKAGES, "snapshot.json"}
    before = folder.stat().st_mtime_ns
    assert write_snapshot(snapshot, into=tmp_path) == folder
    assert folder.stat().st_mtime_ns == before, "one that is there is left alone"
    assert list((tmp_path / "code").iterdir()) == [folder]


def test_the_copy_says_what_it_was_taken_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = read_snapshot()
    here = this_code()
    monkeypatch.setattr(provenance, "REPOSITORY", write_snapshot(snapshot, into=tmp_path))
    assert this_code() == replace(here, snapshot_sha256=snapshot.sha256), "not what the repository around it is now"


def test_the_copy_is_first_on_the_path_and_what_was_there_stays(tmp_path: Path) -> None:
    assert python_environment(tmp_path, {"PYTHONPATH": "/a"})["PYTHONPATH"] == f"{tmp_path}:/a"
    assert python_environment(tmp_path, {})["PYTHONPATH"] == str(tmp_path)
