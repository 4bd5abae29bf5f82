"""Submit runs: claim their directories, copy the code, and give them to Slurm or start them on this machine."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, Literal

import submitit
import torch
from submitit.core.utils import FailedJobError

from data_pipeline.core.environment import variable
from data_pipeline.core.errors import UserError
from data_pipeline.core.imports import given_code
from data_pipeline.core.processes import signals_deferred
from launch.job import AFTER_SRUN, BEFORE_SRUN, MAX_TIMEOUTS_HERE, TrainJob
from launch.planned_run import PlannedRun
from launch.ports import free_ports
from launch.preloaded import ForkingExecutor, PreloadedProcess
from launch.resources import Resources
from launch.slurm_checks import check_with_slurm
from launch.slurm_client import has_slurm, outside_any_job, refusal_reason, refused
from launch.snapshot import Snapshot, python_environment, read_snapshot, shell_lines, write_snapshot
from launch.submitted import Submission, queue_for, record, refuse_if_active
from trainer.own_code import files_to_copy
from trainer.preflight import check_data
from trainer.run_dir import LOCK_NAME, RunDir, hold

MAX_TIMEOUTS = 20  # after so many time limits a job is not requeued again
WARNING_SECONDS = 120  # between the warning signal and the time limit

Executor = Literal["slurm", "local"]
_SUBMITTING: Final = "submitting"

# Signals that must not come between a submission and its record: the job would be in the queue, but not in its run
# directory. sbatch inherits this, and so do the processes of a job on this machine. There only Ctrl-C waits, which in
# a terminal reaches all processes and would make the controller of submitit kill its ranks. They unblock it when they
# can save a checkpoint (`launch.job`).
_DEFERRED: Final = {
    "slurm": (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    "local": (signal.SIGINT,),
}


@dataclass(frozen=True)
class SubmissionPlan:
    """The runs that are submitted together, as one job or as one job array.

    home: the directory of the logs and the code: the run directory itself, or the directory of the study.
    at_a_time: the number of runs that train at the same time.
    slot: on this machine, the number of this run among them; each slot has its own GPUs.
    accepted_data: as in `trainer.train`.
    """

    runs: Sequence[PlannedRun]
    home: Path
    resources: Resources
    at_a_time: int
    name: str
    executor: Executor = "slurm"
    slot: int = 0
    accepted_data: tuple[str, ...] = ()

    @property
    def own_files(self) -> dict[str, Path]:
        """Return the files of the runs' own code that their jobs need a copy of."""
        return files_to_copy([planned.config for planned in self.runs])

    @property
    def logs(self) -> Path:
        return self.home / "logs"


def slurm_parameters(plan: SubmissionPlan, *, code: Path) -> dict[str, Any]:
    """Return the parameters of submitit for a plan and the code in `code`."""
    resources = plan.resources
    parameters = {
        "job_name": plan.name,
        "nodes": resources.nodes,
        "ntasks_per_node": resources.tasks_per_node,
        "cpus_per_task": resources.cpus_per_task,
        "gpus_per_node": resources.gpus_per_node or None,
        "time": resources.time_minutes,
        "mem": None if resources.mem_gb is None else f"{resources.mem_gb}GB",
        "partition": resources.partition,
        "account": resources.account,
        "qos": resources.qos,
        "constraint": resources.constraint,
        "array_parallelism": plan.at_a_time,
        "signal_delay_s": WARNING_SECONDS,
        "stderr_to_stdout": True,
        "setup": [
            *BEFORE_SRUN,
            f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{resources.threads_per_task}}}",
            *shell_lines(code),
        ],
        # Since 22.05 Slurm does not pass --cpus-per-task from sbatch to srun. A rank that dies ends the others, which
        # would otherwise wait for it.
        "srun_args": [f"--cpus-per-task={resources.cpus_per_task}", "--kill-on-bad-exit=1"],
        "teardown": list(AFTER_SRUN),
        "additional_parameters": {"requeue": True}
        | {name: value for name, value in resources.sbatch.items() if value is not False},
    }
    return {name: value for name, value in parameters.items() if value is not None}


