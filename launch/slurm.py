"""Train on a Slurm cluster, or as several ranks on this machine, through submitit.

python launch/slurm.py --nodes 4 --config viewmaker:digits --gpus-per-node 8 --partition gpu
python launch/slurm.py --study studies:table1 --at-a-time 4 --gpus-per-node 8
python launch/slurm.py --executor local --tasks-per-node 2 --config debug:image --wait
python launch/slurm.py --executor local --study studies:table1_small --at-a-time 2

What does not change from run to run may stand in ./slurm.yaml or ~/.config/feature-dropout/slurm.yaml (a line such as
`partition: gpu`), or in the environment (FEATURE_DROPOUT_SLURM_PARTITION=gpu).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import submitit
import torch
from submitit.core.utils import FailedJobError
from submitit.helpers import clean_env

from configs import resolve_recipe, resolve_study
from data_pipeline.core.environment import variable
from data_pipeline.core.errors import UserError, run_command
from data_pipeline.core.overrides import SET_HELP
from launch.job import AFTER_SRUN, BEFORE_SRUN, TrainJob, parse_seconds
from launch.outcome import outcomes_of_job
from launch.ports import free_ports
from launch.resources import (
    Gathered,
    Resources,
    Wishes,
    describe_request,
    gather,
    parse_fields,
    resources_for,
    told_origins,
)
from launch.snapshot import Snapshot, python_environment, read_snapshot, shell_lines, write_snapshot
from launch.submitted import (
    Submission,
    first_error,
    in_queue,
    last_submission,
    queue_for,
    queued_jobs,
    record,
    refuse_if_active,
    run_status,
)
from launch.train import add_accept_data, default_run_dir, positive
from trainer.config import RunConfig
from trainer.preflight import check_data, claim
from trainer.provenance import command_line
from trainer.run_dir import LOCK_NAME, RunDir

MAX_TIMEOUTS = 20  # a job that has reached its time limit this often is not requeued again
MAX_TIMEOUTS_HERE = 5  # on this machine, where submitit starts a job six times at most
WARNING_SECONDS = 120  # between the warning signal and the time limit
POLL_SECONDS = 1.0
SLURM_SECONDS = 120  # for one command of Slurm's

Executor = Literal["slurm", "local"]


@dataclass(frozen=True)
class Member:
    """A run to submit: alone, or one of a study."""

    run_dir: RunDir
    config: RunConfig


@dataclass(frozen=True)
class Plan:
    """What is submitted together: one job, or one job array of which `at_a_time` members run at once.

    `home` holds the logs and the code of all: the run directory itself, or that of the study. On this machine, `place`
    numbers the members that run at once: each has GPUs of its own. `accepted_data` as in `trainer.train`.
    """

    members: Sequence[Member]
    home: Path
    resources: Resources
    at_a_time: int
    name: str
    executor: Executor = "slurm"
    place: int = 0
    accepted_data: tuple[str, ...] = ()

    @property
    def logs(self) -> Path:
        return self.home / "logs"


def slurm_parameters(resources: Resources, *, job_name: str, code: Path, at_a_time: int = 1) -> dict[str, Any]:
    """submitit's parameters for these resources and the code in `code`."""
    parameters = {
        "job_name": job_name,
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
        "array_parallelism": at_a_time,
        "signal_delay_s": WARNING_SECONDS,
        "stderr_to_stdout": True,
        "setup": [
            *BEFORE_SRUN,
            f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{resources.threads_per_task}}}",
            *shell_lines(code),
        ],
        # Since 22.05 Slurm does not hand sbatch's --cpus-per-task on to srun. A rank that dies takes the others with
        # it, which would otherwise wait for it.
        "srun_args": [f"--cpus-per-task={resources.cpus_per_task}", "--kill-on-bad-exit=1"],
        "teardown": list(AFTER_SRUN),
        "additional_parameters": {"requeue": True}
        | {name: value for name, value in resources.sbatch.items() if value is not False},
    }
    return {name: value for name, value in parameters.items() if value is not None}


