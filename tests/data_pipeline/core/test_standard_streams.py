"""A command whose terminal has closed, whose reader has ended, or which was started without stdout or stderr."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.core.errors import run_command

COMMAND = """
import sys
from data_pipeline.core.errors import run_command

def main():
    with open(sys.argv[1], "w") as file:
        print("noise", file=sys.stderr)
        print("line", flush=True)
        while "endless" in sys.argv:
            print("line")
        file.write(f"whole {file.fileno() > 2}")

run_command(main)
"""


def shell(redirections: str, kept: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = f'"$0" -c "$@" {redirections}; exit ${{PIPESTATUS[0]}}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, COMMAND, str(kept), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.process
def test_a_reader_that_has_ended_is_no_traceback(tmp_path: Path) -> None:
    ended = shell("| head -1", tmp_path / "kept", "endless")
    assert (ended.stdout, ended.stderr) == ("line\n", "noise\n")
    assert ended.returncode == 128 + signal.SIGPIPE


@pytest.mark.process
@pytest.mark.parametrize("redirections", [">/dev/null 2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_command_without_stdout_or_stderr_ends_well_and_its_files_get_no_noise(
    redirections: str, tmp_path: Path
) -> None:
    assert shell(redirections, tmp_path / "kept").returncode == 0
    assert (tmp_path / "kept").read_text() == "whole True"


def test_another_broken_pipe_keeps_its_traceback() -> None:
    def main() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        run_command(main)


class ClosedTerminal(io.StringIO):
    """A terminal whose window is gone: the kernel refuses each write."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_command_goes_on_after_its_terminal_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", ClosedTerminal())
    monkeypatch.setattr("sys.stderr", ClosedTerminal())
    went_on = []

    def main() -> None:
        print("run 1 of 2")
        print("a warning", file=sys.stderr)
        went_on.append("run 2")

    run_command(main)
    assert went_on == ["run 2"]
