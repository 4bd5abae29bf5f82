"""The resources that a job asks for: by a flag, else by a file of the cluster's settings, else a default.

No value is guessed from the name of a host. To move to another cluster, edit one small file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, Field

from data_pipeline.core.environment import home_directory
from data_pipeline.core.errors import UserError
from data_pipeline.core.plain_text import parse_yaml
from data_pipeline.core.schema import Line, NumProcesses, Schema
from trainer.config import RunConfig

FILE_NAME = "slurm.yaml"
# Fields of sbatch that have a flag here, and those that launch/slurm.py decides.
_OWN_FLAGS = {"partition", "account", "qos", "constraint", "time", "nodes", "ntasks-per-node", "cpus-per-task", "mem"}
_OWN_FLAGS |= {"ntasks", "gpus-per-node"}
_DECIDED = {"array", "error", "job-name", "no-requeue", "open-mode", "output", "requeue", "signal"}


def _fields(fields: dict[Line, SbatchValue]) -> dict[Line, SbatchValue]:
    fields = {name.replace("_", "-"): value for name, value in fields.items()}
    for name in fields:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise ValueError(f"{name!r} is no field of sbatch; write it as in `man sbatch`, without the dashes")
        if name in _OWN_FLAGS | _DECIDED:
            raise ValueError(f"{name} has a flag of its own or is decided by launch/slurm.py; see --help")
    return fields


Minutes = Annotated[int, Field(ge=1, le=10**7)]  # 19 years
MemoryGB = Annotated[int, Field(ge=1, le=10**6)]
NumGpus = Annotated[int, Field(ge=0, le=10**6)]
# A line break in a `Line` would put a line of its own into the batch script.
SbatchValue: TypeAlias = bool | Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | Line
SbatchFields = Annotated[dict[Line, SbatchValue], AfterValidator(_fields)]


class RequestedResources(Schema):
    """The resources that flags, the environment or a file may ask for; None leaves the default.

    sbatch: any other field of sbatch.
    """

    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    time_minutes: Minutes = 240
    tasks_per_node: NumProcesses | None = None
    cpus_per_task: NumProcesses | None = None
    gpus_per_node: NumGpus | None = None
    mem_gb: MemoryGB | None = None
    sbatch: SbatchFields = Field(default={})


class Resources(RequestedResources):
    """A request in which the numbers of nodes, ranks and cores are known, for one job.

    A rank has `cpus_per_task` cores. Its training process computes with `threads_per_task` of them, and the data
    workers use the others. With more threads than cores, threads wait for each other in busy loops.
    """

    nodes: NumProcesses
    tasks_per_node: NumProcesses
    cpus_per_task: NumProcesses
    threads_per_task: NumProcesses
    time_minutes: Minutes

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.tasks_per_node


def describe_request(resources: Resources, *, num_runs: int = 1) -> str:
    """Describe the resources in words.

    Examples:
        >>> few = Resources(nodes=4, tasks_per_node=1, cpus_per_task=2, threads_per_task=1, time_minutes=240)
        >>> describe_request(few)
        '4 nodes x 1 rank, no GPU: it trains on the CPU (add --gpus-per-node N for GPUs), 2 cores a rank, 240 minutes'
        >>> describe_request(few.model_copy(update={"gpus_per_node": 8, "tasks_per_node": 8}), num_runs=3)
        '3 runs of 4 nodes x 8 ranks, 8 GPUs a node, 2 cores a rank, 240 minutes'
    """

    def count(number: int, noun: str) -> str:
        return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

    if resources.gpus_per_node:
        gpus = f"{count(resources.gpus_per_node, 'GPU')} a node"
    elif any("gpu" in f"{name}={value}" for name, value in resources.sbatch.items()):
        gpus = "GPUs as --sbatch says"
    else:
        gpus = "no GPU: it trains on the CPU (add --gpus-per-node N for GPUs)"
    runs = f"{num_runs} runs of " if num_runs > 1 else ""
    return (
        f"{runs}{count(resources.nodes, 'node')} x {count(resources.tasks_per_node, 'rank')}, {gpus}, "
        f"{count(resources.cpus_per_task, 'core')} a rank, {count(resources.time_minutes, 'minute')}"
    )


@dataclass(frozen=True)
class ResolvedRequest:
    """The requested resources, and the origin of each value that is not a default, by its name."""

    wanted: RequestedResources
    origins: Mapping[str, str]


def resolve_request(flags: Mapping[str, Any], *, files: Sequence[Path] | None = None) -> ResolvedRequest:
    """Resolve a request: a flag overrides ./slurm.yaml, which overrides the user's own file.

    flags: by name; None means that the flag was not given.

    The fields under `sbatch` are merged from all of them. Raises `UserError` that names the flag or the file, for an
    unknown name or a wrong value.
    """
    sources = [
        (str(path), _read_file(path)) for path in reversed(default_files(os.environ) if files is None else files)
    ]
    sources += [(f"--{name.replace('_', '-')}", {name: value}) for name, value in flags.items() if value is not None]
    values: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, given in sources:
        checked = RequestedResources.parse(given, where=origin)  # here, so that an error names its place
        fields |= checked.sbatch
        origins |= {f"sbatch.{field}": origin for field in checked.sbatch}
        for name in given.keys() - {"sbatch"}:
            values[name], origins[name] = getattr(checked, name), origin
    wanted = RequestedResources.parse(values | {"sbatch": fields}, where="the cluster's settings")
    return ResolvedRequest(wanted, origins)


def default_files(environ: Mapping[str, str]) -> list[Path]:
    """Return ./slurm.yaml and the user's own file, the stronger first, as far as they exist."""
    files = [Path(FILE_NAME)]
    if configs := environ.get("XDG_CONFIG_HOME"):
        files.append(Path(configs) / "feature-dropout" / FILE_NAME)
    elif (home := home_directory()) is not None:
        files.append(home / ".config" / "feature-dropout" / FILE_NAME)
    return [path for path in files if path.is_file()]


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
    `UserError` if ranks would have to share a GPU, or if their number does not divide a global batch.
    """
    num_workers = max(config.data.num_workers for config in configs)
    cpus_per_task = wanted.cpus_per_task or 1 + num_workers
    resources = Resources(
        nodes=nodes,
        tasks_per_node=wanted.tasks_per_node or wanted.gpus_per_node or 1,
        cpus_per_task=cpus_per_task,
        threads_per_task=max(1, cpus_per_task - num_workers),
        **wanted.model_dump(exclude={"tasks_per_node", "cpus_per_task"}),
    )
    if resources.gpus_per_node and resources.tasks_per_node > resources.gpus_per_node:
        raise UserError(
            f"{resources.tasks_per_node} ranks a node cannot share {resources.gpus_per_node} GPU(s): each takes one; "
            f"leave out --tasks-per-node, or ask for --gpus-per-node {resources.tasks_per_node}"
        )
    for config in configs:
        if config.global_batch_size % resources.num_ranks:
            raise UserError(
                f"{resources.nodes} nodes x {resources.tasks_per_node} tasks = {resources.num_ranks} ranks do not "
                f"divide the global batch of {config.global_batch_size} of {config.name}; change --nodes, "
                "--tasks-per-node or --set global_batch_size=..."
            )
    return resources


def describe_origins(request: ResolvedRequest) -> list[str]:
    """Return a line for each requested value, with its origin."""
    values = request.wanted.model_dump(exclude={"sbatch"})
    lines = [
        f"{name}: {value} from {request.origins.get(name, 'default')}"
        for name, value in values.items()
        if value is not None
    ]
    return lines + [
        f"{name}: {value} from {request.origins[f'sbatch.{name}']}" for name, value in request.wanted.sbatch.items()
    ]


def _read_file(path: Path) -> dict[str, Any]:
    try:
        value = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold settings such as `partition: gpu`, one a line")
    return value