def sbatch_script(plan: Plan, *, code: Path) -> str:
    """The batch script that `submit` hands to sbatch; needs no Slurm."""
    executor = _ScriptWriter(plan.logs, python=_python(code))
    executor.update_parameters(
        **slurm_parameters(plan.resources, job_name=plan.name, code=code, at_a_time=plan.at_a_time)
    )
    if len(plan.members) > 1:
        executor.parameters["map_count"] = len(plan.members)
    return executor._make_submission_file_text(executor._submitit_command_str, "")


def _python(code: Path) -> str:
    """Return the command by which a rank starts Python, with signals blocked until it can handle them."""
    start = code / "launch" / "block_signals.py"
    return shlex.join([sys.executable, "-I", "-S", str(start), sys.executable])


class _ScriptWriter(submitit.SlurmExecutor):
    """submitit makes no Slurm executor where srun is missing; to write a script none is needed."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def submit(plan: Plan, *, command: str, snapshot: Snapshot | None = None) -> list[submitit.Job[None]]:
    """Claim the run directories, copy the code, hand all to Slurm (or start it here), and note each job in its run.

    The code is that of `snapshot`, by default that of now. Raises `UserError` for what cannot run, with nothing
    submitted and no directory left that was not there before.
    """
    snapshot = snapshot or read_snapshot()
    code = snapshot.folder(plan.home)
    with _claimed(plan, code=code):
        write_snapshot(snapshot, into=plan.home)
        train_jobs = [
            TrainJob(
                run_dir=member.run_dir.path,
                command=command,
                local_port=free_ports(1)[0],
                warning_seconds=WARNING_SECONDS,
                accepted_data=plan.accepted_data,
            )
            for member in plan.members
        ]
        jobs = _submit_here(train_jobs, plan, code) if plan.executor == "local" else _sbatch(train_jobs, plan, code)
    for member, job in zip(plan.members, jobs, strict=True):
        submission = Submission(
            job_id=job.job_id,
            executor=plan.executor,
            home="." if plan.home == member.run_dir.path else "..",
            submitted_at=datetime.now(UTC),
            at_a_time=plan.at_a_time,
            resources=plan.resources,
            host=socket.gethostname(),
        )
        record(member.run_dir, submission)
    return jobs


class _DryRunError(Exception):
    """Raised inside `_claimed` to take back what a dry run has claimed."""


def dry_run(plan: Plan, *, snapshot: Snapshot) -> str:
    """Make every check that `submit` makes, leave nothing, and return the batch script.

    Slurm itself is asked only if there is one on this machine. Raises `UserError` as `submit` does.
    """
    code = snapshot.folder(plan.home)
    with contextlib.suppress(_DryRunError), _claimed(plan, code=code, needs_slurm=False):
        raise _DryRunError
    return sbatch_script(plan, code=code)


@contextlib.contextmanager
def _claimed(plan: Plan, *, code: Path, needs_slurm: bool = True) -> Iterator[None]:
    """Check all that can be checked before a submission, and claim the run directories.

    What was made for that is removed if the block raises. Raises `UserError` for what cannot run.
    """
    if not str(plan.home).isprintable():
        raise UserError(f"the directory {str(plan.home)!r} cannot stand in a batch script; rename it")
    for member in plan.members:
        check_data(member.config)
    if plan.executor == "slurm" and (needs_slurm or _has_slurm()):
        _check_with_slurm(plan, code=code)
    directories = [plan.home, *(member.run_dir.path for member in plan.members)]
    new = [path for path in directories if not path.exists()]
    new_files = [
        path / name
        for path in directories
        for name in (RunDir(path).config.name, LOCK_NAME)
        if path.exists() and not (path / name).exists()
    ]
    new_parents = [parent for path in new for parent in path.parents if not parent.exists()]
    try:
        for member in plan.members:
            claim(member.run_dir, member.config, accepted_data=plan.accepted_data).close()
        yield
    except BaseException as error:
        for path in new:
            shutil.rmtree(path, ignore_errors=True)
        for path in new_files:
            with contextlib.suppress(OSError):
                path.unlink()
        for path in new_parents:  # the innermost first; one in which something else lies meanwhile stays
            with contextlib.suppress(OSError):
                path.rmdir()
        if not isinstance(error, OSError) or error.errno == errno.ENOSPC:  # which has a sentence of its own
            raise
        raise UserError(
            f"{error.filename or plan.home} cannot be written ({error.strerror}); pass another --run-dir or --study-dir"
        ) from None


def _has_slurm() -> bool:
    return shutil.which("sbatch") is not None and shutil.which("srun") is not None


def _check_with_slurm(plan: Plan, *, code: Path) -> None:
    """Raises `UserError` if there is no Slurm, if it says that it would refuse this job, if the job would leave its
    GPUs idle, or if its nodes cannot see the directory; submits nothing.
    """
    if not _has_slurm():
        raise UserError(
            "there is no Slurm on this machine (no sbatch and srun on PATH); run this on a login node of the cluster, "
            "add --dry-run to see the script, or --executor local to train here"
        )
    with _outside_any_job():
        nodes = _run_slurm("sinfo", "--noheader", "--Node", "--format", "%N %n %P %T %G").stdout
        check_shared(plan.home, [line.split()[1] for line in nodes.splitlines()])
        check_gpus(plan.resources, nodes)
        partitions = _run_slurm("scontrol", "show", "partition", "--oneliner").stdout
        check_time_limit(plan.resources, partitions)
        test = _run_slurm("sbatch", "--test-only", text=sbatch_script(plan, code=code))
    if test.returncode and (reason := refusal(test.stderr, nodes=nodes, resources=plan.resources)):
        raise UserError(f"sbatch refused the job ({reason}); change what is asked for, or ask with sinfo")


def refusal(said: str, *, nodes: str, resources: Resources) -> str | None:
    """Why this job can never run, by what `sbatch --test-only` says and the nodes that sinfo lists as
    "name host partition state gres", the default partition with a star; None if it could only not run now.

    A job that needs nodes which are down for the moment may wait in the queue, but the test speaks of it as of one that
    asks for the impossible.
    """
    reason = _reason(said)
    if "down, drained or reserved" in reason:
        return None
    chosen = _nodes_of_partition(resources, nodes)
    names = {row[0] for row in chosen}
    if 0 < len(names) < resources.nodes:
        partition = resources.partition or chosen[0][2].rstrip("*")
        return f"{reason}: --nodes {resources.nodes}, but the partition {partition} has {len(names)}"
    if "node configuration is not available" in reason and not all(_is_up(row[3]) for row in chosen):
        return None
    return reason


def _nodes_of_partition(resources: Resources, nodes: str) -> list[list[str]]:
    """The rows of sinfo, in words, for the partitions that are asked for, or for the default one."""
    rows = [line.split() for line in nodes.splitlines()]
    asked = set(resources.partition.split(",")) if resources.partition else None
    return [row for row in rows if (row[2].endswith("*") if asked is None else row[2].rstrip("*") in asked)]


def check_gpus(resources: Resources, nodes: str) -> None:
    """Raises `UserError` if every node of the partition has GPUs, by the list of sinfo, and nothing is said of them.

    Examples:
        >>> asked = Resources(nodes=4, tasks_per_node=1, cpus_per_task=1, threads_per_task=1, time_minutes=60)
        >>> check_gpus(asked, "n0 n0 cpu* idle (null)")
        >>> check_gpus(asked.model_copy(update={"gpus_per_node": 0}), "n0 n0 gpu* idle gpu:a100:8(S:0-1)")
        >>> check_gpus(asked, "n0 n0 gpu* idle gpu:a100:8(S:0-1)")
        Traceback (most recent call last):
        data_pipeline.core.errors.UserError: every node of the partition gpu has GPUs (gpu:a100:8), but none is \
