"""Start processes that a signal does not end too early, and end workers together with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


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
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
