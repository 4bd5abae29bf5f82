"""End a rank that freezes, with the Python stacks of all its threads.

The training loop calls `beat` when it begins to read a batch and when it begins to train on it. Inside a step, every
stage and every block of a network gives a sign of life (`trainer.liveness`). Each sign sets the timer
of `faulthandler` anew, at most once a second. If none comes in time, a thread in C, which needs no interpreter, writes
the stacks to RUN_DIR/stalled/rank_N.txt. A moment later, when the other ranks have written theirs, SIGALRM ends the
process, and the launcher ends the other ranks.

A rank that waits for a frozen one gives no signs either, so all ranks leave their stacks.
`trainer.fault_tolerance.stalls` names the rank that did not wait, or that left no stacks.

Guarantees: a frozen run never waits forever, and a run with slow steps is not ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import platform
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, Self

from data_pipeline.core.schema import Schema, Seconds
from trainer import liveness
from trainer.run_dir import RunDir

_TIMES: Final = 20  # the longest gap so far, after which a rank counts as frozen
_GRACE_SECONDS: Final = 3.0  # from the stacks to the end of the process
_ARM_SECONDS: Final = 1.0  # between two settings of the timer, each of which starts a thread
_HEADER_BYTES: Final = 1024
_NUM_SHARDS_NAMED: Final = 8
# Stages in which a rank may wait for another one, which may be fetching a shard.
_WAITING: Final = {"read", "backward", "communication", "optimizer", "waiting for GPU"}


class WatchdogConfig(Schema):
    """The limits on the time without a sign of life of a rank. Above a limit, the rank is ended.

    Attributes:
        enabled: set it to false while debugging.
        limit_seconds: the least limit. A stage that has been longer without a sign before has a larger one.
        startup_seconds: the least limit until the first step is done, in a stage that has not ended before, while
            networks are compiled again, and during a probe.
    """

    enabled: bool = True
    limit_seconds: Seconds = 60
    startup_seconds: Seconds = 600


class Watchdog(liveness.Listener):
    """A watch over this process until it is closed; a context manager. Use one at a time.

    Args:
        rank: the number of this rank.
        fetch_seconds: the least limit of stages that wait for data; a fetch has its own time limit and error.
    """

    def __init__(
        self,
        run_dir: RunDir,
        config: WatchdogConfig,
        *,
        rank: int,
        fetch_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._rank, self._clock = config, rank, clock
        self._waiting_seconds = max(config.limit_seconds, fetch_seconds)
        self._longest: dict[str, float] = {}  # gap between two signs, by stage
        self._stages: list[str] = []
        self._patient: list[str] = []
        self._step, self._first_step, self._is_started = 0, -1, False
        self._doing, self._shards = "start-up", "none"
        self._last = self._armed_at = clock()
        self._armed_seconds = 0.0
        self._path = run_dir.stalled / f"rank_{rank}.txt"
        self._file = -1
        if config.enabled:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():  # of a start that did not end well
                self._path.replace(self._path.with_suffix(".earlier"))
            self._file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o644)
            os.lseek(self._file, _HEADER_BYTES, os.SEEK_SET)
            self._write_header()
        self._arm()
        liveness.listeners.append(self)

    def beat(self, step: int, *, doing: str, shards: Sequence[str] | None = None) -> None:
        """Note that this rank begins a part of a step, such as "reading", with the shards that it reads from now on."""
        self._note_gap()
        if self._first_step < 0:
            self._first_step = step
        self._is_started = self._is_started or step != self._first_step
        self._step, self._doing = step, doing
        if shards is not None:
            more = len(shards) - _NUM_SHARDS_NAMED
            self._shards = ", ".join(shards[:_NUM_SHARDS_NAMED]) + (f" and {more} more" if more > 0 else "")
        self._write_header()
        self._set_timer()

    def sign(self) -> None:
        """Note that the step goes on."""
        self._note_gap()
        if self._last - self._armed_at >= _ARM_SECONDS:
            self._arm()

    def enter(self, stage: str) -> None:
        """Note that a stage begins."""
        self._note_gap()
        self._stages.append(stage)
        self._set_timer()

    def leave(self) -> None:
        """Note that the innermost stage ends."""
        self._note_gap()
        self._stages.pop()
        self._set_timer()

    @contextlib.contextmanager
    def patience(self, doing: str) -> Iterator[None]:
        """Raise the least limit inside the block to `startup_seconds`, for a probe or a compilation."""
        self._note_gap()
        self._patient.append(doing)
        self._set_timer()
        try:
            yield
        finally:
            self._note_gap()
            self._patient.pop()
            self._set_timer()

    def close(self, error: BaseException | None = None) -> None:
        """End the watch. Removes the file of this rank, or leaves there the `error` with which the rank ends."""
        if self in liveness.listeners:
            liveness.listeners.remove(self)
        if self._file < 0:
            return
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if error is None:
            self._path.unlink(missing_ok=True)
        else:
            os.write(self._file, "".join(traceback.format_exception(error)).encode())
        os.close(self._file)
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    @property
    def _stage(self) -> str:
        """Return the outermost patient part, or else the innermost stage; "" outside of all."""
        return self._patient[0] if self._patient else self._stages[-1] if self._stages else ""

    def _note_gap(self) -> None:
        now, stage = self._clock(), self._stage
        if self._is_started:  # the first step may compile, which says nothing of the others
            self._longest[stage] = max(now - self._last, self._longest.get(stage, 0.0))
        self._last = now

    def _set_timer(self) -> None:
        """Set the timer anew if the limit has changed, or if it was set long ago."""
        if self._last - self._armed_at >= _ARM_SECONDS or self._seconds() != self._armed_seconds:
            self._arm()

    def _seconds(self) -> float:
        """Return the limit of the present stage."""
        stage = self._stage
        if self._patient or not self._is_started or stage not in self._longest:
            at_least = max(self._config.startup_seconds, self._waiting_seconds)
        else:
            at_least = self._waiting_seconds if stage in _WAITING else self._config.limit_seconds
        return max(at_least, _TIMES * self._longest.get(stage, 0.0))

    def _arm(self) -> None:
        self._armed_at, self._armed_seconds = self._last, self._seconds()
        if self._file >= 0:
            faulthandler.dump_traceback_later(self._armed_seconds, file=self._file)
            signal.setitimer(signal.ITIMER_REAL, self._armed_seconds + _GRACE_SECONDS)

    def _write_header(self) -> None:
        if self._file >= 0:
            header = (
                f"rank {self._rank} on {platform.node()}, process {os.getpid()}, "
                f"in step {self._step} ({self._doing}), reading {self._shards}"
            )
            os.pwrite(self._file, header.encode()[: _HEADER_BYTES - 1].ljust(_HEADER_BYTES - 1) + b"\n", 0)