asked for, so 4 ranks would train on the CPU; add --gpus-per-node 8, or --gpus-per-node 0 if the CPU is meant
    """
    if not resources.says_nothing_of_gpus:
        return
    chosen = _nodes_of_partition(resources, nodes)
    found = [re.search(r"\bgpu(?::[^,():]+)*:(\d+)", row[4]) if len(row) > 4 else None for row in chosen]
    if not found or None in found:
        return
    fewest = min((match for match in found if match is not None), key=lambda match: int(match[1]))
    partition = resources.partition or chosen[0][2].rstrip("*")
    raise UserError(
        f"every node of the partition {partition} has GPUs ({fewest[0]}), but none is asked for, so "
        f"{resources.num_ranks} ranks would train on the CPU; add --gpus-per-node {fewest[1]}, or --gpus-per-node 0 if "
        "the CPU is meant"
    )


def _is_up(state: str) -> bool:
    """Whether sinfo's word for a node's state is of one that takes jobs; a star says that it does not answer."""
    return "*" not in state and state.rstrip("~#!%$@^-+") in {"idle", "mixed", "allocated", "completing", "planned"}


def check_time_limit(resources: Resources, partitions: str) -> None:
    """Raises `UserError` if the job asks for more time than any of its partitions allows, by `scontrol show partition`:
    many a Slurm takes such a job, and lets it wait for ever. A QOS may allow more, so where one is asked for Slurm
    decides.

    Examples:
        >>> asked = Resources(nodes=1, tasks_per_node=1, cpus_per_task=1, threads_per_task=1, time_minutes=61)
        >>> check_time_limit(asked, "PartitionName=a Default=YES MaxTime=1-00:00:00")
        >>> check_time_limit(asked, "PartitionName=a Default=YES MaxTime=01:00:00")
        Traceback (most recent call last):
        data_pipeline.core.errors.UserError: --time-minutes 61, but the partition a allows 60; ask for no more: a \
