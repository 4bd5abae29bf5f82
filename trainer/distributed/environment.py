"""Read the rank of this process from the variables of torchrun or Slurm, and join the process group.

Input: environment variables. Output: a `WorldEnv`, and from it the process group. Invariants: no two processes take the
same rank; no rank waits for ranks that were never started. An environment with only some of the variables is therefore
refused. Slurm's variables count only in a task that srun started: a batch script and an interactive allocation also
have SLURM_NTASKS, but are a single process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from data_pipeline.core.devices import has_gpu, why_unusable
from data_pipeline.core.environment import set_variables
from data_pipeline.core.errors import UserError
from data_pipeline.core.system import num_cores
from trainer.distributed import rendezvous

logger = logging.getLogger(__name__)

_TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# slurm.h numbers the steps that srun did not start (batch script, interactive shell, extern) down from 0xFFFFFFFF.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
# Below Linux's ephemeral range (from 32768), so that no outgoing connection uses the port.
_FIRST_SLURM_PORT, _NUM_SLURM_PORTS = 20_000, 12_000
_NUM_PORTS_TRIED, _NEXT_PORT = 16, 769  # far from the ports of the next job ids
# A token that all ranks of this start share, and no other process has; set by a launcher that proposes MASTER_PORT.
_RENDEZVOUS_NAME = "FEATURE_DROPOUT_RENDEZVOUS"

_LOST_ANOTHER: Final = re.compile(r"[Cc]onnection|[Ss]ocket|[Bb]roken pipe|[Pp]eer|[Gg]loo|NCCL")


@dataclass(frozen=True)
class WorldEnv:
    """The number of this process among all ranks, and the address of rank 0.

    Attributes:
        rank: the number among all `world_size` ranks.
        local_rank: the number among the `local_world_size` ranks on node `node_rank`.
        master_addr, master_port: the address at which rank 0 listens; "" and 0 for a single process.
        launcher: the program whose variables were read; "none" for a single process.
        sources: for each of the fields above, the variable that it was read from.
        start: a token that differs between all starts of all jobs. It is set if the port was derived from a Slurm job
            or proposed by a launcher; then rank 0 may listen at any of `ports`.
        cpus_asked_for: the cores per task that the Slurm job requested; None if unknown.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    launcher: Literal["none", "torchrun", "slurm"]
    sources: Mapping[str, str]
    start: str = ""
    cpus_asked_for: int | None = None

    @property
    def ports(self) -> tuple[int, ...]:
        """Return the ports at which rank 0 may listen, in the order in which it tries them."""
        if not self.start:
            return (self.master_port,)
        offset = self.master_port - rendezvous.PORTS.start
        tried = (offset + _NEXT_PORT * i for i in range(_NUM_PORTS_TRIED))
        return tuple(rendezvous.PORTS[one % len(rendezvous.PORTS)] for one in tried)


_WITHOUT_SOURCE = {"launcher", "sources", "start", "cpus_asked_for"}


def read_env(environ: Mapping[str, str]) -> WorldEnv:
    """Read the variables of torchrun, or else of a Slurm step; without any, return a single process.

    Raises `UserError` if a variable is missing or not a number, if the numbers contradict each other, or if RANK and
    SLURM_PROCID disagree. One torchrun in each Slurm task is allowed: each task is then a node of torchrun.
    """
    environ = set_variables(environ)
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & environ.keys():
        world = _read_torchrun(environ)
        _check_agrees_with_slurm(world, environ)
    elif _in_slurm_step(environ):
        world = _read_slurm(environ)
    else:
        default = "default (in a Slurm job, but not under srun)" if "SLURM_JOB_ID" in environ else "default"
        sources = {name: default for name in (field.name for field in fields(WorldEnv)) if name not in _WITHOUT_SOURCE}
        return WorldEnv(0, 1, 0, 1, 0, "", 0, "none", sources)
    _check_ranges(world)
    return world


