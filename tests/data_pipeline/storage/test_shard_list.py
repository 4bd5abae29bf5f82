"""A table of shards in place of a list: the same dataset, opened without an object for each shard; hostile tables."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from data_pipeline.building.build import build_dataset
from data_pipeline.core.errors import UserError
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.remote.cache import RemoteConfig
from data_pipeline.storage.manifest import MANIFEST_NAME, SHARD_TABLE_NAME, ShardEntry, load_manifest
from data_pipeline.storage.shard_list import ListedShards, ShardTable, open_shard_list, write_shard_table
from data_pipeline.storage.shards import shard_name
from data_pipeline.storage.store import SampleStore
from data_pipeline.tools.verify import Verification
from tests.data_pipeline.stored_samples import find_problems

NUM_SHARDS = 6
STREAMED = ReadConfig(num_workers=0, placement="stream", max_bad_share=1)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders `listed` and `table`: one dataset of six shards, built in both forms."""
    root = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        for name, most in (("listed", NUM_SHARDS), ("table", NUM_SHARDS - 1)):
            patch.setattr("data_pipeline.building.build._MAX_IN_LIST", most)
            build_dataset("procedural_digits", root / name, limit=23, overlay="online", num_samples_per_shard=4)
    return root


@pytest.fixture
def table(built: Path, tmp_path: Path) -> Path:
    """A copy of the dataset with a table."""
    return Path(shutil.copytree(built / "table", tmp_path / "data"))


def batches(location: str | Path, *, read: ReadConfig = STREAMED) -> list[torch.Tensor]:
    stream = Stream(location, global_batch_size=8, seed=3, read=read, end_step=5)
    return [batch.inputs_a for batch in stream]


def test_a_dataset_with_a_table_is_the_same_dataset(built: Path) -> None:
    listed, table = (load_manifest(built / name) for name in ("listed", "table"))
    assert (listed.format_version, table.format_version) == (3, 6)
    assert (table.shards, table.num_shards, table.num_bytes) == ((), NUM_SHARDS, listed.num_bytes)
    assert "shard_table" not in json.loads((built / "listed" / MANIFEST_NAME).read_text())
    assert tuple(open_shard_list(built / "table", table)) == listed.shards
    names = {path.name for path in (built / "table").iterdir()}
    assert names == {path.name for path in (built / "listed").iterdir()} | {SHARD_TABLE_NAME}
    assert (built / "table" / SHARD_TABLE_NAME).stat().st_size == 80 * NUM_SHARDS
    for one, other in zip(batches(built / "listed"), batches(built / "table"), strict=True):
        assert torch.equal(one, other)
    assert list(find_problems(built / "table")) == []
    summary = Verification(built / "table").summary
    assert f"in {NUM_SHARDS} shards" in summary


