"""The public face: names, signatures and defaults change on purpose only, and importing them is quick."""

from __future__ import annotations

import difflib
import importlib
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from data_pipeline.core.public_names import imported_when_used, warn_deprecated
from tests.public_names import lines, packages

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "public_names.txt"
MOST_TIMES_TORCH = 2.0  # what an import takes, by what `import torch` takes: a second of an idle core


def test_every_package_says_what_is_public_and_has_it() -> None:
    assert len(packages()) > 20
    for package in packages():
        module = importlib.import_module(package)
        assert module.__all__ == sorted(module.__all__, key=_as_ruff_sorts), package
        assert not [name for name in module.__all__ if not hasattr(module, name)], package


def _as_ruff_sorts(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_public_names_signatures_and_defaults_are_those_of_the_golden_file() -> None:
    found, kept = list(lines()), GOLDEN.read_text().splitlines()
    changes = "\n".join(difflib.unified_diff(kept, found, "kept", "now", lineterm="", n=1))
    assert not changes, f"\n{changes}\nif this is meant: python -m tests.public_names > tests/golden/public_names.txt"


@pytest.mark.process
def test_an_import_takes_at_most_twice_as_long_as_that_of_torch() -> None:
    alone = min(_seconds_of("import torch") for _ in range(2))
    for package in ("trainer.objectives", "trainer.views", "trainer.models", "trainer.probes", "data_pipeline.loading"):
        name = importlib.import_module(package).__all__[0]
        limit, code = MOST_TIMES_TORCH * alone, f"from {package} import {name}"
        # The first time may read from a cold disk, or write the files of compiled code.
        assert _seconds_of(code) < limit or _seconds_of(code) < limit, package


def _seconds_of(code: str) -> float:
    """Return the time of a core that some code takes in a new Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_name_is_imported_at_its_first_use_only() -> None:
    get = imported_when_used("example", {"nearest": "data_pipeline.core.errors", "gone": "data_pipeline.core.errors"})
    assert get("nearest") is importlib.import_module("data_pipeline.core.errors").nearest
    for name, message in (("other", "module 'example' has no attribute 'other'"), ("gone", "gone")):
        with pytest.raises(AttributeError, match=message):
            get(name)


def test_a_deprecated_name_warns_once_with_its_replacement_and_works() -> None:
    def old(x: int) -> int:
        warn_deprecated("example.old", use="example.new", until="0.2")
        return x + 1

    with pytest.warns(
        FutureWarning, match=r"example\.old is deprecated and leaves with version 0\.2; use example\.new"
    ) as seen:
        assert old(1) == 2
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert old(2) == 3
