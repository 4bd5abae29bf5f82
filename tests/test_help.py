"""The help of every command: in whole sentences, and at once."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.__main__ import COMMANDS as OF_DATA_PIPELINE

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "numpy", "scipy", "matplotlib", "submitit", "wandb", "webdataset"}
COMMANDS = [
    ["launch/train.py"],
    ["launch/slurm.py"],
    ["launch/status.py"],
    ["trainer"],
    *([f"trainer.{name}"] for name in ("probe", "analyze", "report", "export", "theory")),
    ["data_pipeline"],
    *(["data_pipeline", name] for name in OF_DATA_PIPELINE),
]
# Runs commands one after another as Python would. After each it prints the exit status, the modules that are imported
# by now, and the help of its arguments.
RUN_ALL = """
import argparse, contextlib, io, json, runpy, sys
helps = []
add = argparse.ArgumentParser.add_argument
def add_and_note(self, *names, **options):
    if names and "--help" not in names:
        helps.append([names[0], options.get("help")])
    return add(self, *names, **options)
argparse._ActionsContainer.add_argument, add = add_and_note, argparse._ActionsContainer.add_argument
for command in json.loads(sys.argv[1]):
    helps.clear()
    sys.argv[:] = command
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if command[0].endswith(".py"):
                runpy.run_path(command[0], run_name="__main__")
            else:
                runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code or 0
    print(json.dumps([status, sorted(sys.modules), helps]))
"""


@functools.cache
def found() -> dict[str, Any]:
    """Return for each command its exit status, the modules imported by then, and the help of its arguments by name."""
    commands = json.dumps([[*command, "--help"] for command in COMMANDS])
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, commands], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return dict(zip(map(" ".join, COMMANDS), map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_imports_nothing_heavy_and_says_every_argument_in_a_sentence(command: list[str]) -> None:
    status, modules, helps = found()[" ".join(command)]
    assert status == 0
    assert not HEAVY & set(modules)
    assert helps
    assert [name for name, text in helps if text is None or len(text.split()) < 3 or not text.endswith(".")] == []
