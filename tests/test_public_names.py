"""The public face: names, signatures and defaults change on purpose only."""

from __future__ import annotations

import difflib
import importlib
import re
from pathlib import Path

import pytest

from tests.public_names import FURTHER, lines, packages

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "public_names.txt"


def test_every_package_says_what_is_public_and_has_it() -> None:
    assert len(packages()) > 20
    for package in packages():
        module = importlib.import_module(package)
        assert module.__all__ == sorted(module.__all__, key=_as_ruff_sorts), package
        assert not [name for name in module.__all__ if not hasattr(module, name)], package


def _as_ruff_sorts(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.pinned
def test_public_names_signatures_and_defaults_are_those_of_the_golden_file() -> None:
    found, kept = list(lines()), GOLDEN.read_text().splitlines()
    changes = "\n".join(difflib.unified_diff(kept, found, "kept", "now", lineterm="", n=1))
    assert not changes, f"\n{changes}\nif this is meant: python -m tests.public_names > tests/golden/public_names.txt"


def test_the_page_on_ones_own_code_needs_only_names_that_are_kept() -> None:
    page = (ROOT / "docs" / "own-code.md").read_text()
    for module, names in FURTHER.items():
        assert not [name for name in (module, *names) if f"`{name}`" not in page], module
    for module, named in re.findall(r"^from ((?:data_pipeline|trainer)\S*) import (.*)$", page, flags=re.MULTILINE):
        kept = FURTHER.get(module) or importlib.import_module(module).__all__
        assert not set(named.split(", ")) - set(kept), module
