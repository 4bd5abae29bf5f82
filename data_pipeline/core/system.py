"""Answer what differs between Linux and macOS: cores, memory, processes and files.

Linux answers from /proc and by calls of its own. macOS has neither, so some answers are estimates there.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")  # facts about processes and the machine; absent on macOS
SHARED: Final = Path("/dev/shm")  # files in memory, of one machine or container; absent on macOS


def num_cores() -> int:
    """Return the number of cores that this process may run on; on macOS those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_host_bytes(proc: Path = PROC, cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can still allocate, by the machine and by its cgroups (versions 1 and 2).

    macOS does not say it, so half of the machine's memory counts as free there.
    """
    if not (proc / "meminfo").is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
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


def peak_memory_bytes() -> int:
    """Return the largest memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # of the same field on macOS and on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reserve_room(file: int, num_bytes: int) -> None:
    """Give an empty file a size, with room on its disk. Raises `OSError` if there is too little room.

    macOS cannot hold the room for it, so there the room is only checked.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
        return
    disk = os.fstatvfs(file)
    if disk.f_bavail * disk.f_frsize < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(file, num_bytes)


def command_of(pid: str) -> str:
    """Return the command line of a running process of this machine; an empty text if there is no such process."""
    if PROC.is_dir():
        try:
            return (PROC / pid / "cmdline").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
    command = ["ps", "-ww", "-o", "command=", "-p", pid]  # -ww: as long as it is
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False).stdout
