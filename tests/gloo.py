"""Run a test's function on W gloo ranks: `run_ranks(function, W, *args)` returns each rank's result, in rank order.

    def sum_of_ranks(offset: int) -> float:            # a module-level function: it travels by name
        return all_reduce_sum(torch.tensor(float(rank() + offset))).item()

    def test_sum() -> None:
        assert run_ranks(sum_of_ranks, 2, 10) == [21.0, 21.0]

The function finds the default process group initialised on gloo. Give each rank different data (index it by `rank()`):
equal data hides most mistakes. Ranks are forked from a server process that has imported torch and the trainer and has
never computed anything, so a call costs a tenth of a second, no state passes from test to test, and forking is safe
whatever threads pytest runs. A rank that raises, dies or does not return in time ends all ranks; the error carries the
rank's traceback.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from tests import tiers

T = TypeVar("T")

# None of these starts a thread when it is imported.
_PRELOAD = ["torch", "torch.distributed", "torch.nn.parallel", "torchvision", "numpy", "pytest", "pydantic"]
_PRELOAD += ["scipy.io", "timm", "wandb", "trainer.train"]
_PRELOAD += ["torch._inductor.compile_fx", "tests.frozen"]  # DeepSpeed imports it, for seconds, in each rank
# Python's own server keeps the modules of the first caller, such as a build: each rank would import the others anew.
_server = forkserver.ForkServer()
_server.set_forkserver_preload(_PRELOAD)
_DEATH_SECONDS = 1.0  # in which the death of a rank shows that made another one raise


class RankError(AssertionError):
    """A rank raised, died or hung; the message carries what is known, with the rank's own traceback."""


def run_ranks(function: Callable[..., T], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[T]:
    """Call `function(*args)` on each of `world_size` ranks, and return the results in rank order.

    `function`, `args` and results are pickled, so `function` lives at the top of an importable module. Each rank runs
    on one thread. Raises `RankError`.
    """
    tiers.require("ranks", "slurm")
    context = multiprocessing.get_context("forkserver")
    task = pickle.dumps((function, args))
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="gloo-") as directory:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process: BaseProcess = context.Process(
                    target=_rank_main,
                    args=(theirs, task, rank, world_size, str(Path(directory) / "store"), timeout_s),
                )
                with mock.patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process):
                    process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            results = _collect(pipes, world_size=world_size, timeout_s=timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
    return [results[rank] for rank in range(world_size)]


def _collect(pipes: list[Connection], *, world_size: int, timeout_s: float) -> dict[int, Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    raised: dict[int, str] = {}  # in the order in which they came
    while len(results) < world_size:
        waiting = [rank for rank in range(world_size) if rank not in results and rank not in raised]
        seconds = _DEATH_SECONDS if raised else max(0.0, deadline - time.monotonic())
        ready = wait([pipes[rank] for rank in waiting], timeout=seconds)
        if not ready:
            if raised:
                rank, trace = next(iter(raised.items()))
                raise RankError(f"rank {rank} of {world_size} raised\n{trace}")
            raise RankError(f"ranks {waiting} of {world_size} did not return within {timeout_s:.0f} s")
        for rank in waiting:
            if pipes[rank] not in ready:
                continue
            try:
                failed, payload = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} of {world_size} died without a word") from None
            (raised if failed else results)[rank] = payload
    return results


def _rank_main(pipe: Connection, task: bytes, rank: int, world_size: int, store: str, timeout_s: float) -> None:
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        function, args = pickle.loads(task)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        # Plain pickle instead of `pipe.send`: torch would pass tensors in shared memory that dies with this process.
        reply = pickle.dumps((False, function(*args)))
    except BaseException:
        reply = pickle.dumps((True, traceback.format_exc()))
    pipe.send_bytes(reply)
    # Stay until killed: a rank that leaves early makes the others fail on a lost connection, and hides the cause.
    pipe.poll(timeout_s)
