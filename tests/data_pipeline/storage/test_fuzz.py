"""Datasets that were damaged at random, or made so on purpose: one sentence or a list of problems, and nothing else.

Each example reads a tiny dataset as training and `verify` would, after a change of its manifest, an index or a tar.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.core.errors import UserError
from data_pipeline.loading.decode import decode
from data_pipeline.storage.manifest import MANIFEST_NAME, load_manifest
from data_pipeline.storage.shards import index_content, index_path, index_shard
from data_pipeline.storage.store import SampleStore
from data_pipeline.storage.tar_headers import read_contents
from data_pipeline.tools.verify import Verification
from tests.data_pipeline.limits import memory_limit
from tests.tiny_data import write_tiny_dataset, write_tiny_sounds

NUM_SAMPLES = 4
MEMORY = 256 << 20  # bytes; all of a dataset here takes less than one
SHARD = "shard-00000.tar"
KINDS = ("baked", "online", "sounds")

Change = tuple[float, str, bytes]

fuzz = settings(max_examples=200, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole dataset of each kind, in two shards."""
    root = tmp_path_factory.mktemp("whole")
    return {
        "baked": write_tiny_dataset(root / "baked", num_samples=NUM_SAMPLES, num_samples_per_shard=2),
        "online": write_tiny_dataset(
            root / "online", num_samples=NUM_SAMPLES, num_samples_per_shard=2, overlay="online"
        ),
        "sounds": write_tiny_sounds(root / "sounds", num_samples=NUM_SAMPLES, num_samples_per_shard=2),
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def fresh(whole: Path, place: Path) -> Path:
    """A copy of a dataset to change, alone in `place`."""
    directory = place / "data"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(whole, directory)
    (directory / SHARD).chmod(0o644)
    return directory


def check_is_one_line(error: UserError) -> None:
    assert "\n" not in str(error)


def read_everything(directory: Path) -> None:
    """Read as training and as `verify` do. Anything but `UserError` fails the test, as does a file elsewhere."""
    with memory_limit(MEMORY):
        try:
            store = SampleStore(directory)
            decode(store, np.arange(len(store)))
        except UserError as error:
            check_is_one_line(error)
        try:
            verification = Verification(directory)
            found = [str(problem) for problem in verification.problems()]
            assert verification.summary
            assert len(found) == verification.num_problems
        except UserError as error:
            check_is_one_line(error)
    assert [path.name for path in directory.parent.iterdir()] == ["data"]
    assert all(path.parent == directory for path in directory.rglob("*"))


def changes(max_size: int = 4) -> st.SearchStrategy[list[Change]]:
    """What happens to the bytes of a file, and where, as a share of its size."""
    what = st.sampled_from(["set", "flip", "insert", "remove", "cut"])
    return st.lists(st.tuples(st.floats(0, 1), what, st.binary(min_size=1, max_size=16)), min_size=1, max_size=max_size)


def changed(content: bytes, changes: Sequence[Change]) -> bytes:
    for share, what, data in changes:
        at = int(share * len(content))
        match what:
            case "set":
                content = content[:at] + data + content[at + len(data) :]
            case "flip":
                content = content[:at] + bytes(byte ^ data[0] for byte in content[at : at + 1]) + content[at + 1 :]
            case "insert":
                content = content[:at] + data + content[at:]
            case "remove":
                content = content[:at] + content[at + 512 * len(data) :]
            case "cut":
                content = content[:at]
    return content


def adopt(directory: Path, *, index: bytes | None = None) -> None:
    """Let the manifest name the bytes of the first shard, and an index, as whoever made them on purpose would."""
    path, manifest = directory / SHARD, directory / MANIFEST_NAME
    value = json.loads(manifest.read_text())
    if index is None:
        index = index_content(index_shard(path, members=load_manifest(directory).members, due=range(2)))
    content = path.read_bytes()
    value["shards"][0] |= {
        "num_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "index_sha256": hashlib.sha256(index).hexdigest(),
    }
    manifest.write_text(json.dumps(value))


numbers = st.one_of(
    st.integers(-4, 4),
    st.sampled_from([10**6, 99_999_999, 10**8, 10**15, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**400]),
    st.floats(),
)
texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "..", "../x.tar", "/tmp/x.tar", "a/b.tar", "-rf.tar", "x;y.tar", "\x1b[2J", "manifest.json"]),
    st.sampled_from(["overlay.safetensors", "shard-00001.tar", "shard-00000.index", "picture", "sound", "baked"]),
)
values: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    texts,
    st.lists(st.one_of(numbers, texts), max_size=4),
    st.just({}),
    st.just([[]]),
)


