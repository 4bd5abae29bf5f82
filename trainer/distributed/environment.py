"""Read the rank of this process from the variables of torchrun or Slurm, and join the process group.

Input: environment variables. Output: a `WorldEnv`, and from it the process group. Invariants: no two processes take the
same rank; no rank waits for ranks that were never started. An environment with only some of the variables is therefore
refused. Slurm's variables count only in a task that srun started: a batch script and an interactive allocation also
have SLURM_NTASKS, but are a single process.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

import torch
import torch.distributed as dist

from data_pipeline.core.devices import has_gpu
from data_pipeline.core.errors import UserError
from data_pipeline.core.system import num_cores
from trainer.distributed.collectives import all_gather_json

logger = logging.getLogger(__name__)

# slurm.h numbers the steps that srun did not start (batch script, interactive shell, extern) down from 0xFFFFFFFF, or
# from -1 in newer versions.
_FIRST_RESERVED_STEP: Final = 0xFFFFFFF0
# Below Linux's ephemeral range (from 32768), so that no outgoing connection takes one of them before it is used.
PORTS: Final = range(20_000, 32_000)

_SIOCGIFADDR: Final = 0x8915  # the request for the address of an interface, from Linux's sockios.h


@dataclass(frozen=True)
class WorldEnv:
    """The number of this process among all ranks, and the address of rank 0.

    Attributes:
        rank: the number among all `world_size` ranks.
        local_rank: the number among the `local_world_size` ranks on this node.
        master_addr, master_port: the address at which rank 0 listens; "" and 0 for a single process.
        launcher: the program whose variables were read; "none" for a single process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    launcher: Literal["none", "torchrun", "slurm"] = "none"


def read_env(environ: Mapping[str, str]) -> WorldEnv:
    """Read the variables of torchrun, or else of a Slurm step; without any, return a single process.

    Raises `UserError` if a variable is missing, or if RANK and SLURM_PROCID disagree. One torchrun in each Slurm task
    is allowed: each task is then a node of torchrun.
    """
    environ = {name: value for name, value in environ.items() if value}  # an empty variable counts as unset
    try:
        if {"RANK", "WORLD_SIZE"} & environ.keys():
            world = _read_torchrun(environ)
            _check_agrees_with_slurm(world, environ)
            return world
        return _read_slurm(environ) if _in_slurm_step(environ) else WorldEnv()
    except KeyError as missing:
        raise UserError(
            f"the environment sets only some of the variables of torchrun or srun, and {missing.args[0]} is missing; "
            "start with one of the two, or unset RANK and WORLD_SIZE to run as one process"
        ) from None


def choose_device(world: WorldEnv) -> torch.device:
    """Return cuda:local_rank if there are GPUs, else the CPU.

    Slurm may show each task only its own GPU (--gpus-per-task), which is cuda:0 for every local rank. Raises
    `UserError` if ranks would have to share a GPU, or if the environment names GPUs or the machine has some but torch
    can use none, because training would be unexpectedly slow on the CPU.
    """
    if not has_gpu():
        by_user = "CUDA_VISIBLE_DEVICES" in os.environ  # if it is empty, the user wants the CPU
        for name in ("CUDA_VISIBLE_DEVICES",) if by_user else ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS"):
            if os.environ.get(name, "") not in {"", "-1", "NoDevFiles"}:
                raise UserError(
                    f"{name}={os.environ[name]} names GPUs, but torch {torch.__version__} sees none on "
                    f"{socket.gethostname()}; check nvidia-smi, or set CUDA_VISIBLE_DEVICES= for the CPU"
                )
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if world.launcher == "slurm" and num_gpus == 1:
        return torch.device("cuda", 0)
    if world.local_world_size > num_gpus:
        raise UserError(
            f"{world.local_world_size} ranks on {socket.gethostname()}, but {num_gpus} GPU(s) are visible there; "
            f"start at most {num_gpus} rank(s) a node, or hide the GPUs with CUDA_VISIBLE_DEVICES="
        )
    return torch.device("cuda", world.local_rank)


