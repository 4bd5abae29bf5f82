"""Submit runs to Slurm, or start one run on this machine as several ranks."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources as package_files
from pathlib import Path
from typing import Any, Literal

import submitit
import torch
from submitit.core.utils import FailedJobError, JobPaths

from data_pipeline.core.environment import variable
from data_pipeline.core.errors import UserError
from data_pipeline.core.imports import given_code
from data_pipeline.core.processes import signals_deferred
from launch.job import TrainJob
from launch.planned_run import PlannedRun
from launch.ports import free_ports
from launch.resources import Resources
from launch.slurm_client import check_script, outside_any_job, refused
from launch.snapshot import Snapshot, python_environment, read_snapshot, shell_lines, write_snapshot
from launch.submitted import Submission, record
from trainer.own_code import files_to_copy
from trainer.preflight import check_data
from trainer.run_dir import RunDir

WARNING_SECONDS = 120  # between the warning signal and the time limit
_NO_TIME_LIMIT_MINUTES = 60 * 24 * 365  # submitit's local executor needs a limit

Executor = Literal["slurm", "local"]


@dataclass(frozen=True)
class SubmissionPlan:
    """The runs that are submitted together, as one job or as one job array.

    home: the directory of the logs and the code: the run directory itself, or the directory of the study.
    at_a_time: the number of runs that train at the same time.
    accepted_data: as in `trainer.train`.
    """

    runs: Sequence[PlannedRun]
    home: Path
    resources: Resources
    at_a_time: int
    name: str
    executor: Executor = "slurm"
    accepted_data: tuple[str, ...] = ()

    @property
    def own_files(self) -> dict[str, Path]:
        """Return the files of the runs' own code that their jobs need a copy of."""
        return files_to_copy([planned.config for planned in self.runs])

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    def claim(self) -> None:
        """Write the config of each run into its directory. Raises `UserError` if a run could never start there."""
        for planned, manifests in zip(self.runs, [check_data(planned.config) for planned in self.runs], strict=True):
            planned.claim(manifests, accepted_data=self.accepted_data)
            planned.run_dir.ended.unlink(missing_ok=True)


def slurm_executor(plan: SubmissionPlan, *, code: Path, executor: type[submitit.SlurmExecutor]) -> Any:
    """Return submitit's executor, whose batch script ends with launch/job.sh, which starts the ranks."""
    resources = plan.resources
    output = str(JobPaths(plan.logs).stdout).replace("%j", "%A_%a" if len(plan.runs) > 1 else "%j")
    # Since 22.05 Slurm does not pass --cpus-per-task from sbatch to srun. A rank that dies ends the others, which would
    # otherwise wait for it.
    ranks = ["srun", "--unbuffered", f"--output={output}", f"--cpus-per-task={resources.cpus_per_task}"]
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
        "use_srun": False,
        "setup": [
            f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{resources.threads_per_task}}}",
            *shell_lines(code),
            f"run_dirs=({shlex.join(str(planned.run_dir.path) for planned in plan.runs)})",
            f"ranks=({shlex.join([*ranks, '--kill-on-bad-exit=1'])})",
            package_files.files("launch").joinpath("job.sh").read_text(encoding="utf-8"),
        ],
        "additional_parameters": {"requeue": True}
        | {name: value for name, value in resources.sbatch.items() if value is not False},
    }
    python = shlex.join([sys.executable, "-I", "-S", str(code / "launch" / "block_signals.py"), sys.executable])
    made = executor(plan.logs, python=f"train {python}")
    made.update_parameters(**{name: value for name, value in parameters.items() if value is not None})
    return made


def sbatch_script(plan: SubmissionPlan, *, code: Path) -> str:
    """Return the batch script that `submit` gives to sbatch. This needs no Slurm."""
    executor = slurm_executor(plan, code=code, executor=_ScriptWriter)
    if len(plan.runs) > 1:
        executor.parameters["map_count"] = len(plan.runs)
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


