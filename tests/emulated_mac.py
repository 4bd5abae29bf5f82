"""Take from Python on Linux what macOS lacks, in this process and in all that it starts.

Code that this process starts sees `sys.platform` "darwin", multiprocessing that spawns, modules without what only Linux
has, and no /proc, /sys and /dev/shm. Libraries in C still see Linux, and torch's own memory in files is that of Linux.
"""

from __future__ import annotations

import fcntl
import importlib
import mmap
import os
import platform
import resource
import select
import signal
import socket
import sys
import sysconfig
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# What the standard library's documentation gives as available on Linux and not on macOS, or names of Linux's headers.
LACKS: dict[types.ModuleType, tuple[str, ...]] = {
    os: (
        *("sched_", "SCHED_", "memfd_", "MFD_", "posix_fadvise", "posix_fallocate", "POSIX_FADV_", "pidfd_", "P_PIDFD"),
        *("eventfd", "EFD_", "splice", "SPLICE_", "copy_file_range", "pipe2", "fdatasync", "getrandom", "GRND_"),
        *("getxattr", "setxattr", "listxattr", "removexattr", "XATTR_", "setns", "unshare", "CLONE_", "waitid"),
        *("getresuid", "getresgid", "setresuid", "setresgid", "RTLD_DEEPBIND", "RWF_", "preadv", "pwritev"),
        *("O_DIRECT", "O_TMPFILE", "O_PATH", "O_NOATIME", "O_LARGEFILE", "O_RSYNC"),
    ),
    signal: ("sigwaitinfo", "sigtimedwait", "SIGRT", "SIGPOLL", "SIGPWR", "SIGSTKFLT", "SIGCLD", "pidfd_"),
    select: ("epoll", "EPOLL"),
    resource: ("prlimit", "RUSAGE_THREAD", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RT", "RLIMIT_SIGPENDING"),
    fcntl: ("F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_", "F_NOTIFY", "F_SETLEASE", "DN_"),
    mmap: ("MAP_POPULATE", "MAP_STACK", "MAP_DENYWRITE", "MAP_EXECUTABLE", "MADV_"),
    socket: (
        *("AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG", "AF_CAN", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "SO_PEERCRED"),
        *("SO_BINDTODEVICE", "SO_MARK", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "TCP_QUICKACK", "TCP_CORK", "MSG_NOSIGNAL"),
    ),
    time: ("CLOCK_BOOTTIME", "CLOCK_TAI", "pthread_getcpuclockid"),
}
_ABSENT = ("/proc", "/sys", "/dev/shm")
_SITE = "from tests.emulated_mac import install\n\ninstall()\n"


def environment(directory: Path) -> dict[str, str]:
    """Return variables with which a Python process, and each that it starts, begins with `install`."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": f"{directory}:{ROOT}"}


def install() -> None:
    for module, names in LACKS.items():
        for name in [name for name in dir(module) if name.startswith(names)]:
            delattr(module, name)
    sys.addaudithook(_refuse_absent)
    for name in ("stat", "lstat", "access", "readlink"):
        setattr(os, name, _refusing(getattr(os, name)))
    proxies: Any = types.ModuleType("_scproxy")  # urllib's, of macOS
    proxies._get_proxy_settings = proxies._get_proxies = dict
    sys.modules["_scproxy"] = proxies
    platform.libc_ver = lambda *_, **__: ("", "")
    sysconfig.get_config_vars()  # read from a file that is called after the platform
    importlib.import_module("soundfile")  # its library too
    sys.platform = "darwin"
    importlib.import_module("multiprocessing")  # chooses `spawn`


def _is_absent(path: object) -> bool:
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    return any(f"{text}/".startswith(f"{absent}/") for absent in _ABSENT)


def _refuse_absent(event: str, arguments: tuple[object, ...]) -> None:
    if event in {"open", "os.listdir", "os.scandir"} and _is_absent(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(path: Any, *arguments: Any, **options: Any) -> Any:
        if _is_absent(path):
            if function.__name__ == "access":
                return False
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *arguments, **options)

    return refusing
