"""Workers on macOS: how they are started, and which signals end them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest

from data_pipeline.core import processes
from data_pipeline.core.processes import (
    keep_files_from_programs,
    leave_signals_to_parent,
    signals_blocked,
    worker_context,
)


def test_macos_starts_workers_without_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_context(__name__).get_start_method() == "forkserver"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert worker_context(__name__).get_start_method() == "spawn"


def test_programs_get_no_files(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:  # other files of this process stay as they are
        assert pool.apply(_inheritable, (tmp_path / "file",)) == (True, False, True)


def _inheritable(path: Path) -> tuple[bool, bool, bool]:
    """Return whether programs get a file before and after, and stderr."""
    with path.open("w") as file:
        os.set_inheritable(file.fileno(), True)
        before = os.get_inheritable(file.fileno())
        keep_files_from_programs()
        return before, os.get_inheritable(file.fileno()), os.get_inheritable(2)


def test_a_sigterm_from_anybody_ends_a_worker_of_macos_after_a_while() -> None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_wait_as_on_macos, args=(sender,))
    with signals_blocked({signal.SIGTERM}):  # a library of an earlier test may start a thread in each fork
        worker.start()
    assert receiver.recv() == "ready"
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(0.1)
    assert worker.is_alive()
    worker.join(10)
    assert worker.exitcode == 0


def _wait_as_on_macos(sender: multiprocessing.connection.Connection) -> None:
    del signal.sigwaitinfo
    processes.SECONDS_TO_STOP = 0.3  # type: ignore[misc]
    leave_signals_to_parent()
    sender.send("ready")
    signal.pause()
