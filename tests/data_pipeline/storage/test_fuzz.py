"""Datasets whose files were damaged at random: one sentence or a list of problems, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.core.errors import UserError
from data_pipeline.loading.decode import decode
from data_pipeline.storage.index import SAMPLES_NAME, labels_name
from data_pipeline.storage.locations import MANIFEST_NAME
from data_pipeline.storage.store import SampleStore
from tests.data_pipeline.limits import memory_limit
from tests.data_pipeline.stored_samples import find_problems
from tests.tiny_data import write_tiny_dataset, write_tiny_sounds

NUM_SAMPLES = 4
MEMORY = 256 << 20  # bytes; all of a dataset here takes less than one
FILES = (MANIFEST_NAME, SAMPLES_NAME, labels_name("base"), "tars.txt", "tars.bin", "tars.sha256", "shard-00000.tar")

Change = tuple[float, str, bytes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole dataset of each kind, in two tars."""
    root = tmp_path_factory.mktemp("whole")
    return {
        "baked": write_tiny_dataset(root / "baked", num_samples=NUM_SAMPLES, num_samples_per_shard=2),
        "online": write_tiny_dataset(
            root / "online", num_samples=NUM_SAMPLES, num_samples_per_shard=2, overlay="online"
        ),
        "sounds": write_tiny_sounds(root / "sounds", num_samples=NUM_SAMPLES, num_samples_per_shard=2),
    }


def changed(content: bytes, changes: Sequence[Change]) -> bytes:
    for share, what, data in changes:
        at = int(share * len(content))
        match what:
            case "set":
                content = content[:at] + data + content[at + len(data) :]
            case "insert":
                content = content[:at] + data + content[at:]
            case "remove":
                content = content[:at] + content[at + 512 * len(data) :]
            case "cut":
                content = content[:at]
    return content


def problems_of(directory: Path) -> list[str]:
    """Read as training and as `verify` do. Anything but `UserError` fails the test."""
    said = ""
    with memory_limit(MEMORY):
        try:
            store = SampleStore(directory)
            decode(store, np.arange(len(store)))
        except UserError as error:
            said = str(error)
        try:
            found = find_problems(directory)
        except UserError as error:
            found = [str(error)]
    assert all("\n" not in sentence for sentence in (said, *found))
    return found


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    kind=st.sampled_from(("baked", "online", "sounds")),
    name=st.sampled_from(FILES),
    changes=st.lists(
        st.tuples(
            st.floats(0, 1), st.sampled_from(["set", "insert", "remove", "cut"]), st.binary(min_size=1, max_size=16)
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_damage_is_found_and_raises_nothing_but_sentences(
    kind: str, name: str, changes: list[Change], whole: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("fuzz") / "data"
    shutil.copytree(whole[kind], directory)
    path = directory / name
    before = path.read_bytes()
    path.write_bytes(changed(before, changes))
    found = problems_of(directory)
    assert found or path.read_bytes() == before or name == MANIFEST_NAME
    shutil.rmtree(directory)
