"""How a training process uses host memory."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Let the process keep the memory that it frees instead of giving it back to the system at once.

    A training step on the CPU frees and takes the same large blocks again and again. By default glibc maps and unmaps
    each of them, and clearing the fresh pages is a quarter of a viewmaker's step. Elsewhere this does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGEST)
