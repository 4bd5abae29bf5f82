"""The keys that training would see are those of `traces.json`, on several layouts of ranks and workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.digests import FOLDER
from tests.golden.traces import CASES, one_case, write_datasets

GOLDEN = json.loads((FOLDER / "traces.json").read_text())


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_datasets(tmp_path_factory.mktemp("traced"))


@pytest.mark.parametrize("case", CASES)
def test_keys(case: str, datasets: Path) -> None:
    assert one_case(case, datasets) == GOLDEN[case]