run that takes longer is started again and goes on
    """
    asked = None if resources.partition is None else resources.partition.split(",")
    limits: dict[str, float] = {}
    for line in partitions.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        name = fields.get("PartitionName", "")
        if name in asked if asked is not None else fields.get("Default") == "YES":
            seconds = parse_seconds(fields.get("MaxTime", ""))
            limits[name] = float("inf") if seconds is None else seconds // 60
    if resources.qos is None and limits and max(limits.values()) < resources.time_minutes:
        name = max(limits, key=lambda name: limits[name])
        raise UserError(
            f"--time-minutes {resources.time_minutes}, but the partition {name} allows {limits[name]:.0f}; ask for no "
            "more: a run that takes longer is started again and goes on"
        )


def check_shared(home: Path, hosts: Sequence[str], *, this_host: str | None = None) -> None:
    """Raises `UserError` if `home` lies where each machine has a disk of its own, and a node is another machine."""
    own = (this_host or socket.gethostname()).partition(".")[0]
    others = sorted({host for host in hosts if host.partition(".")[0] != own})
    for private in {"/tmp", "/var/tmp", "/dev/shm", "/run", tempfile.gettempdir()}:
        if others and home.resolve().is_relative_to(private):
            raise UserError(
                f"{home} lies in {private}, which every machine has for itself, so {others[0]} could not write there; "
                "pass a --run-dir or --study-dir on a file system that all nodes share"
            )


def _sbatch(train_jobs: Sequence[TrainJob], plan: Plan, code: Path) -> list[submitit.Job[None]]:
    """Raises `UserError` with sbatch's own words if it refuses."""
    executor = submitit.SlurmExecutor(plan.logs, max_num_timeout=MAX_TIMEOUTS, python=_python(code))
    executor.update_parameters(
        **slurm_parameters(plan.resources, job_name=plan.name, code=code, at_a_time=plan.at_a_time)
    )
    said = io.StringIO()
    try:
        with _outside_any_job(), contextlib.redirect_stderr(said):
            return executor.submit_array(train_jobs)
    except FailedJobError:
        raise UserError(
            f"sbatch refused the job ({_reason(said.getvalue())}); change what is asked for, or ask with sinfo"
        ) from None


