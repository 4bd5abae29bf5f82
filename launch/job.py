"""The job that submitit pickles. It names a run directory, and holds nothing that could become outdated in the queue.

A job is warned before a preemption and before its time limit. All ranks save and stop after the same step, and end
without an error. `launch/job.sh`, which started them, then asks Slurm to start the job again.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from data_pipeline.core.imports import import_code, without_garbage_collection

AGAIN_SECONDS = 1.0  # after this time, a warning that no handler took is sent again
TIDY_SECONDS = 20.0  # for the clean-up of libraries at the end of a rank


@dataclass(frozen=True)
class TrainJob:
    """A job that trains the run in `run_dir` as one rank.

    The ranks find each other by the variables of Slurm. It imports the modules in `code` first, as `--code` does.
    """

    run_dir: Path
    command: str
    accepted_data: tuple[str, ...] = ()
    code: tuple[str, ...] = ()

    def __call__(self) -> None:
        """Train in every task of submitit. A run that was interrupted goes on from its LATEST checkpoint.

        If one rank was warned and all have stopped, this ends the process with status 0. Raises every other error.
        """
        with without_garbage_collection():
            import_code(self.code)
            from launch.rank import run
            from trainer.config import read_run_config
            from trainer.fault_tolerance.preemption import WARNINGS, StoppedError
            from trainer.run_dir import open_run

        config = read_run_config(open_run(self.run_dir))
        for number in WARNINGS:
            signal.signal(number, _send_again)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)  # blocked by launch/block_signals.py
        ending = Ending()
        try:
            run(config, self.run_dir, command=self.command, accepted_data=self.accepted_data)
        except StoppedError as stopped:
            if stopped.is_first_rank:
                print(stopped, flush=True)
            ending.status = 0
            ending.leave()  # at once: `stopped` holds the frames of training, and so the process group
        ending.status = 0


class Ending:
    """An end of the process with `status`, by default 1, after the clean-up but without destroying the process group.

    Destroying it waits for threads of gloo, which may wait for the interpreter. Seen with PyTorch 2.11: a rank that
    never ends, and a job that holds its nodes until its time limit.
    """

    def __init__(self) -> None:
        self.status = 1
        atexit.register(self.leave)  # functions that are registered later run earlier

    def leave(self) -> None:
        """End the process within `TIDY_SECONDS`. If that takes longer, dump the stacks and end with status 1."""
        try:
            # This thread needs no interpreter, because the interpreter itself may be stuck.
            faulthandler.dump_traceback_later(TIDY_SECONDS, exit=True)
            _tidy()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(self.status)


def _tidy() -> None:
    """End the processes of this one, and remove its temporary files, such as copies of remote shards.

    They are registered with multiprocessing and weakref for the end of the process, which `os._exit` would skip.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a DataLoader's handler raises when a worker dies
    if "wandb" in sys.modules:  # else it has no process
        with contextlib.suppress(Exception):  # the warning may have ended its process
            sys.modules["wandb"].teardown()
    for worker in multiprocessing.active_children():  # of a DataLoader in the traceback of an error
        worker.kill()  # the end would wait without limit for one that hangs
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]


def _send_again(number: int, _: FrameType | None) -> None:
    """Send a warning again that came too early, until the training handles it after its first step."""
    timer = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()
