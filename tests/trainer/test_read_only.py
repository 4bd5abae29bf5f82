"""Commands that read a run directory which they may not write to, and their errors if they must write."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
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


PROTECTED: list[str] = []  # directories


def refuse_changes(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse every change below the protected directories, as a read-only mount does: tests also run as root."""
    if event == "open":
        path, _, flags = arguments
        changed = [path] if isinstance(flags, int) and flags & WRITES else []
    else:
        changed = list(arguments[:2]) if event in {"os.mkdir", "os.rename", "os.remove", "os.rmdir"} else []
    for path in changed:
        if isinstance(path, str | os.PathLike) and str(Path(path).absolute()).startswith(tuple(PROTECTED)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))


sys.addaudithook(refuse_changes)  # it cannot be removed


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", write_tiny_pair(tmp_path / "data", num_train=40, num_test=20)).path


def content(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_read_only_run_is_probed_and_reported_in_a_directory_of_links(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """As `cp -rs` makes it."""
    before, mine = content(run), tmp_path / "mine" / "run"
    shutil.copytree(run, mine, copy_function=os.symlink)
    monkeypatch.setattr(sys.modules[__name__], "PROTECTED", [f"{run}{os.sep}"])
    call(trainer.probe.main, mine, "--untrained")
    assert "1 of 1 run(s) are probed already" in call(trainer.probe.main, mine, "--untrained", "--missing").stdout
    assert call(trainer.report.main, mine).stdout == f"{mine / 'report.html'}\n"
    result = json.loads((RunDir(mine).probes(10) / "base.json").read_text())
    row = Page((mine / "report.html").read_text()).row("debug-image")
    assert row[1].startswith(f"{100 * result['linear']['accuracy']:.1f}")
    assert content(run) == before
