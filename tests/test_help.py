"""The help of every command: in whole sentences, and at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from data_pipeline.__main__ import COMMANDS as OF_DATA_PIPELINE

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "numpy", "scipy", "matplotlib", "submitit", "wandb", "webdataset"}
COMMANDS = [
    ["launch/train.py"],
    ["launch/slurm.py"],
    ["launch/status.py"],
    *([f"trainer.{name}"] for name in ("probe", "analyze", "report", "export", "replay", "theory")),
    ["data_pipeline"],
    *(["data_pipeline", name] for name in OF_DATA_PIPELINE),
]
# Runs a command as Python would, and then prints the modules that it has imported and the help of its arguments.
RUN = """
import argparse, json, runpy, sys
helps = []
add = argparse.ArgumentParser.add_argument
def add_and_note(self, *names, **options):
    if names and "--help" not in names:
        helps.append([names[0], options.get("help")])
    return add(self, *names, **options)
argparse._ActionsContainer.add_argument, add = add_and_note, argparse._ActionsContainer.add_argument
name, *sys.argv[1:] = sys.argv[1:]
try:
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
except SystemExit as end:
    status = end.code or 0
print(json.dumps([status, sorted(sys.modules), helps]))
"""


def run(command: Sequence[str]) -> tuple[int, set[str], list[tuple[str, str | None]]]:
    """Return the exit status of a command, the modules that it imported, and the help of its arguments by name."""
    done = subprocess.run([sys.executable, "-c", RUN, *command], cwd=ROOT, capture_output=True, text=True, check=True)
    status, modules, helps = json.loads(done.stdout.splitlines()[-1])
    return status, set(modules), [(name, text) for name, text in helps]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_imports_nothing_heavy_and_says_every_argument_in_a_sentence(command: list[str]) -> None:
    status, modules, helps = run([*command, "--help"])
    assert status == 0
    assert not modules & HEAVY
    assert helps
    assert [name for name, text in helps if text is None or len(text.split()) < 3 or not text.endswith(".")] == []
