"""A process that is forked from the nursery is what a new interpreter would be, for all that tests ask of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nursery import PythonProcess, run_python

SHOW = """
import json, os, signal, sys
from pathlib import Path
shown = {
    "argv": sys.argv, "path": sys.path, "name": __name__, "parent": os.getppid(), "cwd": os.getcwd(),
    "environ": dict(os.environ), "in_new_session": os.getsid(0) == os.getpid(), "files": os.listdir("/proc/self/fd"),
    "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "proc": [Path(f"/proc/self/{name}").read_bytes().rstrip(b"\\0").decode() for name in ("cmdline", "environ")],
    "streams": [[s.line_buffering, s.write_through, s.encoding, s.errors] for s in (sys.stdin, sys.stdout, sys.stderr)],
}
print(json.dumps(shown))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("form", "is_alone"), [("code", False), ("script", True), ("module", False), ("unbuffered", True)]
)
def test_it_finds_what_a_new_interpreter_finds(form: str, is_alone: bool, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    words = {
        "code": ["-c", SHOW],
        "script": [str(tmp_path / "show.py")],
        "module": ["-m", "show"],
        "unbuffered": ["-u", "show.py"],
    }[form]
    environ = os.environ | {"PYTHONPATH": f"{tmp_path / 'more'}{os.pathsep}{tmp_path}", "MORE": "1"}
    shown = []
    for start in (subprocess.Popen, PythonProcess):
        process = start(
            [sys.executable, *words, "a", "b c"],
            cwd=tmp_path,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=is_alone,
        )
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        shown.append(json.loads(said))
    assert shown[0] == shown[1]


@pytest.mark.process
@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit('a sentence')",
        "raise KeyboardInterrupt",
        "import os; os.kill(os.getpid(), 9)",
        "import atexit; atexit.register(print, 'at the end'); print('first', end=' ')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('a thread'))).start()",
    ],
)
def test_it_ends_as_a_new_interpreter_does(code: str) -> None:
    command = [sys.executable, "-c", code]
    expected = subprocess.run(command, capture_output=True, text=True)
    found = run_python(command)
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]  # a traceback has other frames


@pytest.mark.process
def test_two_of_them_draw_different_random_numbers() -> None:
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    drawn = [run_python([sys.executable, "-c", code]).stdout.split() for _ in range(2)]
    assert len({*drawn[0], *drawn[1]}) == 4