def sbatch_script(plan: SubmissionPlan, *, code: Path) -> str:
    """Return the batch script that `submit` gives to sbatch. This needs no Slurm."""
    executor = _ScriptWriter(plan.logs, python=_python(code))
    executor.update_parameters(**slurm_parameters(plan, code=code))
    if len(plan.runs) > 1:
        executor.parameters["map_count"] = len(plan.runs)
    return executor._make_submission_file_text(executor._submitit_command_str, "")


def _python(code: Path) -> str:
    """Return the command that starts Python on a rank, with warning signals blocked until the rank can handle them."""
    start = code / "launch" / "block_signals.py"
    return shlex.join([sys.executable, "-I", "-S", str(start), sys.executable])


class _ScriptWriter(submitit.SlurmExecutor):
    """A writer of batch scripts that also works without srun, unlike submitit's own executor."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def submit(
    plan: SubmissionPlan,
    *,
    command: str,
    snapshot: Snapshot | None = None,
    preloaded: PreloadedProcess | None = None,
) -> list[submitit.Job[None]]:
    """Claim the run directories, copy the code, submit the jobs or start them here, and record each job in its run.

    The jobs run the code of `snapshot`, by default the present code. On this machine, jobs of one rank without GPUs are
    forked from `preloaded` if it is given. Raises `UserError` for a run that could never
    start; then nothing is submitted, and no new directory is left.
    """
    snapshot = snapshot or read_snapshot(own_files=plan.own_files)
    code = snapshot.folder(plan.home)
    with _claimed(plan, code=code) as claim, _one_submission(plan, claim):
        write_snapshot(snapshot, into=plan.home)
        train_jobs = [
            TrainJob(
                run_dir=planned.run_dir.path,
                command=command,
                local_port=free_ports(1)[0],
                warning_seconds=WARNING_SECONDS,
                accepted_data=plan.accepted_data,
                code=given_code(),
            )
            for planned in plan.runs
        ]
        with _telling_of_a_job(claim), signals_deferred(_DEFERRED[plan.executor]), _marked(plan):
            if plan.executor == "local":
                jobs = _submit_here(train_jobs, plan, code, preloaded)
            else:
                jobs = _sbatch(train_jobs, plan, code)
                claim.job_id = jobs[0].job_id.partition("_")[0]
            claim.is_kept = True
            _record(jobs, plan)
    return jobs


def _record(jobs: Sequence[submitit.Job[None]], plan: SubmissionPlan) -> None:
    """Record each job in its run directory."""
    for planned, job in zip(plan.runs, jobs, strict=True):
        submission = Submission(
            job_id=job.job_id,
            executor=plan.executor,
            home="." if plan.home == planned.run_dir.path else "..",
            submitted_at=datetime.now(UTC),
            at_a_time=plan.at_a_time,
            resources=plan.resources,
            host=socket.gethostname(),
        )
        record(planned.run_dir, submission)


def dry_run(plan: SubmissionPlan, *, snapshot: Snapshot) -> str:
    """Make every check of `submit`, leave no files, and return the batch script.

    Asks Slurm only if there is one on this machine. Raises the errors of `submit`.
    """
    code = snapshot.folder(plan.home)
    with _claimed(plan, code=code, is_dry_run=True):
        return sbatch_script(plan, code=code)


@dataclass
class _Claim:
    """Run directories that are claimed.

    is_kept: a job may use them, so that they must stay.
    job_id: the job or the array that Slurm has accepted for them.
    """

    is_kept: bool = False
    job_id: str | None = None


@contextlib.contextmanager
def _one_submission(plan: SubmissionPlan, claim: _Claim) -> Iterator[None]:
    """Let no other command submit these runs to Slurm meanwhile. On this machine the lock of a run is enough.

    Raises `UserError` if another command does so, or has done so since the first look at the queue.
    """
    if plan.executor == "local":
        yield
        return
    try:
        lock = hold(RunDir(plan.logs))
    except UserError:
        claim.is_kept = True  # the other command uses the directories
        raise UserError(f"another command submits {plan.home} at the moment; wait until it has ended") from None
    with lock:
        queue = queue_for([planned.run_dir for planned in plan.runs])
        claim.is_kept = True  # if a run has a job now
        for planned in plan.runs:
            refuse_if_active(planned.run_dir, queue)
        if (marker := plan.logs / _SUBMITTING).exists():
            raise UserError(
                f"a command that submitted {plan.home} was killed before it recorded its job; look for the job with "
                f"squeue --me --name {shlex.quote(plan.name)}, end it with scancel if it is there, and remove {marker}"
            )
        claim.is_kept = False
        yield


@contextlib.contextmanager
def _marked(plan: SubmissionPlan) -> Iterator[None]:
    """Keep a file in the logs during the block, between whose sbatch and records the process may be killed."""
    marker = plan.logs / _SUBMITTING
    if plan.executor == "slurm":
        marker.touch()
    try:
        yield
    finally:
        marker.unlink(missing_ok=True)


@contextlib.contextmanager
def _telling_of_a_job(claim: _Claim) -> Iterator[None]:
    """If the block raises although Slurm has accepted the job, print how to end it: nobody has seen its number."""
    try:
        yield
    except BaseException:
        if claim.job_id is not None:
            print(f"job {claim.job_id} was submitted before this; end it: scancel {claim.job_id}", file=sys.stderr)
        raise


@contextlib.contextmanager
def _claimed(plan: SubmissionPlan, *, code: Path, is_dry_run: bool = False) -> Iterator[_Claim]:
    """Make all checks that are possible before a submission, and claim the run directories.

    Unless the block sets `is_kept`, removes the files and directories that it has made, and restores configs. Raises
    `UserError` for a run that could never start.
    """
    refuse_for_logs(plan.home)
    manifests = [check_data(planned.config) for planned in plan.runs]
    if plan.executor == "slurm" and (has_slurm() or not is_dry_run):
        check_with_slurm(plan.resources, home=plan.home, script=sbatch_script(plan, code=code))
    directories = [plan.home, *(planned.run_dir.path for planned in plan.runs)]
    new = [path for path in directories if not path.exists()]
    names = (RunDir(plan.home).config.name, LOCK_NAME)
    new_files = [path / name for path in directories for name in names if path.exists() and not (path / name).exists()]
    new_parents = [parent for path in new for parent in path.parents if not parent.exists()]
    configs: dict[Path, bytes] = {}
    claim = _Claim()
    try:
        # A run on a mixture may go on with other weights; a dry run must not change them.
        configs = {path: path.read_bytes() for run in plan.runs if (path := run.run_dir.config).is_file()}
        for planned, found in zip(plan.runs, manifests, strict=True):
            planned.claim(found, accepted_data=plan.accepted_data)
        yield claim
    except OSError as error:
        if error.errno == errno.ENOSPC:  # `storage_problem` has a sentence for it
            raise
        raise UserError(
            f"{error.filename or plan.home} cannot be written ({error.strerror}); pass another --run-dir or --study-dir"
        ) from None
    finally:
        if not claim.is_kept:
            for path in new:
                shutil.rmtree(path, ignore_errors=True)
            for path in new_files:
                with contextlib.suppress(OSError):
                    path.unlink()
            for path, content in configs.items():
                if path.read_bytes() != content:
                    path.write_bytes(content)
            for path in new_parents:  # the innermost first; a directory that is not empty stays
                with contextlib.suppress(OSError):
                    path.rmdir()


def refuse_for_logs(home: Path) -> None:
    """Raise `UserError` if Slurm or submitit would read another path for the logs, such as the rank for %t."""
    path = str(home)
    if not path.isprintable():
        raise UserError(f"the directory {path!r} cannot stand in a batch script; rename it")
    if "%" in path or "\\" in path:
        raise UserError(
            f"the directory {path} has a % or a backslash in its name, which Slurm replaces in the paths of logs; "
            "rename it, or pass another --run-dir or --study-dir"
        )


def _sbatch(train_jobs: Sequence[TrainJob], plan: SubmissionPlan, code: Path) -> list[submitit.Job[None]]:
    """Submit the jobs to Slurm. Raises `UserError` with the reason of sbatch if it refuses."""
    executor = submitit.SlurmExecutor(plan.logs, max_num_timeout=MAX_TIMEOUTS, python=_python(code))
    executor.update_parameters(**slurm_parameters(plan, code=code))
    stderr = io.StringIO()
    try:
        with outside_any_job(), contextlib.redirect_stderr(stderr):
            return executor.submit_array(train_jobs)
    except FailedJobError:
        raise refused(refusal_reason(stderr.getvalue())) from None


def _submit_here(
    train_jobs: Sequence[TrainJob], plan: SubmissionPlan, code: Path, preloaded: PreloadedProcess | None = None
) -> list[submitit.Job[None]]:
    """Start the ranks as detached processes on this machine."""
    resources = plan.resources
    executor: submitit.LocalExecutor
    can_fork = sys.platform != "darwin"  # see `worker_context`
    if preloaded is not None and can_fork and resources.num_ranks == 1 and not resources.gpus_per_node:
        executor = ForkingExecutor(plan.logs, preloaded=preloaded, max_num_timeout=MAX_TIMEOUTS_HERE)
    else:
        executor = _LocalExecutor(plan.logs, max_num_timeout=MAX_TIMEOUTS_HERE)
    executor.update_parameters(
        tasks_per_node=resources.tasks_per_node,
        gpus_per_node=resources.gpus_per_node or 0,
        visible_gpus=gpus_of(resources, slot=plan.slot),
        timeout_min=resources.time_minutes,
        signal_delay_s=WARNING_SECONDS,
        stderr_to_stdout=True,
    )
    os.environ["OMP_NUM_THREADS"] = variable("OMP_NUM_THREADS") or str(resources.threads_per_task)
    with outside_any_job(python_environment(code, os.environ)):
        return executor.submit_array(train_jobs)


class _LocalExecutor(submitit.LocalExecutor):
    """Submitit's local executor, which takes the names of GPUs too, and not only their numbers."""

    def _internal_update_parameters(self, *, visible_gpus: Sequence[str] = (), **parameters: Any) -> None:
        super()._internal_update_parameters(**parameters)
        self.parameters["visible_gpus"] = visible_gpus