def choose_device(world: WorldEnv) -> torch.device:
    """Return cuda:local_rank if there are GPUs, else the CPU.

    Slurm may show each task only its own GPU (--gpus-per-task), which is cuda:0 for every local rank. Raises
    `UserError` if ranks would have to share a GPU, or if the environment names GPUs or the machine has some but torch
    can use none, because training would be unexpectedly slow on the CPU.
    """
    num_gpus = torch.cuda.device_count() if has_gpu() else 0
    if num_gpus == 0:
        for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS"):
            if os.environ.get(name, "") not in {"", "-1", "NoDevFiles"}:
                raise UserError(
                    f"{name}={os.environ[name]} names GPUs, but torch {torch.__version__} sees none on "
                    f"{socket.gethostname()}; check nvidia-smi, or set CUDA_VISIBLE_DEVICES= for the CPU"
                )
            if name == "CUDA_VISIBLE_DEVICES" and name in os.environ:  # empty: the user wants the CPU
                break
        return torch.device("cpu")
    if world.launcher == "slurm" and num_gpus == 1:
        return torch.device("cuda", 0)
    if world.local_world_size > num_gpus:
        raise UserError(
            f"{world.local_world_size} ranks on {socket.gethostname()}, but {num_gpus} GPU(s) are visible there; "
            f"start at most {num_gpus} rank(s) a node, or hide the GPUs with CUDA_VISIBLE_DEVICES="
        )
    return torch.device("cuda", world.local_rank)


def why_gpu_is_unusable(device: torch.device) -> str | None:
    """Return one sentence if this torch has no kernels for a GPU; None if it has."""
    capability, architectures = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    if _runs_on(capability, architectures):
        return None
    return (
        f"{torch.cuda.get_device_name(device)} on {socket.gethostname()} has CUDA capability "
        f"{'.'.join(map(str, capability))}, but torch {torch.__version__} was built for {', '.join(architectures)}; "
        "install a torch that was built for it, or set CUDA_VISIBLE_DEVICES= for the CPU"
    )


def _runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return whether code for these architectures runs on a GPU.

    Code for sm_86 runs on 8.6 and later 8.x. compute_80 is compiled for any GPU from 8.0. sm_90a runs on 9.0 only.
    Other names, such as those of AMD, are not judged.

    Examples:
        >>> _runs_on((8, 9), ["sm_80", "sm_90"]), _runs_on((7, 5), ["sm_80", "sm_90"])
        (True, False)
        >>> _runs_on((12, 0), ["sm_90", "compute_90"]), _runs_on((9, 1), ["sm_90a"])
        (True, False)
    """
    named = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture) for architecture in architectures]
    if not architectures or None in named:
        return True
    for kind, major, minor, suffix in (match.groups() for match in named if match is not None):
        built_for = int(major), int(minor)
        is_later = not suffix and capability >= built_for
        if capability == built_for or (is_later and (kind == "compute" or capability[0] == built_for[0])):
            return True
    return False


def init_process_group(world: WorldEnv, device: torch.device, *, timeout_seconds: float = 300.0) -> None:
    """Join all ranks (gloo on the CPU, NCCL on GPUs), then log the rank table on rank 0.

    A single process joins nothing, so it needs no port and no network. `timeout_seconds` limits the wait for the other
    ranks here, and each collective later. If a derived port is in use, tries the next one. Rank 0 warns of ranks with
    fewer cores than the Slurm job requested. Raises `UserError` if torch has no kernels for the GPU, if a given port is
    in use, if not all ranks connect in time, or if NCCL does not start.
    """
    if device.type == "cuda":
        try:
            reason = why_gpu_is_unusable(device)
            if reason is None:
                torch.cuda.set_device(device)
        except (RuntimeError, AssertionError) as error:  # its memory is full, another process has it for itself
            raise UserError(
                f"{device} on {socket.gethostname()} cannot be used ({why_unusable(error)}); see in nvidia-smi what "
                "else uses it, choose another one by CUDA_VISIBLE_DEVICES, or set CUDA_VISIBLE_DEVICES= for the CPU"
            ) from error
        if reason is not None:
            raise UserError(reason)
    if world.world_size > 1:
        try:
            store = _join_store(world, timeout_seconds=timeout_seconds) if world.start else None
            if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
                store = _join_again(world, timeout_seconds=timeout_seconds)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=None if store else f"tcp://{world.master_addr}:{world.master_port}",
                store=store,
                rank=world.rank,
                world_size=world.world_size,
                timeout=timedelta(seconds=timeout_seconds),
                device_id=device if device.type == "cuda" else None,
            )
        except (dist.DistNetworkError, dist.DistStoreError, TimeoutError) as error:
            raise UserError(_explain(error, world, timeout_seconds)) from error
        except dist.DistBackendError as error:
            raise UserError(
                f"rank {world.rank} of {world.world_size} on {socket.gethostname()} could not start NCCL on {device} "
                f"({_last_line(error)}); check that every rank has its own GPU, and read the log of NCCL_DEBUG=INFO"
            ) from error
    row = _RankRow(
        rank=world.rank,
        node=world.node_rank,
        host=socket.gethostname(),
        local_rank=world.local_rank,
        device=str(device),
        cpus=num_cores(),
        cpus_asked_for=world.cpus_asked_for,
        sources=_describe(world.sources),
    )
    rows = [row]
    if world.world_size > 1:
        gathered: list[_RankRow | None] | None = [None] * world.world_size if world.rank == 0 else None
        dist.gather_object(row, gathered)
        rows = [row for row in gathered or () if row is not None]
    if world.rank == 0:
        for line in _rank_table(rows, world.launcher):
            logger.info(line)
        if short := [row for row in rows if row.cpus_asked_for is not None and row.cpus < row.cpus_asked_for]:
            logger.warning(_too_few_cores(short))
        if device.type == "cpu" and world.launcher == "torchrun":
            hint = threads_hint(torch.get_num_threads(), cpus=row.cpus, num_ranks=world.local_world_size)
            if hint:
                logger.info(hint)


def _join_store(world: WorldEnv, *, timeout_seconds: float) -> Any:
    """Return the TCPStore of all ranks when all ranks have connected.

    Rank 0 listens at a port that the system chose. The other ranks learn this port at one of `world.ports`.
    """
    timeout = timedelta(seconds=timeout_seconds)
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # absent from torch's annotations
    if world.rank > 0:
        port = rendezvous.ask(world.master_addr, world.ports, token=world.start, timeout_seconds=timeout_seconds)
        store = tcp_store(world.master_addr, port, world.world_size, is_master=False, timeout=timeout)
        store.set(f"met/{world.rank}", "")
        return store
    # Rank 0 must answer the others before it waits for them, because they have to learn its port.
    store = tcp_store(world.master_addr, 0, world.world_size, is_master=True, timeout=timeout, wait_for_workers=False)
    with rendezvous.answering(world.ports, token=world.start, answer=store.port) as port:
        if port != world.master_port:
            host = socket.gethostname()
            logger.info("port %d is in use on %s, so the ranks meet at %d", world.master_port, host, port)
        store.wait([f"met/{rank}" for rank in range(1, world.world_size)], timeout)
    return store


def _join_again(world: WorldEnv, *, timeout_seconds: float) -> Any:
    """Return torchrun's store under new keys, because it still holds those of before the restart."""
    address, timeout = f"tcp://{world.master_addr}:{world.master_port}", timedelta(seconds=timeout_seconds)
    store, _, _ = next(dist.rendezvous(address, world.rank, world.world_size, timeout=timeout))  # type: ignore[attr-defined]
    return dist.PrefixStore(f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)  # type: ignore[attr-defined]


