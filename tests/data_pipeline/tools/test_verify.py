from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from data_pipeline.__main__ import main
from data_pipeline.building.build import build_dataset
from data_pipeline.loading.decode import decode
from data_pipeline.remote import fetch
from data_pipeline.storage.index import SAMPLES_NAME, labels_name
from data_pipeline.storage.manifest import Manifest, load_manifest
from data_pipeline.storage.store import SampleStore
from tests.commands import Call
from tests.data_pipeline.remote.http_server import serve
from tests.data_pipeline.stored_samples import find_problems as problems
from tests.tiny_data import change_file, damage, write_tiny_sounds

SHARD = "shard-00001.tar"  # holds samples 10 to 19 of 30


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("verify") / "sound"
    build_dataset("procedural_shapes", directory, limit=30, num_samples_per_shard=10)
    return directory


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat attempts at damaged remote files at once."""
    monkeypatch.setattr(fetch, "_LONGEST_PAUSE", 0.01)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    (directory / "manifest.json").write_text(manifest.model_dump_json())


def change_member(directory: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Put other content of at most the same size in the place of a member, padded with zeros."""
    path = directory / SHARD
    with tarfile.open(path) as tar:
        member = tar.getmember(name)
    data = bytearray(path.read_bytes())
    start, end = member.offset_data, member.offset_data + member.size
    data[start:end] = change(bytes(data[start:end])).ljust(member.size, b"\0")
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["00000012.png", "00000012.mask.png"])
def test_what_does_not_decode_is_named_by_shard_and_key(name: str, copy: Path) -> None:
    """The same samples are bad in training as here."""
    change_member(copy, name, lambda content: content[:-40])
    found = problems(copy)
    assert found[0].startswith(f"{SHARD}: does not have the sha256")
    assert found[1].startswith(f"{SHARD}: 00000012: ")
    assert len(found) == 2
    assert [bad.key for bad in decode(SampleStore(copy), np.arange(30)).bad.values()] == ["00000012"]


def test_any_flipped_byte_is_found(copy: Path) -> None:
    assert problems(copy) == []
    data = bytearray((copy / SHARD).read_bytes())
    for position in np.random.default_rng(0).integers(0, len(data), 8):
        data[position] ^= 1
        (copy / SHARD).write_bytes(data)
        assert problems(copy)[0].startswith(f"{SHARD}: does not have the sha256")
        data[position] ^= 1


@pytest.mark.parametrize("name", [SAMPLES_NAME, labels_name("base"), "source_digests.bin", "tars.sha256"])
def test_a_changed_file_beside_the_tars_is_found(name: str, copy: Path) -> None:
    content = bytearray((copy / name).read_bytes())
    content[8] ^= 1
    (copy / name).write_bytes(content)
    assert any(problem.startswith(f"{name}: does not have the sha256") for problem in problems(copy))
    change_file(copy, name, bytes(content))  # in the manifest too
    assert bool(problems(copy)) == (name != "source_digests.bin")


@pytest.mark.parametrize(
    ("changed", "field"),
    [({"mean": (0.5, 0.5, 0.5)}, "mean"), ({"std": (0.5, 0.5, 0.5)}, "std"), ({}, "labels.base.counts")],
)
def test_a_manifest_that_does_not_fit_the_samples_is_found(changed: dict[str, object], field: str, copy: Path) -> None:
    manifest = load_manifest(copy)
    if not changed:
        base = manifest.labels["base"].model_copy(update={"counts": (4, 2, *(3,) * 8)})
        changed = {"labels": {**manifest.labels, "base": base}}
    write_manifest(copy, manifest.model_copy(update=changed))
    [problem] = problems(copy)
    assert problem.startswith(f"manifest.json: {field} is")


@pytest.mark.parametrize("overlay", ["none", "baked"])
def test_sounds_are_verified(tmp_path: Path, overlay: Literal["none", "baked"]) -> None:
    directory = write_tiny_sounds(tmp_path / "sounds", num_samples=20, num_samples_per_shard=10, overlay=overlay)
    assert problems(directory) == []
    damage(directory, [12])
    assert any(problem.startswith(f"{SHARD}: 00000012: ") for problem in problems(directory))


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_every_location_that_can_be_trained_from_is_verified(
    scheme: str, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # of the cache
    with serve(copy) as server:
        location = server.url if scheme == "http" else f"file://{copy}"
        done = call(main, "verify", location)
        assert done.status == 0
        assert done.stdout.startswith(f"{location} is sound: 30 samples in 3 shards")
        for path in tmp_path.glob("feature-dropout-*/dataset-*/tar-*"):
            path.unlink()
        change_member(copy, "00000012.png", lambda _: b"")
        done = call(main, "verify", location)
    assert done.status == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{SHARD}: ")
    assert "sha256" in lines[0]
    assert lines[1].startswith(f"{location} has 1 problem: 20 of 30 samples sound in 3 shards")