def all_gpus_of(plan: SubmissionPlan) -> list[str]:
    """Return the GPUs of the runs of a plan that train at the same time. Raises the errors of `gpus_of`."""
    used = [gpu for slot in range(plan.at_a_time) for gpu in gpus_of(plan.resources, slot=slot)]
    return list(dict.fromkeys(used))


def gpus_of(resources: Resources, *, slot: int) -> list[str]:
    """Return the GPUs of the run in `slot` on this machine, as CUDA_VISIBLE_DEVICES has them: by numbers or names.

    If that variable is set, the GPUs are among those that it holds. Raises `UserError` if it holds too few or something
    else, or if this machine has too few GPUs: a run without its GPU would fail at once, and so would all runs that
    follow it in its slot.
    """
    num_gpus = resources.gpus_per_node or 0
    first, end = slot * num_gpus, (slot + 1) * num_gpus
    if not num_gpus:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    needed = f"but {end} {'is' if end == 1 else 'are'} needed here (--gpus-per-node for each of --at-a-time runs)"
    words = [str(number) for number in range(end)]
    if visible is not None:
        given = (word.strip() for word in visible.split(","))
        words = [word for word in takewhile(lambda word: word != "-1", given) if word]  # CUDA stops at -1
        for word in words:
            if not re.fullmatch(r"[0-9]+|(GPU|MIG)-\S+", word):
                raise UserError(
                    f"CUDA_VISIBLE_DEVICES={visible} holds {word}, which is no GPU; set it to numbers of GPUs, or to "
                    "names such as GPU-..., both of which `nvidia-smi -L` shows"
                )
        if len(words) < end:
            raise UserError(
                f"CUDA_VISIBLE_DEVICES={visible} names {len(words)} GPU(s), {needed}; ask for fewer, or unset it"
            )
    are_parts = any(word.startswith("MIG-") for word in words[:end])
    if are_parts and num_gpus > 1:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={visible} names parts of a GPU (MIG), and a run can use only one of them, but "
            f"--gpus-per-node is {num_gpus}; ask for 1"
        )
    # With CUDA_VISIBLE_DEVICES=0,0 a user lets two runs share a GPU. torch counts no GPU in such a list.
    are_shared = len(set(words[:end])) < end
    num_seen = 1 if are_parts else end  # of a list of parts, a process sees the first one only
    if not are_shared and (num_there := torch.cuda.device_count()) < num_seen:
        among = "" if visible is None else f" of CUDA_VISIBLE_DEVICES={visible}"
        raise UserError(f"torch sees {num_there} GPU(s){among} on {socket.gethostname()}, {needed}; ask for fewer")
    return words[first:end]