@contextlib.contextmanager
def process_group(world: WorldEnv, device: torch.device) -> Iterator[None]:
    """Join the process group inside the block, and leave it at the end.

    After an exception, a rank does not destroy a process group of NCCL: that would wait for the other ranks, which may
    wait for this one, and the exception would not be printed. The end of the process destroys it.
    """
    init_process_group(world, device)
    try:
        yield
    except BaseException:
        if device.type == "cpu":
            destroy_process_group()
        raise
    destroy_process_group()


def destroy_process_group() -> None:
    """Leave the process group, if there is one. If DeepSpeed has used it, DeepSpeed also drops its own groups."""
    if dist.is_initialized():
        owner = sys.modules.get("deepspeed.comm")
        if owner is None or not owner.is_initialized():
            owner = dist
        owner.destroy_process_group()


def lost_another(error: BaseException) -> bool:
    """Tell whether an error is the consequence of another rank's end, such as "connection closed by peer"."""
    if not dist.is_available() or read_env(os.environ).world_size == 1 or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or _LOST_ANOTHER.search(str(error)) is not None


@contextlib.contextmanager
def local_rank_restored() -> Iterator[None]:
    """Restore LOCAL_RANK after the block. DeepSpeed sets it to train, but `read_env` refuses it without the others."""
    earlier = os.environ.get("LOCAL_RANK")
    try:
        yield
    finally:
        if earlier is None:
            os.environ.pop("LOCAL_RANK", None)
        else:
            os.environ["LOCAL_RANK"] = earlier


@dataclass(frozen=True)
class _RankRow:
    """One line of the rank table. `cpus` is the number of cores that this process may run on."""

    rank: int
    node: int
    host: str
    local_rank: int
    device: str
    cpus: int
    cpus_asked_for: int | None
    sources: str


def _too_few_cores(rows: list[_RankRow]) -> str:
    ranks = ", ".join(f"{row.rank} ({row.cpus} of {row.cpus_asked_for} on {row.host})" for row in rows)
    return (
        f"fewer cores than the job requested (SLURM_CPUS_PER_TASK): rank {ranks}; reading data will be slower: give "
        "--cpus-per-task to srun too, and use nodes with that many cores"
    )


