"""A process that is forked from the nursery is what a new interpreter would be, for all that tests ask of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
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


RANK = """
import json, os, sys, time
from pathlib import Path
place = Path(sys.argv[1]) / os.environ["RANK"]
place.with_suffix(".part").write_text(json.dumps([os.getpid(), os.getppid(), os.getsid(0), os.environ["WORLD_SIZE"]]))
place.with_suffix(".part").rename(place)
time.sleep(600)
"""


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_are_children_of_their_torchrun_and_hear_of_its_end(number: signal.Signals, tmp_path: Path) -> None:
    """torchrun ends its ranks if it can; killed, it leaves them with another parent."""
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = PythonProcess([*torchrun, str(tmp_path / "rank.py"), str(tmp_path)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not all((tmp_path / rank).is_file() for rank in "01"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = [json.loads((tmp_path / rank).read_text()) for rank in "01"]
    pids = [pid for pid, *_ in found]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    assert [pid for pid, command in commands.items() if "rank.py" in command] == pids
    try:
        assert found == [[pid, process.pid, pid, "2"] for pid in pids]
        process.send_signal(number)
        process.wait(timeout=60)
        for pid in pids:
            if number == signal.SIGKILL:
                stat = Path(f"/proc/{pid}/stat").read_text()
                assert int(stat.rpartition(")")[2].split()[1]) != process.pid
            else:
                assert not Path(f"/proc/{pid}").exists()
    finally:
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
