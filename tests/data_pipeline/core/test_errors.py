"""What a command says of an error on a terminal, and what stays a traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.core.errors import UserError, filename_in_errors, run_command

LOGS = """
import logging
from data_pipeline.core.errors import log_to_terminal

log_to_terminal(["my_ssl"])
for name in ("trainer.train", "my_ssl.views", "matplotlib.font_manager", None):
    logging.getLogger(name).info("info of %s", name)
    logging.getLogger(name).warning("warning of %s", name)
"""


@pytest.mark.process
def test_the_terminal_shows_information_of_our_packages_and_warnings_of_all() -> None:
    done = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, check=True)
    assert [line for line in done.stderr.splitlines() if "matplotlib" in line] == ["warning of matplotlib.font_manager"]
    assert len(done.stderr.splitlines()) == 6


def fails_with(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("path", [None, "/archive/metrics.jsonl"])
@pytest.mark.parametrize("name", ["EROFS", "ENOTDIR", "ENOSPC"])
def test_an_error_of_the_storage_is_one_line_with_the_reason_and_the_path(
    name: str, path: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    number = getattr(errno, name)
    with pytest.raises(SystemExit) as end:
        run_command(lambda: fails_with(OSError(number, os.strerror(number), path)))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert os.strerror(number) in line
    assert (path or "error: ") in line


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EINVAL, "Invalid argument", "file"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "file"),
    ],
)
def test_what_may_be_a_bug_keeps_its_traceback(error: OSError) -> None:
    with pytest.raises(OSError) as raised:
        run_command(lambda: fails_with(error))
    assert raised.value is error


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("--step 7: Größe 3 × 4, 日本", "--step 7: Größe 3 × 4, 日本"),
        ("runs/\x1b[2J\r\n\x07\u202eexe.png\ud800", "runs/\\x1b[2J\\r\\n\\x07\\u202eexe.png\\ud800"),
    ],
)
def test_a_user_error_is_one_printable_line_and_status_2(
    text: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(lambda: fails_with(UserError(text)))
    assert (end.value.code, capsys.readouterr().err) == (2, f"error: {line}\n")


def test_an_error_of_write_and_flush_gets_the_name_of_its_file(tmp_path: Path) -> None:
    with pytest.raises(OSError) as raised, filename_in_errors(tmp_path):
        raise OSError(errno.EFBIG, "File too large")
    assert raised.value.filename == str(tmp_path)
    with pytest.raises(OSError) as raised, filename_in_errors(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system", "other")
    assert raised.value.filename == "other"


def test_a_command_whose_output_was_closed_before_it_started_ends_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    run_command(lambda: print("done"))
