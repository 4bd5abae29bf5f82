"""Run a test's function on W gloo ranks: `run_ranks(function, W, *args)` returns each rank's result, in rank order.

    def sum_of_ranks(offset: int) -> float:            # a module-level function: it travels by name
        return all_reduce_sum(torch.tensor(float(rank() + offset))).item()

    def test_sum() -> None:
        assert run_ranks(sum_of_ranks, 2, 10) == [21.0, 21.0]

The function finds the default process group initialised on gloo. Give each rank different data (index it by `rank()`):
equal data hides most mistakes. Ranks are forked from a server, itself forked from a nursery (`tests/nursery.py`), that
has imported torch and the trainer and has never computed anything. So a call costs a tenth of a second, no state passes
from test to test, and forking is safe whatever threads pytest runs. A rank that raises, dies or does not return in time
ends all ranks; the error carries the rank's traceback.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tests import tiers
from tests.nursery import FOR_TESTS, PythonProcess, preload

T = TypeVar("T")

_MOST_RANKS = 16
_MOST_BYTES = 4096
_SERVER = "import sys; sys.path[:] = {path!r}; from tests.gloo import serve_ranks; serve_ranks()"
_DEATH_SECONDS = 1.0  # in which the death of a rank shows that made another one raise


class RankError(AssertionError):
    """A rank raised, died or hung; the message carries what is known, with the rank's own traceback."""


def run_ranks(function: Callable[..., T], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[T]:
    """Call `function(*args)` on each of `world_size` ranks, and return the results in rank order.

    `function`, `args` and results are pickled, so `function` lives at the top of an importable module. Each rank runs
    on one thread. Raises `RankError`.
    """
    tiers.require("ranks", "slurm")
    call = pickle.dumps((function, args))
    state = (sys.path, dict(os.environ), str(Path.cwd()))
    pipes = [Pipe() for _ in range(world_size)]
    ours = [pipe for pipe, _ in pipes]
    server = _server()
    with tempfile.TemporaryDirectory(prefix="gloo-") as directory:
        pids = server.fork([pipe for _, pipe in pipes])
        try:
            for rank, pipe in enumerate(ours):
                pipe.send((state, str(Path(directory) / "store"), rank, world_size, timeout_s))
                pipe.send_bytes(call)
            results = collect(ours, world_size=world_size, timeout_s=timeout_s)
        finally:
            server.kill(pids)
            for pipe in ours:
                pipe.close()
    return [results[rank] for rank in range(world_size)]


class _Server:
    """The server of ranks, seen from pytest's process."""

    def __init__(self) -> None:
        self._asks, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, "-c", _SERVER.format(path=sys.path)]
            self._process = PythonProcess[bytes](words, stdin=theirs.fileno())

    def fork(self, pipes: list[Connection]) -> list[int]:
        """Fork a rank for each pipe, and close these ends. Returns the process ids."""
        socket.send_fds(self._asks, [b"f"], [pipe.fileno() for pipe in pipes])
        for pipe in pipes:
            pipe.close()
        pids = self._asks.recv(_MOST_BYTES)
        assert pids, "the server of ranks has ended"
        return list(map(int, pids.split()))

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # none has another meaning yet: the server has not waited for them
        self._asks.sendall(b"w")
        assert self._asks.recv(1), "the server of ranks has ended"


@functools.cache
def _server() -> _Server:
    return _Server()


def collect(pipes: list[Connection], *, world_size: int, timeout_s: float) -> dict[int, Any]:
    """Return what each rank sent through its pipe, by rank. Raises `RankError`."""
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
            except (EOFError, ConnectionResetError):
                raise RankError(f"rank {rank} of {world_size} died without a word") from None
            (raised if failed else results)[rank] = payload
    return results


def serve_ranks() -> NoReturn:
    """Fork ranks as `_Server` asks on standard input, until it ends."""
    asked = socket.socket(fileno=os.dup(0))
    os.close(0)
    assert os.open(os.devnull, os.O_RDONLY) == 0  # the lowest number that is free
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload([*FOR_TESTS, "timm", "torch._inductor.compile_fx"])  # DeepSpeed imports the last
    gc.collect()
    gc.freeze()  # what is there now is neither searched nor copied by the garbage collection of ranks
    pids: list[int] = []
    while True:
        asks, files, *_ = socket.recv_fds(asked, 1, _MOST_RANKS)
        if not asks:
            os._exit(0)
        if asks == b"w":
            while pids:
                os.waitpid(pids.pop(), 0)
            asked.sendall(b"w")
            continue
        for file in files:
            pid = os.fork()
            if pid == 0:
                asked.close()
                for other in files:
                    if other != file:
                        os.close(other)
                _run_rank(Connection(file))
                os._exit(0)
            pids.append(pid)
        for file in files:
            os.close(file)
        asked.sendall(" ".join(map(str, pids)).encode())


def _run_rank(pipe: Connection) -> None:
    state, store, rank, world_size, timeout_s = pipe.recv()

    def work() -> Any:
        import torch
        import torch.distributed as dist

        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        sys.path[:], environ, directory = state
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(directory)
        function, args = pickle.loads(pipe.recv_bytes())
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        return function(*args)

    answer(pipe, work, timeout_s=timeout_s)


def answer(pipe: Connection, work: Callable[[], Any], *, timeout_s: float) -> None:
    """Do the work of a rank, and send its result, or its traceback, to `collect`."""
    try:
        # Plain pickle instead of `pipe.send`: torch would pass tensors in shared memory that dies with this process.
        reply = pickle.dumps((False, work()))
    except BaseException:
        reply = pickle.dumps((True, traceback.format_exc()))
    pipe.send_bytes(reply)
    # Stay until killed: a rank that leaves early makes the others fail on a lost connection, and hides the cause.
    pipe.poll(timeout_s)