def _submit_here(train_jobs: Sequence[TrainJob], plan: Plan, code: Path) -> list[submitit.Job[None]]:
    """Start the ranks as processes of this machine, detached from this one."""
    resources = plan.resources
    executor = submitit.LocalExecutor(plan.logs, max_num_timeout=MAX_TIMEOUTS_HERE)
    executor.update_parameters(
        tasks_per_node=resources.tasks_per_node,
        gpus_per_node=resources.gpus_per_node or 0,
        visible_gpus=gpus_of(resources, place=plan.place),
        timeout_min=resources.time_minutes,
        signal_delay_s=WARNING_SECONDS,
        stderr_to_stdout=True,
    )
    os.environ["OMP_NUM_THREADS"] = variable("OMP_NUM_THREADS") or str(resources.threads_per_task)
    with _outside_any_job(python_environment(code, os.environ)):
        return executor.submit_array(train_jobs)


def gpus_of(resources: Resources, *, place: int) -> list[int]:
    """The GPUs of the run at `place` of those that run on this machine at once, as CUDA_VISIBLE_DEVICES numbers them.

    Where that variable is set already, they are taken from what it names. Raises `UserError` where it names too few, or
    names them by other things than numbers.
    """
    num_gpus = resources.gpus_per_node or 0
    first, end = place * num_gpus, (place + 1) * num_gpus
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not num_gpus:
        return list(range(first, end))
    words = [word.strip() for word in visible.partition("-1")[0].split(",") if word.strip()]  # CUDA stops at -1
    if not all(word.isdecimal() for word in words):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={visible} does not number the GPUs, as --executor local needs it; set it to the "
            "numbers that nvidia-smi shows"
        )
    if len(words) < end:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={visible} names {len(words)} GPU(s), but {end} are needed here (--gpus-per-node for "
            "each of --at-a-time runs); ask for fewer, or unset it"
        )
    return [int(word) for word in words[first:end]]


