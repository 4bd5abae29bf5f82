"""The tiers of the tests: what a test starts beside its own process, and a check that it says so.

`make quick` leaves out every test with one of these marks. A test that starts a process without its mark would slow it
down unseen, so such a test fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_marks: set[str] | None = None  # of the test that runs now


def begin(item: pytest.Item) -> None:
    """Take note of the test that begins, before its fixtures are made."""
    global _marks
    _marks = {mark.name for mark in item.iter_markers()}


def require(*tiers: str) -> None:
    """Fail unless the running test has one of these marks."""
    if _marks is not None and not _marks & set(tiers):
        pytest.fail(f"this starts other processes: mark the test with @pytest.mark.{tiers[0]}")


def watch_processes() -> None:
    """Let every Python process that a test starts require a mark."""
    sys.addaudithook(_check_process)


def _check_process(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen":
        executable, command = arguments[0], arguments[1]
        first = command[0] if isinstance(command, list | tuple) and command else command
        names = {Path(str(name)).name for name in (executable, first) if name is not None}
        if any(name.startswith(("python", "torchrun")) for name in names):
            require("process", "ranks", "slurm")