def test_a_dataset_with_a_table_is_built_once(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.building.build._MAX_IN_LIST", NUM_SHARDS - 1)
    arguments: dict[str, Any] = {"limit": 23, "overlay": "online"}
    found = build_dataset("procedural_digits", built / "table", num_samples_per_shard=4, **arguments)
    assert found == load_manifest(built / "table")
    with pytest.raises(UserError, match="another --samples-per-shard"):
        build_dataset("procedural_digits", built / "table", num_samples_per_shard=5, **arguments)


def test_a_remote_dataset_with_a_table_is_the_same_dataset(built: Path, tmp_path: Path) -> None:
    location, remote = f"file://{built / 'table'}", RemoteConfig(cache_dir=str(tmp_path))
    read = STREAMED.model_copy(update={"remote": remote})
    for one, other in zip(batches(built / "listed"), batches(location, read=read), strict=True):
        assert torch.equal(one, other)
    store = SampleStore(location, remote=remote)
    again = pickle.loads(pickle.dumps(store))
    assert again.read(np.arange(23)).files["png"][22] == store.read(np.arange(23)).files["png"][22]
    assert list(find_problems(location)) == []


def test_a_cache_has_the_same_room_for_a_table(built: Path, tmp_path: Path) -> None:
    half = RemoteConfig(cache_dir=str(tmp_path), cache_gigabytes=load_manifest(built / "table").num_bytes / 2e9)
    said = []
    for name in ("table", "listed"):
        with pytest.raises(UserError, match="its shuffling needs 6 of its 6 shards at once") as caught:
            batches(f"file://{built / name}", read=STREAMED.model_copy(update={"remote": half}))
        said.append(str(caught.value).replace(f"built/{name}", "built"))
    assert said[0].split(":", 2)[2] == said[1].split(":", 2)[2]


def test_names_and_numbers(built: Path) -> None:
    manifest = load_manifest(built / "table")
    table, listed = open_shard_list(built / "table", manifest), ListedShards(load_manifest(built / "listed").shards)
    for shards in (table, listed):
        assert [shards.number(shard_name(number)) for number in range(NUM_SHARDS + 1)] == [0, 1, 2, 3, 4, 5, None]
        for name in (
            "shard-1.tar",
            "shard-000001.tar",
            "shard-00001.index",
            "../shard-00001.tar",
            "shard-\u0661.tar",
            "",
        ):
            assert shards.number(name) is None
    assert shard_name(9_999_999) == "shard-9999999.tar"


def rewrite(directory: Path, change: Callable[[list[NDArray[Any]]], None]) -> None:
    """Change the columns of a table, and name the new file in the manifest, as a stranger may."""
    path, manifest = directory / SHARD_TABLE_NAME, json.loads((directory / MANIFEST_NAME).read_text())
    content = path.read_bytes()
    ends, num_bytes = (np.frombuffer(content[start : start + 48], dtype="<i8").copy() for start in (0, 48))
    change([ends, num_bytes])
    content = ends.tobytes() + num_bytes.tobytes() + content[96:]
    path.write_bytes(content)
    manifest["shard_table"]["sha256"] = hashlib.sha256(content).hexdigest()
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest))


def place(column: int, row: int, value: int) -> Callable[[list[NDArray[Any]]], None]:
    def change(columns: list[NDArray[Any]]) -> None:
        columns[column][row] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (place(0, 2, 8), "shard-00002.tar has no valid number of samples"),
        (place(0, 0, 0), "shard-00000.tar has no valid number of samples"),
        (place(0, 0, -(1 << 63)), "shard-00000.tar has no valid number of samples"),
        (place(0, 1, (1 << 63) - 1), "shard-00001.tar has no valid number of samples"),
        (place(0, 5, 22), "num_samples is 23, but the shards add up to 22"),
        (place(1, 3, 4096), "4 samples cannot be in the 4096 bytes of shard-00003.tar"),
        (place(1, 3, -1), "4 samples cannot be in the -1 bytes of shard-00003.tar"),
        (place(1, 3, 1 << 62), f"4 samples cannot be in the {1 << 62} bytes of shard-00003.tar"),
        (place(1, 3, 1 << 30), "but the shards add up to"),
    ],
)
def test_a_table_that_contradicts_itself_is_one_sentence(
    change: Callable[[list[NDArray[Any]]], None], said: str, table: Path
) -> None:
    rewrite(table, change)
    with pytest.raises(UserError) as caught:
        SampleStore(table)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{table / SHARD_TABLE_NAME} contradicts manifest.json: ")


@pytest.mark.parametrize("how", ["one bit", "short", "long", "missing", "pipe", "directory"])
def test_a_table_that_the_manifest_does_not_name_is_one_sentence(how: str, table: Path) -> None:
    path = table / SHARD_TABLE_NAME
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.unlink()
    said = {
        "one bit": "is not the file that manifest.json names by sha256",
        "short": "has 479 bytes, not 80 for each of the 6 shards",
        "long": "has 481 bytes, not 80 for each of the 6 shards",
        "missing": "No such file or directory",
        "pipe": "not a regular file",
        "directory": "not a regular file",
    }[how]
    if how == "pipe":
        os.mkfifo(path)
    elif how == "directory":
        path.mkdir()
    elif how != "missing":
        path.write_bytes({"one bit": bytes(content), "short": bytes(content[:-1]), "long": bytes(content) + b"x"}[how])
    for read in (SampleStore, Verification):
        with pytest.raises(UserError, match=said):
            read(table)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_shards": 24}, "23 samples cannot be in 24 shards"),
        ({"num_bytes": 23 * 2048 - 1}, "23 samples cannot be in 47103 bytes of shards"),
        ({"num_shards": 10_000_001}, "it must be at most 10,000,000"),
        ({"num_bytes": (1 << 62) + 1}, "it must be at most"),
        ({"num_shards": 0}, "shard_table.num_shards is 0"),
        ({"sha256": "x"}, "64 hexadecimal digits"),
    ],
)
def test_an_entry_of_a_table_that_cannot_be_is_one_sentence(changed: dict[str, Any], said: str, table: Path) -> None:
    path = table / MANIFEST_NAME
    value = json.loads(path.read_text())
    value["shard_table"] |= changed
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match=said):
        load_manifest(table)