@contextlib.contextmanager
def _outside_any_job(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Hide the variables of a job or torchrun that this command itself runs in, which the new job would inherit."""
    before = dict(os.environ)
    slurm_conf = variable("SLURM_CONF")
    try:
        with clean_env(extra_names=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")):
            if slurm_conf is not None:  # says which cluster, not which job
                os.environ["SLURM_CONF"] = slurm_conf
            os.environ.update(more or {})
            yield
    finally:
        for name in more or {}:
            os.environ.pop(name, None)
        os.environ.update(before)


def _run_slurm(*command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=SLURM_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} gave no answer within {SLURM_SECONDS} s; try again when Slurm answers") from None


def _reason(said: str) -> str:
    """What sbatch gives as its reason, in its own words."""
    lines = [line for line in said.splitlines() if "error:" in line or "failure:" in line] or ["it gave no reason"]
    return lines[-1].rpartition("error:")[2].rpartition("failure:")[2].strip()


def wait(member: Member, job: submitit.Job[None]) -> None:
    """Show the job's state and rank 0's log until the job has ended; raises SystemExit(1) if a rank failed."""
    submission = last_submission(member.run_dir)
    assert submission is not None, "submit has just noted it"
    log = job.task(0).paths.stdout
    state: str | None = ""
    shown = 0
    while state is not None:
        time.sleep(POLL_SECONDS)
        before, state = state, _now(submission)
        if state is not None and state != before:
            print(f"job {job.job_id}: {state}", flush=True)
        if log.is_file():
            with log.open(errors="replace") as file:
                file.seek(shown)
                print(file.read(), end="", flush=True)
                shown = file.tell()
    outcomes = outcomes_of_job(log.parent, job_id=job.job_id, inside=log.parent)
    missing = [rank for rank in range(job.num_tasks) if rank not in outcomes]
    if error := first_error(member.run_dir, submission):
        rank, problem = error.rank, f"failed: {error.line}"
    elif missing:
        rank, problem = missing[0], "left no result (it was killed, or its node died)"
    else:
        return
    print(f"error: rank {rank} of job {job.job_id} {problem}; see {job.task(rank).paths.stdout}", file=sys.stderr)
    raise SystemExit(1)


def wait_for_study(members: Sequence[Member]) -> None:
    """Tell each member's state when it changes, until all have ended; raises SystemExit(1) if one is not finished."""
    told: dict[Path, str] = {}
    run_dirs = [member.run_dir for member in members]
    while True:
        time.sleep(POLL_SECONDS)
        try:
            queue = queue_for(run_dirs)
        except UserError as error:  # Slurm is away for a while
            print(error, file=sys.stderr, flush=True)
            continue
        statuses = {run_dir.path: run_status(run_dir, queue) for run_dir in run_dirs}
        for path, status in statuses.items():
            if told.get(path) != status.state:
                told[path] = status.state
                print(f"{path.name}: {status.state} {status.reason}".rstrip(), flush=True)
        if not {"waiting", "running"} & set(told.values()):
            break
    if set(told.values()) != {"finished"}:
        raise SystemExit(1)


def run_study_here(plan: Plan, *, command: str) -> None:
    """Train the members on this machine, `at_a_time` at once, all by the code of now; tell of each start and end.

    A member that fails or cannot be started does not stop the others; then this raises SystemExit(1) at the end. Raises
    `UserError`, before anything has started, where one cannot be trained on its data or in its directory, and where
    there are not GPUs for all that run at once.
    """
    gpus_of(plan.resources, place=min(plan.at_a_time, len(plan.members)) - 1)
    for member in plan.members:
        check_data(member.config)
    for member in plan.members:
        claim(member.run_dir, member.config, accepted_data=plan.accepted_data).close()
    snapshot = read_snapshot()
    waiting = deque(plan.members)
    running: dict[int, tuple[Member, submitit.Job[None]]] = {}
    num_failed = 0
    while waiting or running:
        for place in range(plan.at_a_time):
            if place in running and running[place][1].done():
                member, _ = running.pop(place)
                status = run_status(member.run_dir, {})
                num_failed += status.state != "finished"
                print(f"{member.run_dir.path.name}: {status.state} {status.reason}".rstrip(), flush=True)
            if place not in running and waiting:
                member = waiting.popleft()
                name = member.run_dir.path.name
                try:
                    (job,) = submit(replace(plan, members=[member], place=place), command=command, snapshot=snapshot)
                except (UserError, OSError) as error:  # such as a disk that has become full
                    num_failed += 1
                    print(f"{name}: not started: {error}", file=sys.stderr, flush=True)
                    continue
                running[place] = member, job
                print(f"{name}: job {job.job_id}, {len(waiting)} to come", flush=True)
        time.sleep(POLL_SECONDS)
    if num_failed:
        print(
            f"error: {num_failed} of {len(plan.members)} run(s) did not finish; the same command goes on",
            file=sys.stderr,
        )
        raise SystemExit(1)


def _now(submission: Submission) -> str | None:
    """The state of a job in the queue; None once it has ended. Not from sacct, which many clusters lack."""
    if submission.executor == "local":
        return in_queue(submission, None)
    try:
        return in_queue(submission, queued_jobs())
    except UserError as error:  # Slurm is away for a while
        return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", metavar="RECIPE", help="module:function in configs/, or a config file")
    what.add_argument("--study", metavar="studies:NAME", help="all runs of a study, as one job array")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help=SET_HELP)
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/NAME-seedSEED; a killed run goes on")
    add_accept_data(parser)
    parser.add_argument("--study-dir", type=Path, metavar="DIR", help="of all runs of a study; default: runs/NAME")
    parser.add_argument(
        "--at-a-time", type=positive, metavar="N", help="runs of a study at once; default: all, or 1 on this machine"
    )
    parser.add_argument("--nodes", type=positive, default=1, metavar="N", help="of each run; default: 1")
    parser.add_argument(
        "--tasks-per-node", type=positive, metavar="N", help="ranks a node; default: one a GPU, or 1 without GPUs"
    )
    parser.add_argument(
        "--cpus-per-task",
        type=positive,
        metavar="N",
        help="default: 1 and one for each data worker of the recipe; on this machine, an equal part of its cores",
    )
    parser.add_argument("--gpus-per-node", type=_whole, metavar="N", help="default: none; 0 says that none is meant")
    parser.add_argument("--time-minutes", type=positive, metavar="N", help="default: 240; then requeued")
    parser.add_argument("--mem-gb", type=positive, metavar="N", help="memory a node; default: the cluster's")
    parser.add_argument("--partition", metavar="NAME")
    parser.add_argument("--account", metavar="NAME")
    parser.add_argument("--qos", metavar="NAME")
    parser.add_argument("--constraint", metavar="FEATURES")
    parser.add_argument(
        "--sbatch", action="append", metavar="KEY=VALUE", help="any other field of sbatch; KEY alone: without a value"
    )
    parser.add_argument("--executor", choices=("slurm", "local"), default="slurm", help="local: ranks on this machine")
    parser.add_argument("--allow-pipe", action="store_true", help="run the pipe: locations of a config file")
    parser.add_argument("--dry-run", action="store_true", help="check all, print the batch script and stop")
    parser.add_argument("--wait", action="store_true", help="show rank 0's log until the end; status 1 if a rank fails")
    return parser


