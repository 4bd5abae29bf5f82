"""The job that submitit pickles. It names a run directory, and holds nothing that could become outdated in the queue.

The job reads that pickle, LOGS/JOB_submitted.pkl, at each start, because submitit gives work to a node in this way. The
submitter has written it just before. Nothing else reads a pickle: a job writes how it ended as JSON (`launch.outcome`).

A job is warned before a preemption and before its time limit. When all ranks have saved and stopped, it asks Slurm once
to start it again. Guarantees: one requeue at most for each warning, and none after an error or after `scancel`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import multiprocessing.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import submitit
from submitit.core.job_environment import JobEnvironment
from submitit.helpers import DelayedSubmission

from data_pipeline.core.garbage import search_modules_rarely

search_modules_rarely()  # before the imports that every rank waits for

from data_pipeline.core.imports import import_code  # noqa: E402
from launch.outcome import last_line, outcome_path, write_outcome  # noqa: E402
from launch.rank import run  # noqa: E402
from trainer.config import read_run_config  # noqa: E402
from trainer.fault_tolerance.preemption import WARNINGS, StoppedError  # noqa: E402
from trainer.run_dir import open_run  # noqa: E402

AGAIN_SECONDS = 1.0  # after this time, a warning that no handler took is sent again
# A warning this much before its time still counts as the warning of the time limit. Slurm checks the limits every 30
# seconds, and on one machine the imports count, which come before a rank starts its clock.
EARLY_SECONDS = 60
TIDY_SECONDS = 20.0  # for the clean-up of libraries at the end of a rank
MAX_TIMEOUTS_HERE = 5  # on one machine; submitit starts a job there six times at most
SCONTROL_SECONDS = 120  # scontrol tries again while the controller does not answer

# Lines of the batch script before srun. Its shell survives warnings that also reach it (scancel --full), as ranks do.
# Without SLURM_EXPORT_ENV, ranks get the variables of this script also if sbatch got --export=NONE, which some clusters
# ask for.
BEFORE_SRUN: Final = ("trap : TERM USR1 USR2", "unset SLURM_EXPORT_ENV")
# Lines of the batch script after srun, on the first node of the job. If a node dies, srun ends with an error before
# Slurm notices, because the other ranks lose the connection or their watchdogs end them. The job is requeued only if
# this node answers and another does not. If this node dies, Slurm requeues the job by itself.
AFTER_SRUN: Final = (
    "status=$?",
    # The last member of an array has the array's own number as its SLURM_JOB_ID, which stands for all members.
    "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}; job=${job:-$SLURM_JOB_ID}",
    "running() { [[ $(scontrol show job $job) == *JobState=RUNNING* ]]; }",
    'answer() { timeout 60 srun --overlap --cpus-per-task=1 --nodes=$1 --ntasks=$1 "${@:2}" true; }',
    "if ((status && SLURM_RESTART_COUNT < 100)) && running && answer 1 --nodelist=$SLURMD_NODENAME"
    " && ! answer $SLURM_JOB_NUM_NODES --ntasks-per-node=1 && running; then",
    '    echo "a node of this job does not answer: asking Slurm to start it again, from the newest checkpoint"',
    "    scontrol requeue $job",
    "fi",
    "exit $status",
)


@dataclass(frozen=True)
class TrainJob:
    """A job that trains the run in `run_dir` as one rank.

    Under Slurm the ranks find each other by the variables of Slurm, and on one machine (the local executor of submitit)
    at `local_port`. The job is warned `warning_seconds` before its time limit. It imports the modules in `code` first,
    as `--code` does.
    """

    run_dir: Path
    command: str
    local_port: int
    warning_seconds: int = 120
    accepted_data: tuple[str, ...] = ()
    code: tuple[str, ...] = ()

    def __call__(self) -> None:
        """Train in every task of submitit. A run that was interrupted goes on from its LATEST checkpoint.

        If one rank was warned and all have stopped, this ends the process: with status 0 if Slurm starts the job again,
        else with status 1 on rank 0. Every other error is raised, and the job is not requeued.
        """
        start = time.monotonic()
        job = submitit.JobEnvironment()
        outcome = _outcome_of(job)
        outcome.unlink(missing_ok=True)  # from an earlier start
        try:
            self._train(job, start=start)
        except Exception as error:
            write_outcome(outcome, "failed", last_line(error))
            raise
        write_outcome(outcome, "finished")

    def _train(self, job: JobEnvironment, *, start: float) -> None:
        import_code(self.code)
        config = read_run_config(open_run(self.run_dir))
        for number in WARNINGS:
            signal.signal(number, _send_again)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)  # blocked by launch/block_signals.py
        if job.cluster == "local":
            # CUDA_VISIBLE_DEVICES stays: every rank sees all GPUs and takes cuda:local_rank, as under torchrun.
            os.environ.update(
                RANK=str(job.global_rank),
                WORLD_SIZE=str(job.num_tasks),
                LOCAL_RANK=str(job.local_rank),
                LOCAL_WORLD_SIZE=str(job.num_tasks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(self.local_port),
                # It was free when the job was submitted; if it no longer is, ranks with this token meet at another.
                FEATURE_DROPOUT_RENDEZVOUS=f"local/{job.job_id}/{self.local_port}",
            )
        ending = Ending()
        try:
            run(config, self.run_dir, command=self.command, accepted_data=self.accepted_data)
            ending.status = 0
        except StoppedError as stopped:
            ending.status = self._status_after(stopped, job, seconds=time.monotonic() - start)
            ending.leave()  # at once: `stopped` holds the frames of training, and so the process group

    def _status_after(self, stopped: StoppedError, job: JobEnvironment, *, seconds: float) -> int:
        """Ask for another start of this job, which has run for `seconds`. Return the exit status of this rank."""
        if not stopped.is_first_rank:
            return 0  # an error here would end the first rank before it has asked for all
        if "wandb" in sys.modules:  # else it has no process
            with contextlib.suppress(Exception):  # the warning may have ended its process
                sys.modules["wandb"].teardown()  # ends its process, which Slurm would kill
        try:
            refusal = self._start_again(job, seconds=seconds, stopped=str(stopped).partition(";")[0])
        except SystemExit as end:  # the local executor of submitit starts again by exit status
            return int(end.code or 0)
        if refusal:
            message = f"{stopped}; {refusal}"
            print(message, file=sys.stderr)
            write_outcome(_outcome_of(job), "stopped", message)
            return 1
        return 0

    def checkpoint(self) -> DelayedSubmission:
        """Return this job, for submitit to start again if a warning comes before `__call__`. It asks rank 0 only."""
        return DelayedSubmission(self)

    def _start_again(self, job: JobEnvironment, *, seconds: float, stopped: str) -> str:
        """Ask for another start of this job, which has run for `seconds`. Return the reason if there is none.

        Prints `stopped` before it asks, because Slurm ends this process at once.
        """
        goes_on = f"{stopped}; it goes on from there when the job starts again"
        if job.cluster == "local":
            limit = int(os.environ["SUBMITIT_LOCAL_TIMEOUT_S"]) - int(os.environ["SUBMITIT_LOCAL_SIGNAL_DELAY_S"])
            if seconds < limit - EARLY_SECONDS:
                return "on one machine only the time limit starts it again by itself"
            return self._count_and_requeue(job, timed_out=True, saying="the time limit is reached; started again")
        try:
            shown = _show_job(job.job_id)
            if "JobState=RUNNING" not in shown.split():  # it was cancelled, or is requeued already
                print(f"{stopped}; Slurm ends this job already, and the next start goes on from there", flush=True)
                return ""
            left = seconds_left(shown)
            timed_out = left is not None and left <= self.warning_seconds + EARLY_SECONDS
            return self._count_and_requeue(job, timed_out=timed_out, saying=goes_on)
        except (OSError, subprocess.SubprocessError) as error:
            return f"Slurm could not be asked to do so now ({error})"

    def _count_and_requeue(self, job: JobEnvironment, *, timed_out: bool, saying: str) -> str:
        """Requeue the job. Counts time limits, but no preemptions, in the pickle that the next start reads."""
        pickled = job.paths.submitted_pickle
        delayed = DelayedSubmission.load(pickled)
        remaining = delayed._timeout_countdown - timed_out
        if remaining < 0:
            return "this job has reached its time limit as often as it may, so it is not started again by itself"
        if timed_out:
            delayed.set_timeout(delayed._timeout_min, remaining)
            partial = pickled.with_suffix(".partial")
            delayed.dump(partial)
            partial.replace(pickled)
        print(f"{saying} ({remaining} time limits more at most)" if timed_out else saying, flush=True)
        job._requeue(remaining)
        return ""


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
    """Remove the temporary files of this process, such as copies of remote shards.

    They are registered with multiprocessing and weakref for the end of the process, which `os._exit` would skip.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a DataLoader's handler raises when a worker dies
    for worker in multiprocessing.active_children():  # of a DataLoader in the traceback of an error
        worker.kill()  # the end would wait without limit for one that hangs
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]


