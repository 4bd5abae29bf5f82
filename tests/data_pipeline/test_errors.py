"""What a command says of an error of the storage, and what stays a traceback."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from data_pipeline.errors import UserError, about, run_command


def fails_with(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("name", ["EROFS", "EACCES", "EPERM", "EIO", "ENOTDIR", "EISDIR", "EEXIST", "ENAMETOOLONG"])
def test_a_refusal_of_the_storage_is_one_sentence_with_the_path_and_the_reason(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    number = getattr(errno, name)
    with pytest.raises(SystemExit) as end:
        run_command(lambda: fails_with(OSError(number, os.strerror(number), "/archive/run/report.html")))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: /archive/run/report.html: {os.strerror(number).lower()}; ")


@pytest.mark.parametrize("path", [None, "/archive/metrics.jsonl"])
@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EFBIG"])
def test_no_room_is_one_sentence_even_if_no_file_is_named(
    name: str, path: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    number = getattr(errno, name)
    with pytest.raises(SystemExit) as end:
        run_command(lambda: fails_with(OSError(number, os.strerror(number), path)))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no room on the disk")
    assert (path or "no room") in line


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EROFS, "Read-only file system"),  # of no file: nobody could mend it
        OSError(errno.EINVAL, "Invalid argument", "file"),
        OSError(errno.EBADF, "Bad file descriptor", "file"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "file"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        OSError("said by a library"),
    ],
)
def test_what_may_be_a_bug_keeps_its_traceback(error: OSError) -> None:
    with pytest.raises(OSError) as raised:
        run_command(lambda: fails_with(error))
    assert raised.value is error


def test_a_user_error_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(lambda: fails_with(UserError("--step 7: there is none")))
    assert (end.value.code, capsys.readouterr().err) == (2, "error: --step 7: there is none\n")


def test_an_error_of_write_and_flush_gets_the_name_of_its_file(tmp_path: Path) -> None:
    with pytest.raises(OSError) as raised, about(tmp_path):
        raise OSError(errno.EFBIG, "File too large")
    assert raised.value.filename == str(tmp_path)
    with pytest.raises(OSError) as raised, about(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system", "other")
    assert raised.value.filename == "other"