def _whole(text: str) -> int:
    return 0 if text == "0" else positive(text)


def _gather(arguments: argparse.Namespace) -> Gathered:
    flags = {name: getattr(arguments, name) for name in Wishes.model_fields if name != "sbatch"}
    return gather(flags | {"sbatch": parse_fields(arguments.sbatch) if arguments.sbatch else None})


def _plan(arguments: argparse.Namespace, gathered: Gathered) -> Plan:
    """Raises `UserError` for flags that do not go together, and for what cannot run."""
    if arguments.study is None:
        if arguments.study_dir is not None or arguments.at_a_time is not None:
            raise UserError("--study-dir and --at-a-time belong to --study; use --run-dir for one run")
        config = resolve_recipe(arguments.config, arguments.set, allow_pipe=arguments.allow_pipe)
        home = (arguments.run_dir or default_run_dir(config)).absolute()
        members, name = [Member(RunDir(home), config)], config.name
    else:
        configs = resolve_study(arguments.study, arguments.set)
        if arguments.run_dir is not None:
            raise UserError("a study has a directory for each run; pass --study-dir in place of --run-dir")
        name = arguments.study.partition(":")[2]
        home = (arguments.study_dir or Path("runs") / name).absolute()
        members = [Member(RunDir(home / default_run_dir(config).name), config) for config in configs]
    is_local = arguments.executor == "local"
    at_a_time = min(arguments.at_a_time or (1 if is_local else len(members)), len(members))
    wishes = _with_part_of_cores(gathered.wishes, at_a_time=at_a_time) if is_local else gathered.wishes
    resources = resources_for(wishes, [member.config for member in members], nodes=arguments.nodes)
    if is_local:
        if resources.nodes > 1:
            raise UserError(
                f"--executor local has one node, this machine, but --nodes is {resources.nodes}; "
                f"use --tasks-per-node {resources.num_ranks} for as many ranks here"
            )
        if resources.time_minutes * 60 <= WARNING_SECONDS:
            raise UserError(
                f"--time-minutes {resources.time_minutes} leaves no time to train, for a run is warned "
                f"{WARNING_SECONDS} seconds before; allow {WARNING_SECONDS // 60 + 1} minutes or more"
            )
        if arguments.dry_run:
            raise UserError("--executor local writes no batch script; leave out --dry-run, or use --executor slurm")
    return Plan(
        members=members,
        home=home,
        resources=resources,
        at_a_time=at_a_time,
        name=name,
        executor=arguments.executor,
        accepted_data=tuple(arguments.accept_data),
    )


