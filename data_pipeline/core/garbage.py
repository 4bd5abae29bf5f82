"""Pause Python's search for garbage where many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Search for no garbage inside the block, for example for imports.

    Modules stay, so a search among their objects finds nothing, and a tenth of the start of a process goes into it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