def test_a_list_beside_a_table_is_refused(built: Path, table: Path) -> None:
    value = json.loads((table / MANIFEST_NAME).read_text())
    value["shards"] = json.loads((built / "listed" / MANIFEST_NAME).read_text())["shards"]
    (table / MANIFEST_NAME).write_text(json.dumps(value))
    with pytest.raises(UserError, match="a table of 6 shards is named beside a list of 6"):
        load_manifest(table)


def test_a_row_that_changes_while_it_is_open_is_refused_when_it_is_used(table: Path) -> None:
    shards = ShardTable(table / SHARD_TABLE_NAME, load_manifest(table))
    with (table / SHARD_TABLE_NAME).open("r+b") as file:
        file.seek(8)
        file.write(np.array([1 << 62, -5], dtype="<i8").tobytes())
    with pytest.raises(UserError, match=r"row 1 of .*shards\.bin"):
        shards[1]
    with pytest.raises(UserError, match=r"row 2 of .*shards\.bin"):
        shards[2]


def test_of_very_many_shards_some_are_surveyed_and_the_others_checked_when_they_are_read(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.storage.built_shards.MAX_LISTED_SHARDS", NUM_SHARDS - 1)
    monkeypatch.setattr("data_pipeline.storage.built_shards._NUM_SURVEYED", 3)  # shards 0, 2 and 5
    whole, moved = table / shard_name(2), table / "aside"
    whole.rename(moved)
    with pytest.raises(UserError, match=r"shard-00002\.tar is in the manifest, but it is missing"):
        SampleStore(table)
    moved.rename(whole)
    with (table / shard_name(1)).open("r+b") as file:
        file.truncate(6 * 1024)
    (table / shard_name(4)).unlink()
    store = SampleStore(table)
    assert store.known_bad == ()
    read = store.read(np.arange(16))
    assert sorted(read.unreadable)[-1] == 7
    assert sorted(read.unreadable)[0] > 3
    with pytest.raises(UserError, match=r"shard-00004\.tar is in the manifest, but it is missing"):
        store.read(np.array([17]))


def write_rows(directory: Path, num_samples: Sequence[int]) -> list[ShardEntry]:
    hashes = [hashlib.sha256(bytes([number])).hexdigest() for number in range(len(num_samples))]
    hashes[0] = "0" * 62 + "a0"  # zeros at both ends
    entries = [
        ShardEntry(
            name=shard_name(number), num_samples=num, num_bytes=4096 * num, sha256=hashes[number], index_sha256=sha256
        )
        for number, (num, sha256) in enumerate(zip(num_samples, reversed(hashes), strict=True))
    ]
    entry = write_shard_table(directory / SHARD_TABLE_NAME, iter(entries), num_shards=len(entries))
    assert (entry.num_shards, entry.num_bytes) == (len(entries), 4096 * sum(num_samples))
    return entries


def test_what_is_written_is_read(built: Path, tmp_path: Path) -> None:
    num_samples = [3, 1, 7, 2, 9, 1]
    entries = write_rows(tmp_path, num_samples)
    sha256 = hashlib.sha256((tmp_path / SHARD_TABLE_NAME).read_bytes()).hexdigest()
    manifest = load_manifest(built / "table")
    assert manifest.shard_table is not None
    named = manifest.shard_table.model_copy(update={"num_bytes": 4096 * 23, "sha256": sha256})
    table = ShardTable(tmp_path / SHARD_TABLE_NAME, manifest.model_copy(update={"shard_table": named}))
    assert list(table) == entries
    assert table.ends.tolist() == np.cumsum(num_samples).tolist()
    assert table.num_bytes.tolist() == [4096 * num for num in num_samples]
