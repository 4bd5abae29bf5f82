"""Commands of launch/ called in this process: importing what they import takes a new process seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_pipeline.core.errors import run_command


@dataclass(frozen=True)
class Done:
    """What a command printed, and its exit status."""

    status: int
    stdout: str
    stderr: str


def call(
    main: Callable[[], None],
    *arguments: str | Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Done:
    """Run a command line's `main` with these arguments."""
    monkeypatch.setattr(sys, "argv", [main.__module__, *map(str, arguments)])
    status = 0
    try:
        run_command(main)
    except SystemExit as end:
        status = int(end.code or 0)
    return Done(status, *capsys.readouterr())
