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

from data_pipeline.core.errors import UserError
from data_pipeline.core.plain_text import parse_yaml
from data_pipeline.core.schema import Line, NumProcesses, Schema
from trainer.config import RunConfig

FILE_NAME = "slurm.yaml"
WARNING_SECONDS = 120  # between the warning signal and the time limit
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


# From a minute more than a run needs to save after its warning, up to 19 years.
Minutes = Annotated[int, Field(ge=WARNING_SECONDS // 60 + 1, le=10**7)]
MemoryGB = Annotated[int, Field(ge=1, le=10**6)]
NumGpus = Annotated[int, Field(ge=0, le=10**6)]
# A line break in a `Line` would put a line of its own into the batch script.
SbatchValue: TypeAlias = bool | Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | Line
SbatchFields = Annotated[dict[Line, SbatchValue], AfterValidator(_fields)]


class RequestedResources(Schema):
    """The resources that flags or a file may ask for; None leaves the default.

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


def resolve_request(
    flags: Mapping[str, Any], *, files: Sequence[Path] | None = None
) -> tuple[RequestedResources, dict[str, str]]:
    """Return the request, and for each of its values that is not a default the flag or the file that asks for it.

    A flag overrides ./slurm.yaml, which overrides the user's own file. The fields under `sbatch` are merged from all.
    flags: by name; None means that the flag was not given.

    Raises `UserError` that names the flag or the file, for an unknown name or a wrong value.
    """
    files = default_files(os.environ) if files is None else files
    sources = [(str(path), _read_file(path)) for path in reversed(files)]
    sources += [(f"--{name.replace('_', '-')}", {name: value}) for name, value in flags.items() if value is not None]
    wanted, origins = RequestedResources(), dict[str, str]()
    for origin, given in sources:
        checked = RequestedResources.parse(given, where=origin)
        values = {name: getattr(checked, name) for name in checked.model_fields_set}
        wanted = wanted.model_copy(update=values | {"sbatch": wanted.sbatch | checked.sbatch})
        origins |= dict.fromkeys([*values, *checked.sbatch], origin)
    return wanted, origins


def describe_origins(wanted: RequestedResources, origins: Mapping[str, str]) -> list[str]:
    """Return a line for each requested value, with its origin."""
    values = {**wanted.model_dump(exclude={"sbatch"}), **wanted.sbatch}
    return [
        f"{name}: {value} from {origins.get(name, 'default')}" for name, value in values.items() if value is not None
    ]


def default_files(environ: Mapping[str, str]) -> list[Path]:
    """Return ./slurm.yaml and the user's own file, the stronger first, as far as they exist."""
    files = [Path(FILE_NAME)]
    if configs := environ.get("XDG_CONFIG_HOME"):
        files.append(Path(configs) / "feature-dropout" / FILE_NAME)
    else:
        files.append(Path("~/.config/feature-dropout").expanduser() / FILE_NAME)
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
        if config.global_batch_size % resources.num_ranks:
            raise UserError(
                f"{resources.nodes} nodes x {resources.tasks_per_node} tasks = {resources.num_ranks} ranks do not "
                f"divide the global batch of {config.global_batch_size} of {config.name}; change --nodes, "
                "--tasks-per-node or --set global_batch_size=..."
            )
    return resources


def _read_file(path: Path) -> dict[str, Any]:
    try:
        value = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict | None):
        raise UserError(f"{path} does not hold settings such as `partition: gpu`, one a line")
    return value or {}
