"""`look` says what lies in a place; the commands that it prints then work, and no file goes missing without a word."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from configs.resolve import resolve_recipe
from data_pipeline.__main__ import main
from data_pipeline.storage.manifest import load_manifest
from data_pipeline.tools.findings import Place, add_equal_files
from data_pipeline.tools.look import look_at
from tests.commands import Call, Done
from tests.data_pipeline.layouts import LAYOUTS, animals, encoded, sound, write


class Looker:
    """Calls the command and what it printed, in a directory of its own."""

    def __init__(self, directory: Path, call: Call) -> None:
        self.directory, self._call = directory, call

    def __call__(self, *words: str) -> Done:
        return self.call("look", *words, "--workers", "1")

    def call(self, *words: str) -> Done:
        return self._call(main, *words)

    def run_printed(self, page: str) -> tuple[list[str], dict[str, Path]]:
        """Run the commands of a page that build or index. Return the settings of the last, which trains."""
        commands = [shlex.split(line) for line in page.replace("\\\n", "").splitlines() if line.startswith("  python ")]
        *builds, train = commands
        for words in builds:
            assert words[:3] == ["python", "-m", "data_pipeline"]
            done = self.call(*words[3:], "--workers", "1")
            assert done.status == 0, done.stderr
        assert train[:3] == ["python", "launch/train.py", "--config"]
        settings = train[5::2]
        config = resolve_recipe(train[3], settings)
        return settings, {"train": Path(config.data.train_dir or ""), "test": Path(config.data.test_dir)}


def places(*paths: str) -> list[Place]:
    found = [look_at(path, num_workers=1) for path in paths]
    add_equal_files(found)
    return found


def problems_of(place: Place) -> dict[str, list[str]]:
    return {problem.what: list(problem.names) for problem in place.problems}


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> Looker:
    monkeypatch.chdir(tmp_path)
    return Looker(tmp_path, call)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_look_prints_works(name: str, look: Looker) -> None:
    layout = LAYOUTS[name]
    layout.write(look.directory)
    done = look(*layout.looked_at)
    said = done.stdout + done.stderr
    assert not [words for words in layout.said if words not in said], said
    if layout.samples is None:
        assert done.status in (1, 2)
        assert " build " not in done.stdout
        return
    assert done.status == 0, said
    settings, built = look.run_printed(done.stdout)
    assert not [setting for setting in settings if setting.startswith("encoder.")]
    manifests = [load_manifest(directory) for directory in dict.fromkeys(built.values())]
    assert sum(manifest.num_samples for manifest in manifests) == layout.samples
    labels = {tuple(m.labels[layout.label].classes if layout.label in m.labels else ()) for m in manifests}
    assert labels == {layout.classes}


def test_equal_files_are_found_in_train_and_test_and_in_two_classes(look: Looker) -> None:
    write(look.directory, animals("train/{c}/{i}.jpg") | animals("test/{c}/{i}.jpg", num=3, start=500))
    write(look.directory, {"train/cat/same.jpg": encoded(0), "train/owl/same.jpg": encoded(1)})
    write(look.directory, {"test/owl/leak.jpg": encoded(2), "train/Cat/c.jpg": encoded(99)})
    (found,) = places(".")
    assert problems_of(found) == {
        "copies of others": ["train/cat/0.jpg = train/cat/same.jpg"],
        "equal, but of two classes": ["train/cat/1.jpg = train/owl/same.jpg"],
        "equal in train and test": ["test/owl/leak.jpg = train/cat/2.jpg"],
        "classes of base in one split alone": ["Cat"],
    }


def test_equal_files_are_found_at_two_paths(look: Looker) -> None:
    write(look.directory, animals("a/{c}/{i}.jpg") | animals("b/{c}/{i}.jpg", num=3, start=3))
    _, found = places("a", "b")
    pairs = [f"a/{c}/{i + 3}.jpg = b/{c}/{i}.jpg" for c in ("cat", "owl") for i in (0, 1)]
    assert problems_of(found) == {"equal to files of another path": pairs}


def test_what_is_decoded_is_spread_evenly(look: Looker, monkeypatch: pytest.MonkeyPatch) -> None:
    write(look.directory, {f"{i:03}.wav": sound(1 if i % 100 else 0) for i in range(400)})
    monkeypatch.setattr("data_pipeline.tools.census._NUM_DECODED_BYTES", 40 * 8_044)
    assert "40 of 400" in look(".").stdout


def test_a_dataset_that_is_built_needs_no_other_command(look: Looker) -> None:
    write(look.directory / "photos", animals("{c}/{i}.jpg"))
    look.run_printed(look("photos").stdout)
    done = look("data/photos/train")
    assert done.status == 0
    assert "a dataset that is ready, 8 samples" in done.stdout
    assert "pipeline build" not in done.stdout
    assert look.call("verify", "data/photos/train").status == 0


def test_what_is_left_out_is_said(look: Looker) -> None:
    write(look.directory, animals("{c}/{i}.jpg") | {"more.zip": b"PK\x03\x04", "notes.txt": b"x", "noname": encoded(9)})
    (look.directory / "cat" / "broken.jpg").symlink_to("nowhere")
    (found,) = places(".")
    assert {what: [name.partition(":")[0] for name in names] for what, names in problems_of(found).items()} == {
        "damaged, cut short, not read, or not what their names say": ["cat/broken.jpg"],
        "an archive, so its files are not read": ["more.zip"],
        "without the ending of a picture or a sound, so not read": ["noname"],
    }
