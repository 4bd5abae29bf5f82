"""The public face: names, signatures and defaults change on purpose only, and importing them is quick."""

from __future__ import annotations

import difflib
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.core.public_names import imported_when_used
from tests.public_names import FURTHER, lines, packages

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


def test_the_page_on_ones_own_code_needs_only_names_that_are_kept() -> None:
    page = (ROOT / "docs" / "own-code.md").read_text()
    for module, names in FURTHER.items():
        assert not [name for name in (module, *names) if f"`{name}`" not in page], module
    for module, named in re.findall(r"^from ((?:data_pipeline|trainer)\S*) import (.*)$", page, flags=re.MULTILINE):
        kept = FURTHER.get(module) or importlib.import_module(module).__all__
        assert not set(named.split(", ")) - set(kept), module


# Time `import torch`, and in a fork of that process each of the packages: a core's seconds, as JSON.
TIME_IMPORTS = """
import importlib, json, os, sys, time
import torch
def seconds_of(package, name):
    reads, writes = os.pipe()
    if os.fork() == 0:
        getattr(importlib.import_module(package), name)
        os.write(writes, str(time.process_time()).encode())
        os._exit(0)
    os.close(writes)
    return float(os.read(reads, 99))
seconds = {"torch": time.process_time()}
for words in sys.argv[1:]:
    package, name = words.split(":")
    # The first time may read from a cold disk, or write the files of compiled code.
    seconds[package] = min(seconds_of(package, name) for _ in range(2))
print(json.dumps(seconds))
"""


@pytest.mark.process
def test_an_import_takes_at_most_twice_as_long_as_that_of_torch() -> None:
    packages = ("trainer.objectives", "trainer.views", "trainer.models", "trainer.probes", "data_pipeline.loading")
    names = [f"{package}:{importlib.import_module(package).__all__[0]}" for package in packages]
    command = [sys.executable, "-c", TIME_IMPORTS, *names]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    seconds = json.loads(done.stdout)
    torch_alone = seconds.pop("torch")
    for package, more in seconds.items():
        assert torch_alone + more < MOST_TIMES_TORCH * torch_alone, package


def test_a_name_is_imported_at_its_first_use_only() -> None:
    get = imported_when_used("example", {"nearest": "data_pipeline.core.errors", "gone": "data_pipeline.core.errors"})
    assert get("nearest") is importlib.import_module("data_pipeline.core.errors").nearest
    for name, message in (("other", "module 'example' has no attribute 'other'"), ("gone", "gone")):
        with pytest.raises(AttributeError, match=message):
            get(name)
