"""Stop all ranks after the same step, with a checkpoint, on a request to any of them.

A signal is a request, and so is the end of the launcher that started this rank. Slurm warns one process or all
processes before it takes a job's nodes away, so a rank that is warned must tell the others. The ranks exchange requests
in every step and read the result one step later, so that no rank waits for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any, Final, Self

from trainer.distributed.collectives import AnyRank, rank

# Batch systems, torchrun and `kill` send SIGTERM, submitit SIGUSR2, many clusters SIGUSR1, Ctrl-C SIGINT, and a
# terminal that closes SIGHUP.
WARNINGS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
_ON_CTRL_C: Final = b"\nCtrl-C: stopping after the step at hand, with a checkpoint; press it again to stop at once\n"
# Variables of launchers that are the parent of their ranks, and that leave them running if they are killed. A shell is
# not a launcher: it may end before its run (nohup). Slurm's daemon ends its ranks itself.
_LAUNCHERS: Final = {"TORCHELASTIC_RUN_ID": "torchrun", "SUBMITIT_LOCAL_JOB_ID": "submitit's local executor"}


class StoppedError(Exception):
    """Training has stopped on request, with `step` steps done and saved.

    `reason` completes "stopped after step 7, ...". Only the rank with `is_first_rank` should print the message.
    """

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"stopped after step {step}, {reason}; start it again and it goes on from there")
        self.step = step
        self.is_first_rank = rank() == 0


def _is_nohup(number: signal.Signals) -> bool:
    """Return whether the run shall go on after its terminal has closed, because `nohup` started it."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


class StopRequests:
    """A context manager that notes warning signals to this process, so that they do not end it.

    Only a second SIGINT ends it, by a KeyboardInterrupt.

    Every rank must open it in its main thread, before any other code handles these signals. Closing it restores the
    previous handlers.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Prepare to note requests. If a launcher in `environ` started this process, its end is a request too."""
        self._warned_by: signal.Signals | None = None
        self._is_interrupted = False
        self._before: dict[signal.Signals, Any] = {}
        self._launcher = next((launcher for name, launcher in _LAUNCHERS.items() if name in environ), None)
        self._parent = os.getppid()

    def __enter__(self) -> Self:
        self._any_rank = AnyRank()  # not in the loop: a rank would wait there for one that fails in the first step
        self._before = {number: signal.signal(number, self._note) for number in WARNINGS if not _is_nohup(number)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_noted(self) -> bool:
        """Return whether this rank has a request."""
        return self._warned_by is not None or self._has_lost_its_launcher()

    @property
    def reason(self) -> str:
        """Return why this rank stops, such as "as SIGTERM asked"."""
        if self._warned_by is not None:
            return "as Ctrl-C asked" if self._is_interrupted else f"as {self._warned_by.name} asked"
        if self._has_lost_its_launcher():
            return f"because {self._launcher} (process {self._parent}) has ended"
        return "as a signal to another rank asked"

    def agreed(self) -> bool:
        """Return whether all ranks stop now, because some rank had a request at the previous call.

        Every rank must call this after each step.
        """
        # Triton's compiler, in the first step of a compiled network on a GPU, puts handlers of its own in the place of
        # all these, behind Python's back. SIGUSR1 would have no effect from then on.
        for number in self._before:
            signal.signal(number, self._note)
        return self._any_rank.next(self.is_noted())

    def _has_lost_its_launcher(self) -> bool:
        """Return whether the launcher has ended, so that this process has another parent."""
        return self._launcher is not None and os.getppid() != self._parent

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._is_interrupted:
                raise KeyboardInterrupt
            self._is_interrupted = True
            if rank() == 0:
                with contextlib.suppress(OSError):  # a notebook's stderr is no file, and a terminal may be gone
                    os.write(sys.stderr.fileno(), _ON_CTRL_C)  # a signal may come in the middle of any other output
        self._warned_by = signal.Signals(number)
