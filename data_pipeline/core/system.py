"""The system around this process: environment variables, cores, memory, signals and the parent process.

An empty variable counts as unset, because many scripts unset one by `NAME= command` or `export NAME=`.
CUDA_VISIBLE_DEVICES is not read here: to CUDA an empty value means "no GPU".
"""

from __future__ import annotations

import getpass
import math
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")
SHARED: Final = Path("/dev/shm")  # files in memory, of one machine or container


def variable(name: str) -> str | None:
    """Return the value of an environment variable of this process; None if it is unset or empty."""
    return os.environ.get(name) or None


def unset_empty_variables(prefix: str) -> None:
    """Unset the empty variables of this process that begin with `prefix`, for a library that cannot read them."""
    for name, value in list(os.environ.items()):
        if name.startswith(prefix) and not value:
            del os.environ[name]


def name_unknown_user() -> None:
    """Set LOGNAME if nothing names the user, as in a container that runs under a user id without an account.

    The import of torchvision needs a name, because torch calls a directory after the user.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        os.environ["LOGNAME"] = f"uid-{os.getuid()}"


def num_cores(cgroups: Path = CGROUPS) -> int:
    """Return the number of cores that this process may run on, at most what the quota of its container is worth."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # "max" is no quota
        quota, period = (cgroups / "cpu.max").read_text(encoding="utf-8").split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores


def free_host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
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


@contextmanager
def signals_blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Block signals to this thread inside the block; they come when it ends.

    A process that is started inside inherits the mask, and keeps it until it unblocks them itself.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """End this process, a child by `multiprocessing`, as soon as its parent ends in any way. Returns at once."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    import multiprocessing  # here, because few commands need it

    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
