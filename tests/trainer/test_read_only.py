"""Commands that read a run directory which they may not write to, and their errors if they must write."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainer.probe
import trainer.report
from tests.commands import Call
from tests.tiny_data import write_tiny_pair
from tests.trainer.probed_runs.test_probe_command import make_run
from tests.trainer.reports.made_runs import Page
from trainer.run_dir import RunDir

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Guard:
    """A guard that refuses every change below a directory, as a read-only mount does.

    It is an audit hook of Python. Permissions would not do, because tests also run as root, and not every machine lets
    a test mount something. A hook cannot be removed, so it can be switched off.
    """

    def __init__(self) -> None:
        self.directory: str | None = None
        self.number = errno.EROFS

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.directory is None:
            return
        if event == "open":
            path, _, flags = arguments
            changed = [path] if isinstance(flags, int) and flags & WRITES else []
        else:
            changed = list(arguments[:2]) if event in {"os.mkdir", "os.rename", "os.remove", "os.rmdir"} else []
        for path in changed:
            if isinstance(path, str | os.PathLike) and str(Path(path).absolute()).startswith(self.directory):
                raise OSError(self.number, os.strerror(self.number), os.fspath(path))


_GUARD = Guard()
sys.addaudithook(_GUARD)


@pytest.fixture
def protect() -> Iterator[Callable[..., None]]:
    def switch(directory: Path, number: int = errno.EROFS) -> None:
        _GUARD.directory, _GUARD.number = f"{directory}{os.sep}", number

    yield switch
    _GUARD.directory = None


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", write_tiny_pair(tmp_path / "data", num_train=40, num_test=20)).path


def content(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_read_only_run_is_probed_and_reported_in_a_directory_of_links(
    run: Path, tmp_path: Path, protect: Callable[..., None], call: Call
) -> None:
    """As `cp -rs` makes it."""
    before, mine = content(run), tmp_path / "mine" / "run"
    shutil.copytree(run, mine, copy_function=os.symlink)
    protect(run)
    call(trainer.probe.main, mine, "--untrained")
    assert "1 of 1 run(s) are probed already" in call(trainer.probe.main, mine, "--untrained", "--missing").stdout
    assert call(trainer.report.main, mine).stdout == f"{mine / 'report.html'}\n"
    result = json.loads((RunDir(mine).probes(10) / "base.json").read_text())
    row = Page((mine / "report.html").read_text()).row("debug-image")
    assert row[1].startswith(f"{100 * result['linear']['accuracy']:.1f}")
    assert content(run) == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("command", ["report", "probe"])
def test_a_command_that_must_write_says_so_in_one_sentence(
    command: str, number: int, run: Path, protect: Callable[..., None], call: Call
) -> None:
    protect(run, number)
    done = call(getattr(trainer, command).main, run)
    line = done.stderr.splitlines()[-1]
    assert (done.status, line[:7]) == (2, "error: ")
    assert os.strerror(number) in line
    assert str(run) in line
