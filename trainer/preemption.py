"""A signal to any one rank stops all ranks after the same step, with a checkpoint of it.

Slurm warns one process, or all of them, before it takes a job's nodes away; whoever is warned has to tell the others.
The ranks ask each other in every step, and read the answer one step later, when it has long been there.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Final, Self

from trainer.distributed.collectives import AnyRank, rank

# SIGTERM is what batch systems, torchrun and `kill` send; SIGUSR2 is submitit's, SIGUSR1 what many a cluster sends.
WARNINGS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StoppedError(Exception):
    """Training was asked to stop and has: `step` steps are done and saved; `is_first_rank` speaks for all."""

    def __init__(self, step: int, signal_name: str) -> None:
        super().__init__(f"stopped after step {step}, as {signal_name} asked; start it again and it goes on from there")
        self.step = step
        self.is_first_rank = rank() == 0


class StopRequests:
    """While open, as a context manager, warnings to this process are noted instead of ending it.

    It opens in the main thread, before anything else takes these signals; what took them before gets them back.
    """

    def __init__(self) -> None:
        self._warned_by: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._any_rank: AnyRank | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in WARNINGS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def signal_name(self) -> str:
        """What warned this rank, or that it was another one."""
        return "a signal to another rank" if self._warned_by is None else self._warned_by.name

    def agreed(self) -> bool:
        """Whether all ranks stop now: some rank had been warned when they last asked. Every rank asks after each step;
        the first call of all, and only that, may wait for the others."""
        if self._any_rank is None:
            self._any_rank = AnyRank()
        return self._any_rank.next(self._warned_by is not None)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._warned_by = signal.Signals(number)