class _ScriptWriter(submitit.SlurmExecutor):
    """A writer of batch scripts that also works without srun, unlike submitit's own executor."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def check(plan: SubmissionPlan, *, snapshot: Snapshot, asks_slurm: bool) -> str:
    """Make the checks of a submission that write nothing, and return the batch script.

    Raises `UserError` for a job that could never run.
    """
    refuse_for_logs(plan.home)
    for planned in plan.runs:
        check_data(planned.config)
        planned.refuse_other_config()
    script = sbatch_script(plan, code=snapshot.folder(plan.home))
    if asks_slurm:
        check_script(script)
    return script


def submit(plan: SubmissionPlan, *, command: str) -> list[str]:
    """Claim the run directories, copy the code, submit the jobs to Slurm, and return their ids, one for each run.

    The jobs run the present code. Raises `UserError` for a run that could never start; then nothing is submitted, and
    no new directory is left.
    """
    snapshot = read_snapshot(own_files=plan.own_files)
    check(plan, snapshot=snapshot, asks_slurm=True)
    with _removed_on_error([plan.home, *(planned.run_dir.path for planned in plan.runs)]):
        plan.claim()
        code = write_snapshot(snapshot, into=plan.home)
        executor = slurm_executor(plan, code=code, executor=submitit.SlurmExecutor)
        jobs = [_job(planned.run_dir, plan, command=command) for planned in plan.runs]
        stderr = io.StringIO()
        try:
            with outside_any_job(), contextlib.redirect_stderr(stderr):
                job_ids = [job.job_id for job in executor.submit_array(jobs)]
        except FailedJobError:
            raise refused(stderr.getvalue()) from None
    for planned, job_id in zip(plan.runs, job_ids, strict=True):
        log = JobPaths(plan.logs, job_id=job_id, task_id=0).stdout
        record(planned.run_dir, Submission(job_id=job_id, submitted_at=datetime.now(UTC), log=log))
    return job_ids


def _job(run_dir: RunDir, plan: SubmissionPlan, *, command: str) -> TrainJob:
    return TrainJob(
        run_dir.path, command, local_port=free_ports(1)[0], accepted_data=plan.accepted_data, code=given_code()
    )


@contextlib.contextmanager
def _removed_on_error(paths: Sequence[Path]) -> Iterator[None]:
    """Remove those of the directories that were not there before, if the block raises."""
    new = [path for path in paths if not path.exists()]
    try:
        yield
    except BaseException:
        for path in new:
            shutil.rmtree(path, ignore_errors=True)
        raise


def refuse_for_logs(home: Path) -> None:
    """Raise `UserError` if Slurm or submitit would read another path for the logs, such as the rank for %t."""
    if not str(home).isprintable() or "%" in str(home) or "\\" in str(home):
        raise UserError(
            f"the directory {str(home)!r} has a %, a backslash or an unprintable character in its name, which cannot "
            "stand in a batch script; rename it, or pass another --run-dir or --study-dir"
        )


def start_here(plan: SubmissionPlan, *, command: str) -> submitit.Job[None]:
    """Start the ranks of one run as processes on this machine, which go on without this one."""
    (planned,) = plan.runs
    resources = plan.resources
    plan.claim()
    code = write_snapshot(read_snapshot(own_files=plan.own_files), into=plan.home)
    executor = _LocalExecutor(plan.logs)
    executor.update_parameters(
        tasks_per_node=resources.tasks_per_node,
        gpus_per_node=resources.gpus_per_node or 0,
        visible_gpus=gpus_here(resources, at_a_time=1)[0],
        timeout_min=_NO_TIME_LIMIT_MINUTES,
        stderr_to_stdout=True,
    )
    os.environ["OMP_NUM_THREADS"] = variable("OMP_NUM_THREADS") or str(resources.threads_per_task)
    # Ctrl-C in a terminal reaches all processes, and would make the controller of submitit kill its ranks. They inherit
    # that it is blocked, and unblock it when they can save a checkpoint.
    with signals_deferred([signal.SIGINT]), outside_any_job(python_environment(code, os.environ)):
        return executor.submit(_job(planned.run_dir, plan, command=command))


class _LocalExecutor(submitit.LocalExecutor):
    """Submitit's local executor, which takes the names of GPUs too, and not only their numbers."""

    def _internal_update_parameters(self, *, visible_gpus: Sequence[str] = (), **parameters: Any) -> None:
        super()._internal_update_parameters(**parameters)
        self.parameters["visible_gpus"] = visible_gpus


def gpus_here(resources: Resources, *, at_a_time: int) -> list[list[str]]:
    """Return the GPUs of each of the runs that train at the same time, as CUDA_VISIBLE_DEVICES has them.

    They are among those of that variable if it is set; a GPU that it names twice is shared. Raises `UserError` if
    there are too few.
    """
    each = resources.gpus_per_node or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        there = [str(number) for number in range(torch.cuda.device_count() if each else 0)]
    else:
        there = [word.strip() for word in visible.split(",") if word.strip() not in {"", "-1"}]
    if len(there) < each * at_a_time:
        raise UserError(
            f"this machine shows {len(there)} GPU(s) (CUDA_VISIBLE_DEVICES={visible}), but {each * at_a_time} are "
            "needed (--gpus-per-node for each of --at-a-time runs); ask for fewer"
        )
    return [there[slot * each : (slot + 1) * each] for slot in range(at_a_time)]
