"""Train on a Slurm cluster, or as several ranks on this machine, through submitit.

python launch/slurm.py --nodes 4 --config viewmaker:digits --gpus-per-node 8 --partition gpu
python launch/slurm.py --executor local --tasks-per-node 2 --config debug:image --wait
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError
from submitit.helpers import clean_env

from configs import resolve_recipe
from data_pipeline.errors import UserError, run_command
from launch.job import TrainJob
from launch.train import default_run_dir
from trainer.config import RunConfig
from trainer.preflight import claim
from trainer.provenance import command_line
from trainer.rundir import RunDir

MAX_TIMEOUTS = 20  # a job that has reached its time limit this often is not requeued again
WARNING_SECONDS = 120  # between the warning signal and the time limit
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Resources:
    """What is asked for; None leaves the cluster's own default.

    Of the `cpus_per_task` cores of a rank its training process computes with `threads_per_task`; the others are for its
    data workers. More threads than cores would not only be slow: they wait for each other in busy loops.
    """

    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    threads_per_task: int
    gpus_per_node: int | None
    time_minutes: int
    mem_gb: int | None
    partition: str | None
    account: str | None
    qos: str | None

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.tasks_per_node


def slurm_parameters(resources: Resources, *, job_name: str) -> dict[str, Any]:
    """submitit's parameters for these resources."""
    parameters = {
        "job_name": job_name,
        "nodes": resources.nodes,
        "ntasks_per_node": resources.tasks_per_node,
        "cpus_per_task": resources.cpus_per_task,
        "gpus_per_node": resources.gpus_per_node,
        "time": resources.time_minutes,
        "mem": None if resources.mem_gb is None else f"{resources.mem_gb}GB",
        "partition": resources.partition,
        "account": resources.account,
        "qos": resources.qos,
        "signal_delay_s": WARNING_SECONDS,
        "stderr_to_stdout": True,
        "setup": [f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{resources.threads_per_task}}}"],
        # Since 22.05 Slurm does not hand sbatch's --cpus-per-task on to srun. A rank that dies takes the others with
        # it, which would otherwise wait for it.
        "srun_args": [f"--cpus-per-task={resources.cpus_per_task}", "--kill-on-bad-exit=1"],
        "additional_parameters": {"requeue": True},
    }
    return {name: value for name, value in parameters.items() if value is not None}


def sbatch_script(logs: Path, parameters: dict[str, Any]) -> str:
    """The batch script that `submit_to_slurm` would hand to sbatch; needs no Slurm."""
    executor = _ScriptWriter(logs)
    executor.update_parameters(**parameters)
    return executor._make_submission_file_text(executor._submitit_command_str, "")


class _ScriptWriter(submitit.SlurmExecutor):
    """submitit makes no Slurm executor where srun is missing; to write a script none is needed."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def check_ranks(config: RunConfig, resources: Resources) -> None:
    """Raises `UserError` unless the ranks divide the global batch, before a job waits in a queue only to find out."""
    if config.global_batch_size % resources.num_ranks:
        raise UserError(
            f"{resources.nodes} nodes x {resources.tasks_per_node} tasks = {resources.num_ranks} ranks do not divide "
            f"the global batch of {config.global_batch_size}; change --nodes, --tasks-per-node or "
            "--set global_batch_size=..."
        )


def submit_to_slurm(job: TrainJob, logs: Path, resources: Resources, *, job_name: str) -> submitit.Job[None]:
    """Hand the job to sbatch; raises `UserError` with sbatch's own words if there is none or if it refuses."""
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise UserError(
            "there is no Slurm on this machine (no sbatch and srun on PATH); run this on a login node of the cluster, "
            "add --dry-run to see the script, or --executor local to train here"
        )
    executor = submitit.SlurmExecutor(logs, max_num_timeout=MAX_TIMEOUTS)
    executor.update_parameters(**slurm_parameters(resources, job_name=job_name))
    said = io.StringIO()
    try:
        with _outside_any_job(), contextlib.redirect_stderr(said):
            return executor.submit(job)
    except FailedJobError:
        lines = [line for line in said.getvalue().splitlines() if "error:" in line] or ["it gave no reason"]
        reason = lines[-1].rpartition("error:")[2].strip()
        raise UserError(f"sbatch refused the job ({reason}); change what is asked for, or ask with sinfo") from None


def submit_here(job: TrainJob, logs: Path, resources: Resources) -> submitit.Job[None]:
    """Start the ranks as processes of this machine, detached from this one."""
    executor = submitit.LocalExecutor(logs, max_num_timeout=MAX_TIMEOUTS)
    executor.update_parameters(
        tasks_per_node=resources.tasks_per_node,
        gpus_per_node=resources.gpus_per_node or 0,
        timeout_min=resources.time_minutes,
        signal_delay_s=WARNING_SECONDS,
        stderr_to_stdout=True,
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(resources.threads_per_task))
    with _outside_any_job():
        return executor.submit(job)