def seconds_left(shown: str) -> int | None:
    """Return the seconds that are left of the time limit, from `scontrol show job`; None without a limit.

    EndTime is no help, because a preemption moves it forward.

    Examples:
        >>> seconds_left("RunTime=03:58:30 TimeLimit=04:00:00")
        90
        >>> seconds_left("RunTime=1-00:00:01 TimeLimit=2-00:00:00")
        86399
        >>> seconds_left("RunTime=00:00:01 TimeLimit=UNLIMITED") is None
        True
    """
    seconds = []
    for name in ("RunTime", "TimeLimit"):
        match = re.search(rf"\b{name}=(\S+)", shown)
        value = parse_seconds(match[1]) if match is not None else None
        if value is None:
            return None
        seconds.append(value)
    run_time, limit = seconds
    return limit - run_time


def parse_seconds(text: str) -> int | None:
    """Parse the "days-hours:minutes:seconds" of Slurm. Return None for UNLIMITED and the like.

    Examples:
        >>> parse_seconds("1-00:02:03"), parse_seconds("00:02:03"), parse_seconds("UNLIMITED")
        (86523, 123, None)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def _show_job(job_id: str) -> str:
    command = ["scontrol", "show", "job", job_id]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=SCONTROL_SECONDS)
    return done.stdout.decode(errors="replace")


def _send_again(number: int, _: FrameType | None) -> None:
    """Send a warning again that came too early, until the training handles it after its first step."""
    timer = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def _outcome_of(job: JobEnvironment) -> Path:
    return outcome_path(job.paths.folder, job_id=job.job_id, rank=job.global_rank)
