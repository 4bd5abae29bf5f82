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


def leave_signals_to_parent() -> None:
    """Ignore SIGTERM and SIGINT, except a SIGTERM from the parent, which ends this process.

    The threads that this process starts later ignore them too. Returns at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a handler would not learn who sent it
    threading.Thread(target=_wait_for_sigterm_of_parent, daemon=True).start()


def _wait_for_sigterm_of_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
