"""How the test suite ends where a native library ends a process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.process
def test_a_worker_that_crashes_fails_the_suite_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_crash.py").write_text("import os\ndef test_aborts(): os.abort()\ndef test_later(): pass\n")
    for number in range(6):
        (tmp_path / f"test_{number}.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    flags = re.findall(r"^WORKERS := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    command = [sys.executable, "-m", "pytest", "-n", "3", *flags, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "FAILED test_crash.py::test_aborts" in done.stdout
