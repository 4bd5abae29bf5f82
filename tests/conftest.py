"""Marks of whole folders, and the check that a test which starts processes is marked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiers

FOLDERS = {"slurm": "slurm", "e2e": "process"}  # the mark of every test in a folder of tests/


def pytest_configure() -> None:
    tiers.watch_processes()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in FOLDERS:
            item.add_marker(FOLDERS[folder])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    tiers.begin(item)
