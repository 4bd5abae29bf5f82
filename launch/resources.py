"""The resources that a job asks for: by a flag, else by ./slurm.yaml, else a default.

No value is guessed from the name of a host. To move to another cluster, edit one small file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from pydantic import Field

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Line, NumProcesses, Schema
from trainer.config import RunConfig, read_settings
from trainer.preflight import check_batch

FILE = Path("slurm.yaml")
_MIN_TRAINING_SECONDS: Final = 60  # between the start of a job and its warning


Minutes = Annotated[int, Field(ge=1, le=10**7)]  # up to 19 years
MemoryGB = Annotated[int, Field(ge=1, le=10**6)]
NumGpus = Annotated[int, Field(ge=0, le=10**6)]
# A line break in a `Line` would put a line of its own into the batch script.
SbatchValue: TypeAlias = bool | Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | Line


class RequestedResources(Schema):
    """The resources that flags or the file may ask for; None leaves the default.

    warning_seconds: the time between the warning signal and the time limit, in which a run saves.
    sbatch: any other field of sbatch that asks for resources.
    setup: lines of bash at the beginning of the batch script, such as "module load cuda".
    srun: more arguments of the srun that starts the ranks, such as "--mpi=none".
    python: the command that starts Python on a node, such as "apptainer exec image.sif python3".
    """

    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    time_minutes: Minutes = 240
    warning_seconds: Annotated[int, Field(ge=10, le=86_400)] = 120
    tasks_per_node: NumProcesses | None = None
    cpus_per_task: NumProcesses | None = None
    gpus_per_node: NumGpus | None = None
    mem_gb: MemoryGB | None = None
    sbatch: dict[Line, SbatchValue] = Field(default={})
    setup: tuple[Line, ...] = ()
    srun: tuple[Line, ...] = ()
    python: Line | None = None


@dataclass(frozen=True)
class Resources:
    """A request in which the numbers of nodes, ranks and cores are known, for one job.

    A rank has `cpus_per_task` cores. Its training process computes with `threads_per_task` of them, and the data
    workers use the others. With more threads than cores, threads wait for each other in busy loops.
    """

    wanted: RequestedResources
    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    threads_per_task: int

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.tasks_per_node


def describe_request(resources: Resources, *, num_runs: int = 1) -> str:
    """Describe the resources in words.

    Examples:
        >>> few = Resources(RequestedResources(), nodes=4, tasks_per_node=1, cpus_per_task=2, threads_per_task=1)
        >>> describe_request(few)
        '4 nodes x 1 rank, no GPU: it trains on the CPU (add --gpus-per-node N for GPUs), 2 cores a rank, 240 minutes'
    """

    def count(number: int, noun: str) -> str:
        return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

    wanted = resources.wanted
    if wanted.gpus_per_node:
        gpus = f"{count(wanted.gpus_per_node, 'GPU')} a node"
    elif any("gpu" in f"{name}={value}" for name, value in wanted.sbatch.items()):
        gpus = "GPUs as --sbatch says"
    else:
        gpus = "no GPU: it trains on the CPU (add --gpus-per-node N for GPUs)"
    runs = f"{num_runs} runs of " if num_runs > 1 else ""
    return (
        f"{runs}{count(resources.nodes, 'node')} x {count(resources.tasks_per_node, 'rank')}, {gpus}, "
        f"{count(resources.cpus_per_task, 'core')} a rank, {count(wanted.time_minutes, 'minute')}"
    )


def resolve_request(flags: Mapping[str, Any], *, file: Path = FILE) -> RequestedResources:
    """Return the request of the flags, and of `file`, if it is there, for what has no flag.

    The fields under `sbatch` are merged. flags: by name; None means that the flag was not given.

    Raises `UserError` that names the flag or the file, for an unknown name or a wrong value.
    """
    wanted = RequestedResources.parse(read_settings(file) if file.is_file() else {}, where=str(file))
    for name, value in flags.items():
        if value is not None:
            given = RequestedResources.parse({name: value}, where=f"--{name.replace('_', '-')}")
            fields = wanted.sbatch | given.sbatch
            wanted = wanted.model_copy(update={name: getattr(given, name), "sbatch": fields})
    if wanted.time_minutes * 60 < wanted.warning_seconds + _MIN_TRAINING_SECONDS:
        raise UserError(
            f"a time limit of {wanted.time_minutes} min leaves less than {_MIN_TRAINING_SECONDS} s before the warning, "
            f"which comes {wanted.warning_seconds} s before its end; raise --time-minutes, or lower warning_seconds in "
            f"{file}"
        )
    return wanted


def parse_fields(words: Sequence[str]) -> dict[str, str | bool]:
    """Parse fields of sbatch: KEY=VALUE, or KEY for a field without a value.

    Examples:
        >>> parse_fields(["reservation=night", "exclusive"])
        {'reservation': 'night', 'exclusive': True}
    """
    pairs = [word.lstrip("-").partition("=") for word in words]
    return {name: value if separator else True for name, separator, value in pairs}


def resources_for(wanted: RequestedResources, configs: Sequence[RunConfig], *, nodes: int) -> Resources:
    """Return resources with which each of `configs` can run.

    By default there is one rank for each GPU, and a rank has one core for itself and one for each data worker. Raises
    `UserError` if ranks would have to share a GPU, or if they cannot share a global batch.
    """
    num_workers = max(config.data.num_workers for config in configs)
    cpus_per_task = wanted.cpus_per_task or 1 + num_workers
    resources = Resources(
        wanted,
        nodes=nodes,
        tasks_per_node=wanted.tasks_per_node or wanted.gpus_per_node or 1,
        cpus_per_task=cpus_per_task,
        threads_per_task=max(1, cpus_per_task - num_workers),
    )
    if wanted.gpus_per_node and wanted.gpus_per_node < resources.tasks_per_node:
        raise UserError(
            f"{resources.tasks_per_node} ranks a node cannot share {wanted.gpus_per_node} GPU(s): each takes one; "
            f"leave out --tasks-per-node, or ask for --gpus-per-node {resources.tasks_per_node}"
        )
    for config in configs:
        check_batch(config, None, num_ranks=resources.num_ranks)
    return resources