def init_process_group(world: WorldEnv, device: torch.device, *, timeout_seconds: float = 300.0) -> None:
    """Join all ranks (gloo on the CPU, NCCL on GPUs), then log where each of them runs on rank 0.

    A single process joins nothing, so it needs no port and no network. `timeout_seconds` limits the wait for the other
    ranks here, and each collective later. Raises `UserError` if the port is in use, or if not all ranks connect in
    time.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place = f"{device} of {socket.gethostname()}, {num_cores()} cores"
    if world.world_size > 1:
        _join(world, device, timeout=timedelta(seconds=timeout_seconds))
    places = all_gather_json(place, str)
    if world.rank == 0:
        for rank, where in enumerate(places):
            logger.info("rank %d (launcher: %s): %s", rank, world.launcher, where)


def _join(world: WorldEnv, device: torch.device, *, timeout: timedelta) -> None:
    address = f"{world.master_addr}:{world.master_port}"
    try:
        store, _, _ = next(
            dist.rendezvous(f"tcp://{address}", world.rank, world.world_size, timeout=timeout)  # type: ignore[attr-defined]
        )
        # torchrun's store still holds the keys of before a restart.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"restart_{restart}", store)  # type: ignore[attr-defined]
        _choose_interface(world, store)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError, TimeoutError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(
            f"rank {world.rank} of {world.world_size} on {socket.gethostname()} did not meet the others at {address} "
            f"within {timeout.total_seconds():.0f} s ({reason}); check that every rank was started and that {address} "
            "can be reached from every node, or set MASTER_ADDR and MASTER_PORT"
        ) from error


def _choose_interface(world: WorldEnv, store: dist.Store) -> None:  # type: ignore[name-defined]
    """Let gloo use the network interface that reaches the other nodes, unless GLOO_SOCKET_IFNAME names one.

    Otherwise gloo takes the address of this host's name. In Debian and Ubuntu that is 127.0.1.1, where no other node
    finds it. NCCL avoids such an address by itself.
    """
    if world.local_world_size == world.world_size or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    key, last = "address of the last rank", world.world_size - 1  # it is on another node than rank 0
    own = _address_towards(world.master_addr if world.rank == last else store.get(key).decode())
    if world.rank == last:
        store.set(key, own)
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            if socket.inet_ntoa(answer[20:24]) == own and not own.startswith("127."):
                os.environ["GLOO_SOCKET_IFNAME"] = name


def _address_towards(other: str) -> str:
    """Return the IPv4 address from which this host sends to `other`; "" if it has none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


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


def _read_torchrun(environ: Mapping[str, str]) -> WorldEnv:
    return WorldEnv(
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
        master_addr=environ["MASTER_ADDR"],
        master_port=int(environ["MASTER_PORT"]),
        launcher="torchrun",
    )


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    return "SLURM_STEP_ID" in environ and 0 <= int(environ["SLURM_STEP_ID"]) < _FIRST_RESERVED_STEP


def _read_slurm(environ: Mapping[str, str]) -> WorldEnv:
    """Read the numbers of the step and not of the job: `srun --ntasks 2` may run in an allocation of four tasks."""
    tasks_per_node = expand_tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    return WorldEnv(
        rank=int(environ["SLURM_PROCID"]),
        world_size=int(environ["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(environ["SLURM_LOCALID"]),
        local_world_size=tasks_per_node[int(environ["SLURM_NODEID"])],
        master_addr=environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
        master_port=int(environ.get("MASTER_PORT") or _port_of_step(environ)),
        launcher="slurm",
    )


def _port_of_step(environ: Mapping[str, str]) -> int:
    """Return a port that is the same for all ranks of a step; other jobs and steps on a node have other ports."""
    cluster = zlib.crc32(environ.get("SLURM_CLUSTER_NAME", "").encode())
    offset = cluster + int(environ["SLURM_JOB_ID"]) + 1_000 * int(environ["SLURM_STEP_ID"])
    return PORTS[offset % len(PORTS)]


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list.

    Examples:
        >>> first_host("gpu-[007,009-012],login1")
        'gpu-007'
    """
    first_of_each = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodelist)
    return first_of_each.partition(",")[0]


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Return the number of tasks on each node from Slurm's short form.

    Examples:
        >>> expand_tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts


def _check_agrees_with_slurm(world: WorldEnv, environ: Mapping[str, str]) -> None:
    """Raise `UserError` if RANK is not that of this Slurm task, unless one torchrun in each task has set it.

    It may come from the shell in which the job was submitted. All tasks would then take the same rank.
    """
    if not _in_slurm_step(environ):
        return
    of_slurm = (environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_NUM_TASKS"))
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("GROUP_WORLD_SIZE") == of_slurm[1]:
        return
    if (str(world.rank), str(world.world_size)) != of_slurm:
        raise UserError(
            f"RANK={world.rank} of WORLD_SIZE={world.world_size} and SLURM_PROCID={of_slurm[0]} of "
            f"SLURM_STEP_NUM_TASKS={of_slurm[1]} contradict each other; unset RANK, WORLD_SIZE and LOCAL_RANK to "
            "follow Slurm, or start one torchrun per Slurm task"
        )
