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