def paths_in(value: Any) -> list[tuple[str | int, ...]]:
    """Every place in a JSON value, outermost first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(), *((key, *path) for key, part in inner for path in paths_in(part))]


@fuzz
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_any_manifest_is_read_or_refused(data: st.DataObject, kind: str, whole: dict[str, Path], place: Path) -> None:
    directory = fresh(whole[kind], place)
    value = json.loads((directory / MANIFEST_NAME).read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths_in(value)[1:] or [("x",)]))
        part = value
        for step in path[:-1]:
            part = part[step]
        if data.draw(st.integers(0, 4)) == 0 and path[-1] != "x":
            del part[path[-1]]
        else:
            part[path[-1]] = data.draw(values)
    content = json.dumps(value).encode()
    if data.draw(st.integers(0, 4)) == 0:
        content = changed(content, data.draw(changes()))
    (directory / MANIFEST_NAME).write_bytes(content)
    read_everything(directory)


@pytest.mark.slow
@fuzz
@given(data=st.data(), kind=st.sampled_from(KINDS), is_named=st.booleans())
def test_any_index_is_read_or_made_anew(
    data: st.DataObject, kind: str, is_named: bool, whole: dict[str, Path], place: Path
) -> None:
    directory = fresh(whole[kind], place)
    path = index_path(directory / SHARD)
    if data.draw(st.booleans()):
        content = changed(path.read_bytes(), data.draw(changes()))
    else:
        rows = np.frombuffer(path.read_bytes(), dtype="<i8").copy()
        extremes = st.sampled_from([0, 1, 512, 10_240, -1, 2**31, 2**62, 2**63 - 1, 2**63 - 512, -(2**63)])
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(rows) - 1))
            rows[at] = data.draw(st.one_of(extremes, st.sampled_from(rows.tolist())))
        content = rows.tobytes()
    path.write_bytes(content)
    if is_named:
        adopt(directory, index=content)
    read_everything(directory)
    if content != index_path(whole[kind] / SHARD).read_bytes() and not is_named:
        assert path.read_bytes() == index_path(whole[kind] / SHARD).read_bytes()


@pytest.mark.slow
@fuzz
@given(data=st.data(), kind=st.sampled_from(KINDS), is_named=st.booleans())
def test_any_tar_is_read_as_far_as_it_is_whole(
    data: st.DataObject, kind: str, is_named: bool, whole: dict[str, Path], place: Path
) -> None:
    directory = fresh(whole[kind], place)
    path = directory / SHARD
    content = path.read_bytes()
    if data.draw(st.booleans()):
        content = changed(content, data.draw(changes()))
    else:  # in the header of a member, or at the beginning of its content
        member = data.draw(st.sampled_from(read_contents(memoryview(content)).members))
        at = member.offset + data.draw(st.integers(-512, 200))
        new = data.draw(
            st.one_of(st.binary(min_size=1, max_size=12), st.just(b"7" * 11), st.just(b"\x80" + b"\xff" * 11))
        )
        content = content[:at] + new + content[at + len(new) :]
        if at < member.offset and data.draw(st.booleans()):
            content = with_checksum(content, member.offset - 512)
    path.write_bytes(content)
    if is_named and content:
        index_path(path).unlink()
        adopt(directory)
    read_everything(directory)


def with_checksum(content: bytes, start: int) -> bytes:
    """A tar whose header at `start` has the checksum that it should have."""
    header = content[start : start + 148] + b" " * 8 + content[start + 156 : start + 512]
    return content[: start + 148] + b"%06o\0 " % sum(header) + content[start + 156 :]


def test_what_the_fuzzers_start_from_is_sound(whole: dict[str, Path]) -> None:
    for directory in whole.values():
        verification = Verification(directory)
        assert not list(verification.problems())
        assert not decode(SampleStore(directory), np.arange(NUM_SAMPLES)).bad


def test_the_limit_of_memory_holds() -> None:
    """Asks the system itself: an allocator may still hold memory that other tests have freed."""
    with memory_limit(MEMORY), pytest.raises(OSError, match="Cannot allocate memory"):
        mmap.mmap(-1, 2 * MEMORY)
    mmap.mmap(-1, 2 * MEMORY).close()
