"""Every example in a docstring gives what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from tests.real_data import REPOSITORY

PACKAGES = ("configs", "data_pipeline", "launch", "trainer")
WITH_EXAMPLES = [
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    for package in PACKAGES
    for path in sorted(Path(REPOSITORY, package).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