def threads_hint(num_threads: int, *, cpus: int, num_ranks: int) -> str:
    """Return the setting with which the ranks of a machine use all its cores; an empty text if they do already.

    torchrun gives each of several ranks one thread by default. The last bits of results on a CPU depend on the number
    of threads, so the number is not changed here.

    Examples:
        >>> threads_hint(1, cpus=16, num_ranks=2)
        '2 ranks compute with 1 thread each on 16 cores; OMP_NUM_THREADS=8 in front of torchrun uses them all'
        >>> threads_hint(1, cpus=2, num_ranks=2)
        ''
    """
    if num_threads * num_ranks * 2 > cpus:
        return ""
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    return (
        f"{num_ranks} ranks compute with {threads} each on {cpus} cores; OMP_NUM_THREADS={cpus // num_ranks} in front "
        "of torchrun uses them all"
    )


def _describe(sources: Mapping[str, str]) -> str:
    if len(set(sources.values())) == 1:
        return f"everything from {next(iter(sources.values()))}"
    return ", ".join(f"{name} from {source}" for name, source in sources.items())


def _rank_table(rows: list[_RankRow], launcher: str) -> list[str]:
    """Return the lines of the table, and a line with the sources of its numbers for each group of equal ranks."""
    header = ("rank", "node", "host", "local rank", "device", "cpus")
    cells = [header, *(tuple(str(getattr(row, name.replace(" ", "_"))) for name in header) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    by_source: dict[str, list[int]] = {}
    for row in rows:
        by_source.setdefault(row.sources, []).append(row.rank)
    for sources, ranks in by_source.items():
        named = "all ranks" if len(ranks) == len(rows) else f"rank {', '.join(map(str, ranks))}"
        lines.append(f"{named} (launcher: {launcher}): {sources}")
    return lines


def _read_torchrun(environ: Mapping[str, str]) -> WorldEnv:
    missing = [name for name in _TORCH_NAMES if name not in environ]
    if missing:
        present = [name for name in _TORCH_NAMES if name in environ]
        raise UserError(
            f"the environment sets {', '.join(present)} but not {', '.join(missing)}; start with torchrun, which sets "
            f"all of them, or unset {', '.join(present)} to run as one process"
        )
    local_world_size = _whole(environ, "LOCAL_WORLD_SIZE")
    rank = _whole(environ, "RANK")
    sources = {name.lower(): name for name in _TORCH_NAMES}
    if "GROUP_RANK" in environ:
        node_rank = _whole(environ, "GROUP_RANK")
        sources["node_rank"] = "GROUP_RANK"
    else:
        node_rank = rank // max(local_world_size, 1)
        sources["node_rank"] = "RANK / LOCAL_WORLD_SIZE"
    return WorldEnv(
        rank=rank,
        world_size=_whole(environ, "WORLD_SIZE"),
        local_rank=_whole(environ, "LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=node_rank,
        master_addr=environ["MASTER_ADDR"],
        master_port=_whole(environ, "MASTER_PORT"),
        launcher="torchrun",
        sources=sources,
        start=environ.get(_RENDEZVOUS_NAME, ""),
    )


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    return "SLURM_STEP_ID" in environ and _whole(environ, "SLURM_STEP_ID") < _FIRST_RESERVED_STEP


def _read_slurm(environ: Mapping[str, str]) -> WorldEnv:
    """Read the numbers of the step and not of the job: `srun --ntasks 2` may run in an allocation of four tasks."""
    names = {
        "rank": "SLURM_PROCID",
        "world_size": "SLURM_STEP_NUM_TASKS",
        "local_rank": "SLURM_LOCALID",
        "local_world_size": "SLURM_STEP_TASKS_PER_NODE",
        "node_rank": "SLURM_NODEID",
        "master_addr": "MASTER_ADDR" if "MASTER_ADDR" in environ else "SLURM_STEP_NODELIST",
        "master_port": "MASTER_PORT" if "MASTER_PORT" in environ else "SLURM_JOB_ID",
    }
    missing = [name for name in names.values() if name not in environ]
    if missing:
        raise UserError(
            f"this is a Slurm step (SLURM_STEP_ID is set), but {', '.join(missing)} is not set; start every rank with "
            "srun, or unset SLURM_STEP_ID to run as one process"
        )
    node_rank = _whole(environ, "SLURM_NODEID")
    tasks_per_node = expand_tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    if node_rank >= len(tasks_per_node):
        raise UserError(
            f"SLURM_NODEID={node_rank} is not in SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']}; "
            "start every rank with srun"
        )
    if "MASTER_PORT" in environ:
        master_port = _whole(environ, "MASTER_PORT")
    else:  # every rank derives the same port, and jobs on the same node derive different ports
        offset = _whole(environ, "SLURM_JOB_ID") + 1_000 * _whole(environ, "SLURM_STEP_ID")
        master_port = rendezvous.PORTS[offset % len(rendezvous.PORTS)]
    return WorldEnv(
        rank=_whole(environ, "SLURM_PROCID"),
        world_size=_whole(environ, "SLURM_STEP_NUM_TASKS"),
        local_rank=_whole(environ, "SLURM_LOCALID"),
        local_world_size=tasks_per_node[node_rank],
        node_rank=node_rank,
        master_addr=environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
        master_port=master_port,
        launcher="slurm",
        sources=names,
        start="" if "MASTER_PORT" in environ else _start(environ),
        cpus_asked_for=_whole(environ, "SLURM_CPUS_PER_TASK") if "SLURM_CPUS_PER_TASK" in environ else None,
    )


def _start(environ: Mapping[str, str]) -> str:
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "/".join(["feature-dropout", *(environ.get(name, "0") for name in names)])


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list.

    Examples:
        >>> first_host("gpu-[007,009-012],login1")
        'gpu-007'
    """
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", nodelist)
    if first is None:
        raise UserError(f"SLURM_STEP_NODELIST={nodelist!r} names no host; start every rank with srun")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Return the number of tasks on each node from Slurm's short form.

    Examples:
        >>> expand_tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node!r} does not have Slurm's form, such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _check_agrees_with_slurm(world: WorldEnv, environ: Mapping[str, str]) -> None:
    """Raise `UserError` if RANK differs from SLURM_PROCID, unless a torchrun inside this Slurm task has set it."""
    under_torchrun = "TORCHELASTIC_RUN_ID" in environ
    if "SLURM_PROCID" not in environ or (under_torchrun and not _in_slurm_step(environ)):
        return
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS"))
    if under_torchrun and environ.get("GROUP_WORLD_SIZE") == num_tasks:
        return
    pairs = [("RANK", world.rank, "SLURM_PROCID", environ["SLURM_PROCID"])]
    if _in_slurm_step(environ):
        pairs.append(("WORLD_SIZE", world.world_size, "SLURM_STEP_NUM_TASKS", num_tasks or ""))
    for name, value, slurm_name, slurm_value in pairs:
        if str(value) != slurm_value:
            raise UserError(
                f"{name}={value} and {slurm_name}={slurm_value} contradict each other; unset RANK, WORLD_SIZE and "
                "LOCAL_RANK to follow Slurm, or start one torchrun per Slurm task"
            )


def _check_ranges(world: WorldEnv) -> None:
    for name, value, limit_name, limit in (
        ("rank", world.rank, "world_size", world.world_size),
        ("local_rank", world.local_rank, "local_world_size", world.local_world_size),
        ("master_port", world.master_port, "65536", 65536),
    ):
        if not value < limit:
            where = world.sources[name]
            raise UserError(f"{name} {value} (from {where}) must be below {limit_name} {limit}; correct {where}")
    if world.local_world_size > world.world_size:
        raise UserError(
            f"{world.local_world_size} ranks on this node (from {world.sources['local_world_size']}) are more than "
            f"the {world.world_size} of the world (from {world.sources['world_size']}); correct one of them"
        )


def _whole(environ: Mapping[str, str], name: str) -> int:
    value = environ[name]
    if not re.fullmatch(r"[0-9]+", value):
        raise UserError(f"{name}={value!r} in the environment is not a whole number from 0; correct or unset it")
    return int(value)


def _last_line(error: Exception) -> str:
    """Return the last line of an error, where NCCL names the cause."""
    return str(error).strip().splitlines()[-1].rstrip(".")


def _explain(error: Exception, world: WorldEnv, timeout_seconds: float) -> str:
    where = f"{world.master_addr}:{world.master_port}"
    if "EADDRINUSE" in str(error):
        return (
            f"port {world.master_port} on {socket.gethostname()} is in use, so the ranks cannot connect there; set "
            "MASTER_PORT to a free port for all ranks, or on one machine start with `torchrun --standalone`"
        )
    reason = str(error).splitlines()[0].rstrip(".")
    return (
        f"rank {world.rank} of {world.world_size} on {socket.gethostname()} did not meet the others at {where} within "
        f"{timeout_seconds:.0f} s ({reason}); check that every rank was started and that {where} can be reached from "
        "every node, or set MASTER_ADDR and MASTER_PORT"
    )
