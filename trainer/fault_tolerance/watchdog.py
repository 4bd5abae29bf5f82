"""Report a rank that freezes or dies, with its host, step, shards and stacks; then end all ranks.

The training loop calls `beat` when it begins to read a batch and when it begins to train on it. Inside a step, every
stage and every block of a network gives a sign of life (`trainer.fault_tolerance.liveness`). A small process beside
each rank, its sidecar, reads the signs (`trainer.fault_tolerance.sidecar`). If they stop and the rank does no work, or
if the rank is killed, all sidecars report and kill their ranks. The launcher then ends the job.

Invariant: a run that gives signs of life is never ended, and a frozen run never waits forever. The limits are in
`trainer.fault_tolerance.sidecar.SilenceTimer`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import mmap
import os
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from data_pipeline.core.processes import signals_blocked
from data_pipeline.core.schema import Schema, Seconds
from trainer.distributed.collectives import broadcast_object, rank, world_size
from trainer.fault_tolerance import liveness, pulse, sidecar
from trainer.run_dir import RunDir

logger = logging.getLogger(__name__)

_NUM_SHARDS_NAMED = 8
_CLOSE_SECONDS = 2.0
_START_SIDECAR = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from trainer.fault_tolerance.sidecar import main; main()"
)


class WatchdogConfig(Schema):
    """The limits on the time without a sign of life of a rank. Above a limit, all ranks are reported and ended.

    Attributes:
        enabled: set it to false while debugging.
        limit_seconds: the limit while the rank neither works nor waits for another rank, so it is frozen.
        waiting_seconds: the limit while it waits for other ranks or for its GPU. Keep it below 300 s, after which a
            collective fails by itself.
        working_seconds: the limit while it uses the processor: one large operation, or an endless loop.
        startup_seconds: the least value of all limits until the first step is done, and in a step that may compile the
            networks again.
    """

    enabled: bool = True
    limit_seconds: Seconds = 40
    waiting_seconds: Seconds = 200
    working_seconds: Seconds = 600
    startup_seconds: Seconds = 600


def start_watchdog(run_dir: RunDir, config: WatchdogConfig) -> Watchdog:
    """Start the watchdog of this rank. Every rank must call this at the same time, after the process group is made."""
    start = broadcast_object(f"{time.strftime('%Y%m%d_%H%M%S')}_{secrets.token_hex(2)}")
    return Watchdog(run_dir, config, rank=rank(), world_size=world_size(), start=start)


class Watchdog:
    """A watch over this process until it is closed; a context manager. Does nothing on systems other than Linux.

    `start` names this start of the run: equal on all ranks, and never used before. The reports of each start lie in
    RUN_DIR/stalled/START. RUN_DIR/stalled.txt is the last report.
    """

    def __init__(self, run_dir: RunDir, config: WatchdogConfig, *, rank: int, world_size: int, start: str) -> None:
        self._memory: mmap.mmap | None = None
        self._beats = self._step = 0
        self._first_step: int | None = None
        self._patience = self._allowed = 0.0
        self._startup_patience = config.startup_seconds  # 0 once the first step is done
        self._signs = 0
        self._waits, self._stage_bytes, self.stage = False, b"", ""
        self._step_began, self._doing = time.monotonic(), ""
        liveness.listen(self)
        if not config.enabled:
            return
        if sys.platform != "linux":
            if rank == 0:
                logger.info("no watchdog on %s: a rank that freezes will not be reported", sys.platform)
            return
        # Anonymous memory is freed when the last process that holds it ends, and needs no file system, which may hang.
        memory, self._stacks = os.memfd_create("watchdog"), os.memfd_create("stacks")
        os.ftruncate(memory, pulse.MEMORY_BYTES)
        self._memory = mmap.mmap(memory, pulse.MEMORY_BYTES)
        self._write("start-up")
        faulthandler.register(sidecar.DUMP_SIGNAL, file=self._stacks, all_threads=True)
        # Dump stacks on SIGTERM and SIGHUP, so that a requested stop can be told from a crash.
        self._asked = [number for number in sidecar.ENDING if signal.getsignal(number) == signal.SIG_DFL]
        for number in self._asked:
            faulthandler.register(number, file=self._stacks, all_threads=True, chain=True)
        control, self._control = os.pipe()
        path = run_dir.path.absolute()
        task = {
            "pid": os.getpid(),
            "rank": rank,
            "world_size": world_size,
            "directory": str(path / "stalled" / start),
            "merged": str(path / "stalled.txt"),
            "memory": memory,
            "stacks": self._stacks,
            "control": control,
            "limit_seconds": config.limit_seconds,
            "waiting_seconds": config.waiting_seconds,
            "working_seconds": config.working_seconds,
        }
        # A signal to the whole job then waits until the sidecar has its handlers. Otherwise Ctrl-C right after the
        # start would end the sidecar, and the rank would have no watchdog.
        with signals_blocked(sidecar.ANSWERED):
            self._sidecar = subprocess.Popen(
                # -I and -S leave out the environment and site-packages, so that it starts fast and stays small.
                [sys.executable, "-I", "-S", "-c", _START_SIDECAR, str(Path(__file__).parents[2]), json.dumps(task)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(memory, self._stacks, control),
            )
        os.close(memory)
        os.close(control)

    @property
    def pid(self) -> int | None:
        """Return the process id of the sidecar; None if there is none."""
        return None if self._memory is None else self._sidecar.pid

    def beat(
        self, step: int, *, doing: str, shards: Sequence[str] | None = None, may_take_seconds: float = 0.0
    ) -> None:
        """Note that this rank begins a part of a step, such as "reading". Takes a few microseconds.

        All ranks make the same calls, so the number of calls shows which rank is behind.

        Args:
            shards: the shards that it reads from now on; None if they stay the same.
            may_take_seconds: the time without a sign of life that is allowed until the next beat, as in `patience`.
        """
        if self._startup_patience:
            if self._first_step is None:
                self._first_step = step
            elif step != self._first_step:
                self._startup_patience = 0.0
        if step != self._step:
            self._step_began = time.monotonic()
        self._step, self._allowed = step, may_take_seconds
        self._write(doing, shards)

    def sign(self) -> None:
        """Note that the step goes on; see `trainer.fault_tolerance.liveness`. Takes less than a microsecond."""
        self._signs += 1
        if self._memory is not None:
            pulse.write_sign(self._memory, self._signs, self._waits, self._stage_bytes)

    def enter(self, stage: str, *, waits: bool) -> bool:
        """Note that a stage begins; see `trainer.fault_tolerance.liveness`."""
        before, self._waits = self._waits, waits
        self.stage, self._stage_bytes = stage, stage.encode()
        self.sign()
        return before

    def describe_step(self) -> str:
        """Return the present step, its stage and its duration: "first step: forward, 120 s"."""
        which = "first step" if self._startup_patience else f"step {self._step + 1}"
        return f"{which}: {self.stage or self._doing}, {time.monotonic() - self._step_began:.0f} s"

    @contextlib.contextmanager
    def patience(self, seconds: float, doing: str) -> Iterator[None]:
        """Allow `seconds` without a sign of life inside the block, for a checkpoint, a probe or a compilation."""
        before, self._patience = self._patience, max(self._patience, seconds)
        self._write(doing)
        try:
            yield
        finally:
            self._patience = before
            self._write(f"after {doing}")

    def close(self, *, ending: str = "") -> None:
        """End the watch. `ending` is the exception with which this rank leaves, if any; the reports show it."""
        liveness.stop_listening(self)
        if self._memory is None:
            return
        pulse.write_text(self._memory, ending=ending)
        pulse.write_numbers(self._memory, beats=self._beats, step=self._step, patience=0.0, closed=True)
        with contextlib.suppress(BrokenPipeError):  # the sidecar was killed
            os.write(self._control, b"closed")
        os.close(self._control)
        self._memory.close()
        self._memory = None
        if ending:
            return  # the sidecar may request the stacks until this process has ended
        try:
            self._sidecar.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._sidecar.kill()
            self._sidecar.wait()
        faulthandler.unregister(sidecar.DUMP_SIGNAL)
        for number in self._asked:
            if signal.getsignal(number) == signal.SIG_DFL:  # do not remove a handler that was set since
                faulthandler.unregister(number)
        os.close(self._stacks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(ending="" if error is None else "".join(traceback.format_exception(error))[-1000:])

    def _write(self, doing: str, shards: Sequence[str] | None = None) -> None:
        self._doing = doing
        if self._memory is None:
            return
        self._beats += 1
        pulse.write_text(self._memory, doing=doing)
        if shards is not None:
            more = len(shards) - _NUM_SHARDS_NAMED
            named = ", ".join(shards[:_NUM_SHARDS_NAMED]) + (f" and {more} more" if more > 0 else "")
            pulse.write_text(self._memory, shards=named)
        patience = max(self._patience, self._allowed, self._startup_patience)
        pulse.write_numbers(self._memory, beats=self._beats, step=self._step, patience=patience)
