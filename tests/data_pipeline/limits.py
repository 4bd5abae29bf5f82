"""A limit on memory while a test runs."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Refuse this process more than `num_bytes` of address space beyond what it has: `MemoryError` or `RuntimeError`.

    Address space and not memory, so that what is asked for and never touched counts as well.
    """
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