@contextlib.contextmanager
def _outside_any_job() -> Iterator[None]:
    """Hide the variables of a job or torchrun that this command itself runs in, which the new job would inherit."""
    slurm_conf = os.environ.get("SLURM_CONF")
    with clean_env(extra_names=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")):
        if slurm_conf is not None:  # says which cluster, not which job
            os.environ["SLURM_CONF"] = slurm_conf
        yield


def wait(job: submitit.Job[None]) -> None:
    """Show the job's state and rank 0's log until the job has ended; raises SystemExit(1) if a rank failed."""
    log = job.task(0).paths.stdout
    state: str | None = ""
    shown = 0
    while state is not None:
        time.sleep(POLL_SECONDS)
        before, state = state, _state(job)
        if state is not None and state != before:
            print(f"job {job.job_id}: {state}", flush=True)
        if log.is_file():
            with log.open() as file:
                file.seek(shown)
                print(file.read(), end="", flush=True)
                shown = file.tell()
    for rank in range(job.num_tasks):
        task = job.task(rank)
        if not task.paths.result_pickle.is_file():
            problem = "left no result (it was killed, or its node died)"
        else:
            outcome, result = task._get_outcome_and_result()
            if outcome == "success":
                continue
            problem = f"failed: {result.strip().splitlines()[-1]}"  # result is the traceback
        print(f"error: rank {rank} of job {job.job_id} {problem}; see {task.paths.stdout}", file=sys.stderr)
        raise SystemExit(1)


def _state(job: submitit.Job[None]) -> str | None:
    """What squeue says; None once the job has ended. Not sacct, which many clusters lack and submitit waits for."""
    if isinstance(job, submitit.LocalJob):
        return None if job.done() else "RUNNING"
    command = ["squeue", "--noheader", "--jobs", job.job_id, "--format", "%T (%r)"]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        return None if "Invalid job id" in answer.stderr else answer.stderr.strip()
    return answer.stdout.strip().removesuffix(" (None)") or None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", required=True, metavar="RECIPE", help="module:function in configs/, or a config file"
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one setting; repeatable")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/NAME-seedSEED; a killed run goes on")
    parser.add_argument("--nodes", type=_positive, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--tasks-per-node", type=_positive, metavar="N", help="ranks a node; default: one a GPU, or 1 without GPUs"
    )
    parser.add_argument(
        "--cpus-per-task", type=_positive, metavar="N", help="default: 1 and one for each data worker of the recipe"
    )
    parser.add_argument("--gpus-per-node", type=_positive, metavar="N", help="default: none")
    parser.add_argument("--time-minutes", type=_positive, default=240, metavar="N", help="default: 240; then requeued")
    parser.add_argument("--mem-gb", type=_positive, metavar="N", help="memory a node; default: the cluster's")
    parser.add_argument("--partition", metavar="NAME")
    parser.add_argument("--account", metavar="NAME")
    parser.add_argument("--qos", metavar="NAME")
    parser.add_argument("--executor", choices=("slurm", "local"), default="slurm", help="local: ranks on this machine")
    parser.add_argument("--dry-run", action="store_true", help="print the batch script and stop")
    parser.add_argument("--wait", action="store_true", help="show rank 0's log until the end; status 1 if a rank fails")
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    config = resolve_recipe(arguments.config, arguments.set)
    run_dir = RunDir((arguments.run_dir or default_run_dir(config)).absolute())
    cpus_per_task = arguments.cpus_per_task or 1 + config.data.num_workers
    resources = Resources(
        nodes=arguments.nodes,
        tasks_per_node=arguments.tasks_per_node or arguments.gpus_per_node or 1,
        cpus_per_task=cpus_per_task,
        threads_per_task=max(1, cpus_per_task - config.data.num_workers),
        gpus_per_node=arguments.gpus_per_node,
        time_minutes=arguments.time_minutes,
        mem_gb=arguments.mem_gb,
        partition=arguments.partition,
        account=arguments.account,
        qos=arguments.qos,
    )
    check_ranks(config, resources)
    logs = run_dir.path / "logs"
    if arguments.executor == "local" and resources.nodes > 1:
        raise UserError(
            f"--executor local has one node, this machine, but --nodes is {resources.nodes}; "
            f"use --tasks-per-node {resources.num_ranks} for as many ranks here"
        )
    if arguments.dry_run:
        if arguments.executor == "local":
            raise UserError("--executor local writes no batch script; leave out --dry-run, or use --executor slurm")
        print(sbatch_script(logs, slurm_parameters(resources, job_name=config.name)))
        return

    is_new = not run_dir.config.is_file()
    claim(run_dir, config)
    train_job = TrainJob(run_dir=run_dir.path, command=command_line(), local_port=_free_port())
    try:
        if arguments.executor == "local":
            job = submit_here(train_job, logs, resources)
        else:
            job = submit_to_slurm(train_job, logs, resources, job_name=config.name)
    except UserError:
        if is_new:
            shutil.rmtree(run_dir.path)
        raise
    where = "this machine" if arguments.executor == "local" else f"{resources.nodes} node(s)"
    print(f"job {job.job_id}: {resources.num_ranks} rank(s) on {where}")
    print(f"run directory: {run_dir.path}")
    print(f"follow: tail -F {job.task(0).paths.stdout}  (one log a rank: {job.job_id}_RANK_log.out)")
    if arguments.executor == "slurm":
        print(f"state: squeue --jobs {job.job_id}; end it: scancel {job.job_id}", flush=True)
    if arguments.wait:
        wait(job)


if __name__ == "__main__":
    run_command(main)
