"""Run a test's function on W ranks that share one GPU: `run_nccl_ranks(function, W, *args)`, like `run_ranks` of gloo.

NCCL refuses two ranks on the same GPU of a machine. So each rank says that it is a machine of its own (NCCL_HOSTID),
and the ranks send to each other over the loopback network. Their kernels take turns on the GPU, so this is slow, but
every message is one of NCCL, and every stream one of CUDA.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from tests import tiers
from tests.gloo import answer, collect

T = TypeVar("T")

_OVER_LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}


def machine_of(rank: int) -> dict[str, str]:
    """Return the variables that make NCCL take a rank for a machine of its own."""
    return {**_OVER_LOOPBACK, "NCCL_HOSTID": f"machine-{rank}"}


def run_nccl_ranks(function: Callable[..., T], world_size: int, *args: Any, timeout_s: float = 240.0) -> list[T]:
    """Call `function(*args)` on each of `world_size` ranks on the first GPU, and return the results in rank order.

    `function`, `args` and results are pickled, as in `run_ranks`. A rank is a new process, because CUDA cannot be used
    after a fork. Raises `RankError`.
    """
    tiers.require("ranks", "slurm")
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes = [context.Pipe() for _ in range(world_size)]
    call = pickle.dumps((function, args))
    processes = [
        context.Process(target=_run_rank, args=(theirs, sys.path, call, rank, world_size, port, timeout_s))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        results = collect([ours for ours, _ in pipes], world_size=world_size, timeout_s=timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[rank] for rank in range(world_size)]


def _run_rank(
    pipe: Connection, path: list[str], call: bytes, rank: int, world_size: int, port: int, timeout_s: float
) -> None:
    def work() -> Any:
        sys.path[:] = path
        os.environ.update(machine_of(rank))
        import torch
        import torch.distributed as dist

        device = torch.device("cuda", 0)
        torch.set_num_threads(1)
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        function, args = pickle.loads(call)
        dist.init_process_group(
            "nccl",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device,
        )
        return function(*args)

    answer(pipe, work, timeout_s=timeout_s)
