"""Files in Parquet tables and in datasets on disk, as the library `datasets` writes them."""

from __future__ import annotations

import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from data_pipeline.core.errors import UserError
from data_pipeline.sources.arrow_files import ArrowFiles
from data_pipeline.sources.layout import find_layout
from data_pipeline.sources.places import Directory, open_files
from tests.tars import picture

NUM = 23
LABELS = [number % 4 - 1 for number in range(NUM)]  # -1 is no label of a ClassLabel


def dataset(num: int = NUM) -> datasets.Dataset:
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["wren", "owl", "auk"]),
            "age": datasets.Value("float32"),
            "site": datasets.Value("string"),
            "boxes": datasets.Sequence(datasets.Value("int32")),
        }
    )
    rows = {
        "image": [{"bytes": picture(number), "path": f"IMG_{number}.PNG"} for number in range(num)],
        "label": LABELS[:num],
        "age": [None if number % 5 == 0 else number / 10 for number in range(num)],
        "site": ["Bonn" if number % 2 else "" for number in range(num)],
        "boxes": [[1, 2]] * num,
    }
    return datasets.Dataset.from_dict(rows, features=features)


def parquet(root: Path) -> Path:
    (root / "data").mkdir(parents=True)
    for part in range(2):
        table = dataset().shard(2, part, contiguous=True)
        table.to_parquet(root / "data" / f"train-{part:05}-of-00002.parquet", batch_size=5)
    dataset(3).to_parquet(root / "data" / "test-00000-of-00001.parquet")
    return root


def on_disk(root: Path) -> Path:
    parts = {"train": dataset(), "test": dataset(3)}
    datasets.DatasetDict(parts).save_to_disk(root, num_shards={"train": 2, "test": 1})
    return root


@pytest.mark.parametrize("write", [parquet, on_disk])
def test_rows_are_files_and_columns_are_labels(tmp_path: Path, write: object) -> None:
    files = open_files(write(tmp_path / "root"))  # type: ignore[operator]
    assert list(files.names) == [f"{s}/{i:08}.png" for s, num in (("test", 3), ("train", NUM)) for i in range(num)]
    layout = find_layout(files, "picture")
    assert layout.split_N is not None
    assert layout.split_N.tolist() == ["test"] * 3 + ["train"] * NUM
    assert layout.labels["base"].classes == ("wren", "owl", "auk")  # in the order of the ClassLabel
    assert layout.labels["base"].label_N.tolist() == LABELS[:3] + LABELS
    assert layout.labels["site"].label_N.tolist() == [-1, 0, -1] + [number % 2 - 1 for number in range(NUM)]
    age = layout.labels["age"]
    ages = [age.classes[label] if label >= 0 else "" for label in age.label_N[3:9]]
    assert ages == ["", "0.1", "0.2", "0.3", "0.4", ""]
    assert list(layout.labels) == ["base", "age", "site"]
    copy = pickle.loads(pickle.dumps(files))
    for each in (files, copy):
        with ThreadPoolExecutor(4) as pool:
            contents = list(pool.map(each.read, files.names[3:]))
        assert contents == [picture(number) for number in range(NUM)]


def test_a_copy_of_parquet_is_made_once_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    files = open_files(parquet(tmp_path / "root"))
    assert isinstance(files, ArrowFiles)
    copy = pickle.loads(pickle.dumps(files))
    (there,) = (tmp_path / "scratch").iterdir()
    before = {path: path.stat().st_mtime_ns for path in there.iterdir()}
    assert copy.read("train/00000007.png") == picture(7)
    assert {path: path.stat().st_mtime_ns for path in there.iterdir()} == before
    del copy
    gc.collect()
    assert there.exists()  # a worker that ends leaves it to the others
    del files
    gc.collect()
    assert not list((tmp_path / "scratch").iterdir())


def test_tables_of_other_programs_are_read_and_what_they_lack_is_named(tmp_path: Path) -> None:
    rows = pyarrow.table(
        {"picture": [picture(0, kind="JPEG"), picture(1)], "Finding Labels": ["a", "b"], "n": [1, None]}
    )
    pyarrow.parquet.write_table(rows, tmp_path / "birds.parquet")
    layout = find_layout(open_files(tmp_path / "birds.parquet"), "picture")
    assert list(layout.names) == ["birds/00000000.png", "birds/00000001.png"]
    assert layout.split_N is None
    assert list(layout.labels) == ["n"]
    (tmp_path / "labels").mkdir()
    pyarrow.parquet.write_table(rows.select(["n"]), tmp_path / "labels" / "n.parquet")
    assert isinstance(open_files(tmp_path / "labels"), Directory)
    with pytest.raises(UserError, match=r"n\.parquet has no column of files, only n; name tables"):
        open_files(tmp_path / "labels" / "n.parquet")
    (tmp_path / "both").mkdir()
    for name, columns in (("train", ["picture", "n"]), ("test", ["picture"]), ("numbers", ["n"])):
        pyarrow.parquet.write_table(rows.select(columns), tmp_path / "both" / f"{name}.parquet")
    layout = find_layout(open_files(tmp_path / "both"), "picture")
    assert [name.partition("/")[0] for name in layout.names] == ["test", "test", "train", "train"]
    assert layout.labels["n"].classes[1] == "1"
    assert layout.labels["n"].label_N.tolist() == [-1, -1, 1, -1]
    data = (tmp_path / "birds.parquet").read_bytes()
    (tmp_path / "birds.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"birds\.parquet cannot be read \(.*; copy or download it again"):
        open_files(tmp_path / "birds.parquet")
    elsewhere = pyarrow.table(
        {"image": [{"bytes": picture(0), "path": "0.png"}, {"bytes": None, "path": "/pics/1.png"}]}
    )
    pyarrow.parquet.write_table(elsewhere, tmp_path / "elsewhere.parquet")
    with pytest.raises(ValueError, match=r"has no bytes, only .*'/pics/1.png'.*; save the dataset with the bytes"):
        open_files(tmp_path / "elsewhere.parquet").read("elsewhere/00000001.png")
