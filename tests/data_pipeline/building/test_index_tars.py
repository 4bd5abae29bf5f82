"""The index of tars: made once, by one of many processes, noticed when it is old, and read like any dataset."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.__main__ import main
from data_pipeline.building.index_tars import make_index
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.loading.decode import decode
from data_pipeline.storage.locations import INDEX_NAME, dataset_directory, index_directory
from data_pipeline.storage.manifest import Fields, load_manifest
from data_pipeline.storage.store import SampleStore
from tests.commands import Call
from tests.tars import by_tarfile, indexed, numbers_in, picture, simple


def test_the_command_takes_what_is_left_out_from_the_train_set(tmp_path: Path, call: Call) -> None:
    """Both sets have samples with two pictures and two labels; the train set has an index of the second ones."""
    for name in ("train", "test"):
        members = [("a.png", picture(1)), ("a.seg.png", picture(9)), ("a.cls", b"7"), ("a.json", b'{"coarse": "owl"}')]
        (tmp_path / name).mkdir()
        by_tarfile(tmp_path / name / "x.tar", members)
    fields = Fields(content=("seg.png",), labels={"base": "json:coarse"})
    train = indexed(tmp_path / "train", tmp_path / "train" / INDEX_NAME, fields=fields, size=16).manifest
    words = ["index", str(tmp_path / "test"), "--classes-of", str(tmp_path / "train"), "--workers", "1"]
    done = call(main, *words)
    assert done.status == 0, done.stderr
    test = load_manifest(tmp_path / "test")
    assert (test.tars.fields, test.labels, test.input_shape) == (fields, train.labels, (3, 16, 16))
    assert numbers_in(SampleStore(tmp_path / "test")) == [9]
    done = call(main, *words, "--image", "png", "--size", "24")
    assert done.status == 0, done.stderr
    test = load_manifest(tmp_path / "test")
    assert test.tars.fields == Fields(content=("png",), labels={"base": "json:coarse"})
    assert test.input_shape == (3, 24, 24)


def test_a_tar_that_is_changed_later_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    simple(tmp_path, [4, 4])
    store = indexed(tmp_path, tmp_path / INDEX_NAME)
    path = tmp_path / "train-0001.tar"
    content = path.read_bytes()
    path.write_bytes(content)  # the same again
    assert numbers_in(store) == list(range(8))
    assert "was written again after it was indexed" in caplog.text
    path.write_bytes(content + bytes(512))
    with pytest.raises(UserError, match=r"train-0001.tar has \d+ bytes, but it had \d+ when it was indexed"):
        SampleStore(tmp_path)
    path.write_bytes(bytes(512) + content[:-512])  # of the same size
    moved = decode(SampleStore(tmp_path), np.arange(8))
    assert sorted(moved.bad) == [4, 5, 6, 7]
    assert "the tar says otherwise" in moved.bad[4].reason
    path.unlink()
    with pytest.raises(UserError, match=r"train-0001.tar is in the index"):
        SampleStore(tmp_path)


def bytes_of(index: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in index.iterdir() if path.is_file()}


def two_fields(directory: Path) -> Path:
    """Write a tar whose samples have a picture, another file that is none, and two fields of labels."""
    directory.mkdir()
    members = [
        (f"{number}.{extension}", content)
        for number in range(4)
        for extension, content in (
            ("png", picture(number)),
            ("other", b"none"),
            ("cls", b"%d" % (number % 3)),
            ("shape", b"%d" % (number % 2)),
        )
    ]
    by_tarfile(directory / "x.tar", members)
    return directory


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--image", "other", "--label", "base=shape"], "none of the pictures decodes"),
        (["--image", "none"], "has a picture under one of none"),
    ],
)
def test_an_index_that_is_not_made_again_stays_as_it_was(
    tmp_path: Path, arguments: list[str], said: str, call: Call
) -> None:
    tars = two_fields(tmp_path / "tars")
    make_index(str(tars), tars / INDEX_NAME, fields=Fields(), size=32)
    before = bytes_of(tars / INDEX_NAME)
    done = call(main, "index", tars, *arguments, "--workers", "1")
    assert done.status == 2
    assert said in done.stderr
    assert bytes_of(tars / INDEX_NAME) == before


@pytest.mark.parametrize("num_written", [0, 2])
def test_an_index_whose_replacement_was_interrupted_is_made_again_and_not_read(
    tmp_path: Path, num_written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars = two_fields(tmp_path / "tars")
    make_index(str(tars), tars / INDEX_NAME, fields=Fields(), size=32)
    write_bytes, fields = Path.write_bytes, Fields(labels={"base": "shape", "number": "cls"})
    written: list[Path] = []

    def interrupted(self: Path, content: bytes) -> int:
        if self.suffix == ".bin":
            if len(written) == num_written:
                raise KeyboardInterrupt
            written.append(self)
        return write_bytes(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make_index(str(tars), tars / INDEX_NAME, fields=fields, size=32)
    with pytest.raises(UserError, match="names tars without an index"):
        SampleStore(tars)
    store = indexed(tars, tars / INDEX_NAME, fields=fields)
    assert decode(store, np.arange(4)).labels["number"].tolist() == [0, 1, 2, 0]
    assert decode(store, np.arange(4)).labels["base"].tolist() == [0, 1, 0, 1]


def test_locations_of_similar_names_have_indexes_of_their_own(tmp_path: Path) -> None:
    simple(tmp_path, [1] * 4)
    for name in ("鳥.tar", "犬.tar", "a-b.tar", "a_b.tar"):
        shutil.copy(tmp_path / "train-0000.tar", tmp_path / name)
    names = ["train-{0000..0003}.tar", "train-{0000,0003}.tar", "鳥.tar", "犬.tar", "a-b.tar", "a_b.tar"]
    for name in names:
        indexed(tmp_path / name, index_directory(tmp_path / name))
    assert [load_manifest(tmp_path / name).num_shards for name in names] == [4, 2, 1, 1, 1, 1]
    assert len({dataset_directory(tmp_path / name) for name in names}) == len(names)


def test_a_picture_never_gets_the_label_of_another_one_with_its_key(
    tmp_path: Path,
) -> None:
    """Two samples of one key that follow each other, and of a third one a picture without a label."""
    members = [("a.png", picture(0)), ("a.cls", b"0"), ("a.png", picture(1)), ("a.cls", b"1"), ("a.png", picture(2))]
    by_tarfile(tmp_path / "x.tar", members)
    store = indexed(tmp_path, tmp_path / "index")
    assert numbers_in(store) == [0, 1, 2]
    assert decode(store, np.arange(3)).labels["base"].tolist() == [0, 1, NO_LABEL]


def test_several_fields_of_labels_are_told(tmp_path: Path, call: Call) -> None:
    """A sample whose label is in another field than that of the others would be of a class of its own."""
    by_tarfile(tmp_path / "x.tar", [("a.png", picture(0)), ("a.cls", b"1"), ("b.png", picture(1)), ("b.label", b"3")])
    done = call(main, "index", tmp_path, "--workers", "1")
    assert "the label of a sample is the first of its fields cls, label" in done.stdout
    done = call(main, "index", tmp_path, "--workers", "1", "--label", "cls")
    assert "is the first of its fields" not in done.stdout


def test_an_index_that_is_made_again_leaves_open_readers_alone(tmp_path: Path) -> None:
    simple(tmp_path, [3, 3])
    store = indexed(tmp_path, tmp_path / INDEX_NAME)
    make_index(str(tmp_path / "train-0000.tar"), tmp_path / INDEX_NAME, fields=Fields(), size=32)
    assert numbers_in(store) == list(range(6))
    assert numbers_in(SampleStore(tmp_path)) == [0, 1, 2]
