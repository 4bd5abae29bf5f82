"""An end for processes that a test has started, and for all that those have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """SIGKILL for a launcher and all that it started: torchrun's ranks are sessions of their own, and outlive it.

    Does nothing where the launcher has ended: then nobody knows any more what it started.
    """
    if process.poll() is not None:
        return
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    tree = [process.pid]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    for pid in tree:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def ranks_of(launcher: int) -> list[int]:
    """The process ids of the ranks that a torchrun started, in rank order; data servers are left out."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(launcher)], capture_output=True, text=True)
    lines = [line.split(maxsplit=1) for line in listed.stdout.splitlines()]
    pids = [int(pid) for pid, command in lines if "launch/train.py" in command]

    def rank_of(pid: int) -> int:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next(int(entry.removeprefix(b"RANK=")) for entry in environ if entry.startswith(b"RANK="))

    return sorted(pids, key=rank_of)
