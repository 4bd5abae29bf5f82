"""Call commands of launch/ in this process, because a new process needs seconds for its imports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from data_pipeline.core.errors import run_command
from tests.tiny_data import write_tiny_dataset


@dataclass(frozen=True)
class Done:
    """The output and the exit status of a command."""

    status: int
    stdout: str
    stderr: str


class Call(Protocol):
    """The fixture `call` of conftest.py: runs a command line's `main` with arguments."""

    def __call__(self, main: Callable[[], None], *arguments: str | Path) -> Done: ...


def caller(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Return the function that is the fixture `call`."""

    def call(main: Callable[[], None], *arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", [main.__module__, *map(str, arguments)])
        status = 0
        try:
            run_command(main)
        except SystemExit as end:
            status = int(end.code or 0)
        return Done(status, *capsys.readouterr())

    return call


def float64_recipe(directory: Path) -> list[str]:
    """Return the arguments that train debug:image in float64 on tiny shards, which are written into `directory`.

    In float64 rounding pushes no ReLU over zero, so curves can be compared.
    """
    train_dir = write_tiny_dataset(directory / "train", num_samples=128)
    test_dir = write_tiny_dataset(directory / "test", num_samples=32, seed=1)
    settings = [f"data.train_dir={train_dir}", f"data.test_dir={test_dir}", "precision=float64"]
    settings += ["tracking.wandb=disabled"]
    return ["--config", "debug:image", *(word for setting in settings for word in ("--set", setting))]
