"""Ask Linux for the cores, memory and processes of this machine."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
SHARED: Final = Path("/dev/shm")  # files in memory, of one machine or container


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def free_host_bytes(proc: Path = PROC, cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can still allocate, by the machine and by its cgroups (versions 1 and 2)."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text(encoding="utf-8").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        directory = root / group.lstrip("/")
        while directory.is_relative_to(root):
            free = int(min(free, _free_in_group(directory, *names)))
            directory = directory.parent
    return max(free, 0)


def _free_in_group(directory: Path, limit: str, used: str, cached: str) -> float:
    """Return the free bytes of a cgroup, including cached files; infinity if it has no limit."""
    try:
        most, now, stat = ((directory / name).read_text(encoding="utf-8") for name in (limit, used, "memory.stat"))
        cached_bytes = int(dict(line.split() for line in stat.splitlines()).get(cached, 0))
    except OSError:
        return math.inf
    return math.inf if most.strip() == "max" else int(most) - int(now) + cached_bytes