def _with_part_of_cores(wishes: Wishes, *, at_a_time: int) -> Wishes:
    """Unless another number is wished for, each rank that runs on this machine has an equal part of its cores."""
    num_ranks = at_a_time * (wishes.tasks_per_node or wishes.gpus_per_node or 1)
    part = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    return wishes if wishes.cpus_per_task else wishes.model_copy(update={"cpus_per_task": part})


def still_to_do(plan: Plan) -> tuple[list[Member], list[str]]:
    """The members of a study that neither are finished nor have a job, and a line for each one that is left out."""
    queue = queue_for([member.run_dir for member in plan.members])
    left, left_out = [], []
    for member in plan.members:
        status = run_status(member.run_dir, queue) if member.run_dir.config.is_file() else None
        if status is not None and status.state in {"finished", "waiting", "running"}:
            left_out.append(f"{member.run_dir.path.name} is {status.state} already")
        else:
            left.append(member)
    return left, left_out


def main() -> None:
    arguments = _parser().parse_args()
    gathered = _gather(arguments)
    plan = _plan(arguments, gathered)
    members = plan.members
    notes: list[str] = []
    if arguments.study is None:
        (member,) = members
        refuse_if_active(member.run_dir, queue_for([member.run_dir]))
    else:
        left, notes = still_to_do(plan)
        plan = replace(plan, members=left, at_a_time=max(1, min(plan.at_a_time, len(left))))
    if plan.members:
        notes.append(f"asks for {describe_request(plan.resources, num_runs=len(plan.members))}")
    if plan.executor == "local" and plan.resources.says_nothing_of_gpus and (num_gpus := torch.cuda.device_count()):
        notes.append(f"the {num_gpus} GPU(s) of this machine stay idle; --gpus-per-node 0 says that this is meant")
    if arguments.dry_run:
        _print_dry_run(plan, notes, gathered)
        return
    print(*notes, sep="\n", end="\n" if notes else "", flush=True)
    if arguments.study is None:
        _submit_one(plan, then_wait=arguments.wait)
        return
    if plan.members and plan.executor == "local":
        run_study_here(plan, command=command_line())
    elif plan.members:
        tell_study(plan, submit(plan, command=command_line()))
    print(f"state: python launch/status.py {plan.home}", flush=True)
    if arguments.wait:
        wait_for_study(members)


def _print_dry_run(plan: Plan, notes: Sequence[str], gathered: Gathered) -> None:
    """Print the batch script, or only the notes if no run is left to submit. Raises `UserError` as `submit` does."""
    if not plan.members:
        print(*notes, sep="\n")
        return
    script = dry_run(plan, snapshot=read_snapshot())
    unchecked = [] if _has_slurm() else ["not checked by Slurm: there is no sbatch on this machine"]
    shebang, _, rest = script.partition("\n")
    print("\n".join([shebang, "", *(f"# {line}" for line in [*notes, *unchecked, *told_origins(gathered)]), rest]))


def _submit_one(plan: Plan, *, then_wait: bool) -> None:
    (member,) = plan.members
    (job,) = submit(plan, command=command_line())
    where = "this machine" if plan.executor == "local" else f"{plan.resources.nodes} node(s)"
    print(f"job {job.job_id}: {plan.resources.num_ranks} rank(s) on {where}")
    print(f"run directory: {member.run_dir.path}")
    print(f"follow: tail -F {job.task(0).paths.stdout}  (one log a rank: {job.job_id}_RANK_log.out)", flush=True)
    if plan.executor == "slurm":
        print(f"state: squeue --jobs {job.job_id}; end it: scancel {job.job_id}", flush=True)
    if then_wait:
        wait(member, job)


def tell_study(plan: Plan, jobs: Sequence[submitit.Job[None]]) -> None:
    """Print what `submit` has done."""
    for member, job in zip(plan.members, jobs, strict=True):
        print(f"job {job.job_id}: {member.run_dir.path}")
    array = jobs[0].job_id.partition("_")[0]
    print(
        f"{len(jobs)} run(s) of {plan.resources.num_ranks} rank(s), {plan.at_a_time} at a time; "
        f"end them: scancel {array}"
    )


if __name__ == "__main__":
    run_command(main)
