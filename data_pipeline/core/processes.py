"""Start processes that a signal does not end too early, and end workers together with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Final

SECONDS_TO_STOP: Final = 20.0  # for the last step and the checkpoint of a training that was asked to stop


@contextmanager
def signals_blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Block signals to this thread inside the block; they come when it ends.

    A process that is started inside inherits the mask, and keeps it until it unblocks them itself.
    """
    if sys.platform == "darwin":
        resource_tracker.ensure_running()  # the first worker would start it inside, which would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_deferred(numbers: Iterable[int]) -> Iterator[None]:
    """Let signals to this process take effect only when the block ends. Works in the main thread alone.

    `signals_blocked` is not enough for that, because threads of libraries take signals, too. It is used here as well,
    for the processes that are started inside.
    """
    came: list[int] = []
    numbers = tuple(numbers)
    with signals_blocked(numbers):
        before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for number in came:
                signal.raise_signal(number)


def worker_context(*modules: str) -> ForkServerContext | SpawnContext:
    """Return how `multiprocessing` starts workers that need these modules.

    On Linux, it forks them from a server that has imported the modules and has no threads: a fork of this process could
    copy a held lock. On macOS, where libraries of the system may crash after any fork, each is a new interpreter.
    """
    if sys.platform == "darwin":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    return context


def end_with_parent() -> None:
    """End this process, a child by `multiprocessing`, as soon as its parent ends in any way. Returns at once."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def leave_signals_to_parent() -> None:
    """Ignore SIGTERM and SIGINT, except a SIGTERM from the parent, which ends this process.

    On macOS any SIGTERM ends it, but only after `SECONDS_TO_STOP`, in which the parent can use it for its last step.
    The threads that this process starts later ignore them too. Returns at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a handler would not learn who sent it
    threading.Thread(target=_wait_for_sigterm_of_parent, daemon=True).start()


def keep_files_from_programs() -> None:
    """Let no program that this process starts later inherit a file, except stdin, stdout and stderr."""
    for number in {int(path.name) for path in Path("/dev/fd").iterdir()} - {0, 1, 2}:
        with suppress(OSError):  # the listing itself has one, too
            os.set_inheritable(number, False)


def _wait_for_sigterm_of_parent() -> None:
    if not hasattr(signal, "sigwaitinfo"):  # macOS does not tell who sent a signal
        signal.sigwait({signal.SIGTERM})
        time.sleep(SECONDS_TO_STOP)
        os._exit(0)
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
