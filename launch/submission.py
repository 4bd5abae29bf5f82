"""Submit runs to Slurm."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources as package_files
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError, JobPaths

from data_pipeline.core.errors import UserError
from data_pipeline.core.imports import given_code
from launch.job import TrainJob
from launch.planned_run import PlannedRun
from launch.resources import Resources
from launch.slurm_client import check_script, options_in, outside_any_job, refused
from launch.snapshot import Snapshot, read_snapshot, shell_lines, write_snapshot
from launch.submitted import Submission, record
from trainer.claim import claim
from trainer.own_code import files_to_copy
from trainer.preflight import check_data
from trainer.pretrained import pinned
from trainer.run_dir import RunDir


@dataclass(frozen=True)
class SubmissionPlan:
    """The runs that are started together: as one job, as one job array, or on this machine.

    home: the directory of the logs and the code: the run directory itself, or the directory of the study.
    at_a_time: the number of runs that train at the same time.
    accepted_data: as in `trainer.train`.
    """

    runs: Sequence[PlannedRun]
    home: Path
    resources: Resources
    at_a_time: int
    name: str
    accepted_data: tuple[str, ...] = ()

    @property
    def own_files(self) -> dict[str, Path]:
        """Return the files of the runs' own code that their jobs need a copy of."""
        return files_to_copy([planned.config for planned in self.runs])

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    def job(self, run_dir: RunDir, command: str) -> TrainJob:
        """Return what each rank of a run calls."""
        return TrainJob(run_dir.path, command, accepted_data=self.accepted_data, code=given_code())

    def claim(self) -> None:
        """Write the config of each run into its directory. Raises `UserError` if a run could never start there."""
        for planned, manifests in zip(self.runs, [check_data(planned.config) for planned in self.runs], strict=True):
            config = pinned(planned.config, planned.run_dir)
            claim(planned.run_dir, config, manifests, accepted_data=self.accepted_data).close()


def slurm_executor(plan: SubmissionPlan, *, code: Path) -> Any:
    """Return submitit's executor, whose batch script ends with launch/job.sh, which starts the ranks."""
    resources, wanted = plan.resources, plan.resources.wanted
    output = str(JobPaths(plan.logs).stdout).replace("%j", "%A_%a" if len(plan.runs) > 1 else "%j")
    # Since 22.05 Slurm does not pass --cpus-per-task from sbatch to srun. A rank that dies ends the others, which would
    # otherwise wait for it.
    ranks = ["srun", "--unbuffered", f"--output={output}", f"--cpus-per-task={resources.cpus_per_task}", *wanted.srun]
    fields = {name: value for name, value in wanted.sbatch.items() if value is not False}
    parameters = {
        "job_name": plan.name,
        "nodes": resources.nodes,
        "ntasks_per_node": resources.tasks_per_node,
        "cpus_per_task": resources.cpus_per_task,
        "gpus_per_node": wanted.gpus_per_node or None,
        "time": wanted.time_minutes,
        "mem": None if wanted.mem_gb is None else f"{wanted.mem_gb}GB",
        "partition": wanted.partition,
        "account": wanted.account,
        "qos": wanted.qos,
        "constraint": wanted.constraint,
        "array_parallelism": plan.at_a_time,
        "signal_delay_s": wanted.warning_seconds,
        "stderr_to_stdout": True,
        "use_srun": False,
        "setup": [
            *wanted.setup,
            f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{resources.threads_per_task}}}",
            # Kernels that a rank compiles lie on its node: many ranks would write to a home on NFS at once.
            "export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton_${SLURM_JOB_USER}_$SLURM_JOB_ID}",
            *shell_lines(code),
            f"run_dirs=({shlex.join(str(planned.run_dir.path) for planned in plan.runs)})",
            f"ranks=({shlex.join([*ranks, '--kill-on-bad-exit=1'])})",
            package_files.files("launch").joinpath("job.sh").read_text(encoding="utf-8"),
        ],
        "additional_parameters": {"requeue": True, **fields},
    }
    python = [sys.executable] if wanted.python is None else shlex.split(wanted.python)
    program = shlex.join([*python, "-I", "-S", str(code / "launch" / "block_signals.py"), python[-1]])
    executor = _SlurmExecutor(plan.logs, python=f"train {program}")  # `train` is a function of launch/job.sh
    executor.update_parameters(**{name: value for name, value in parameters.items() if value is not None})
    return executor


class _SlurmExecutor(submitit.SlurmExecutor):
    """An executor that also writes batch scripts on a machine without srun, and lets their options count most."""

    @classmethod
    def affinity(cls) -> int:
        return 1

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", *options_in(submission_file_path.read_text()), str(submission_file_path)]


def sbatch_script(plan: SubmissionPlan, *, code: Path) -> str:
    """Return the batch script that `submit` gives to sbatch. This needs no Slurm."""
    executor = slurm_executor(plan, code=code)
    if len(plan.runs) > 1:
        executor.parameters["map_count"] = len(plan.runs)
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


def check(plan: SubmissionPlan, *, snapshot: Snapshot, asks_slurm: bool) -> str:
    """Make the checks of a submission that write nothing, and return the batch script.

    Raises `UserError` for a job that could never run.
    """
    for planned in plan.runs:
        check_data(planned.config)
    script = sbatch_script(plan, code=snapshot.folder(plan.home))
    if asks_slurm:
        check_script(script)
    return script


def submit(plan: SubmissionPlan, *, command: str) -> list[str]:
    """Claim the run directories, copy the code, submit the job or job array, and return its ids, one for each run.

    The jobs run the present code. Raises `UserError` for a run that could never start; then nothing is submitted.
    """
    snapshot = read_snapshot(own_files=plan.own_files)
    check(plan, snapshot=snapshot, asks_slurm=True)
    plan.claim()
    code = write_snapshot(snapshot, into=plan.home)
    jobs = [plan.job(planned.run_dir, command) for planned in plan.runs]
    try:
        with outside_any_job():
            job_ids = [job.job_id for job in slurm_executor(plan, code=code).submit_array(jobs)]
    except FailedSubmissionError as error:
        raise UserError(
            f"sbatch took the job, but names no number ({' '.join(str(error).split())}): find job {plan.name} with "
            "squeue --me, and end it by scancel before the command is repeated"
        ) from None
    except FailedJobError as error:
        raise refused(str(error)) from None
    for planned, job_id in zip(plan.runs, job_ids, strict=True):
        log = JobPaths(plan.logs, job_id=job_id, task_id=0).stdout
        record(planned.run_dir, Submission(job_id=job_id, submitted_at=datetime.now(UTC), log=log))
    return job_ids
