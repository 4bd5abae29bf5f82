"""Train runs on this machine, several at a time, each in processes of its own.

The processes are forked by the forkserver of multiprocessing, which has imported what a run needs, from the copy of the
code. It computes nothing, so no thread is at work and no GPU is in use when it forks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Final

import torch

from data_pipeline.core.errors import UserError, run_command
from data_pipeline.core.system import variable
from launch.job import Ending, TrainJob
from launch.planned_run import PlannedRun
from launch.slurm_client import outside_any_job
from launch.snapshot import python_environment, read_snapshot, write_snapshot
from launch.states import LEFT_ALONE, status_of
from launch.submission import SubmissionPlan
from trainer.run_dir import RunDir

# torchvision is imported late by a run, for its networks, and imports much.
_PRELOADED: Final = ["launch.here", "launch.rank", "torchvision.models"]
_POLL_SECONDS = 0.2


def run_here(plan: SubmissionPlan, *, command: str) -> None:
    """Train the runs on this machine, `at_a_time` at once, with the present code, and print each start and end.

    Leaves out the runs that another process finishes or trains meanwhile. If a run fails or cannot be started, the
    others go on, and this raises SystemExit(1) at the end. Raises `UserError` before any run starts if a run cannot use
    its data or its directory, or if there are too few GPUs.
    """
    gpus = gpus_here(plan.resources.wanted.gpus_per_node or 0, at_a_time=plan.at_a_time)
    plan.claim()
    context = _forkserver(plan)
    plan.logs.mkdir(exist_ok=True)
    waiting = deque(plan.runs)
    running: dict[int, tuple[PlannedRun, list[BaseProcess]]] = {}
    num_failed = 0

    def stop(number: int, _: FrameType | None) -> None:
        """Start no more runs, and let those that train save and stop."""
        waiting.clear()
        for process in (each for _, ranks in running.values() for each in ranks if each.pid is not None):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)

    signal.signal(signal.SIGTERM, stop)
    while waiting or running:
        for slot in range(plan.at_a_time):
            if slot in running and not any(process.is_alive() for process in running[slot][1]):
                ended, _ = running.pop(slot)
                status = status_of(ended.run_dir, {})
                num_failed += status.state not in LEFT_ALONE
                print(f"{ended.name}: {status.state} {status.reason}".rstrip(), flush=True)
            while slot not in running and waiting:
                planned = waiting.popleft()
                if (state := status_of(planned.run_dir, {}).state) in LEFT_ALONE:
                    print(f"{planned.name} is {state} already", flush=True)
                    continue
                ranks = _start(planned.run_dir, plan, context, gpus=gpus[slot], command=command)
                running[slot] = planned, list(ranks)
                print(f"{planned.name}: started, {len(waiting)} to come", flush=True)
                print(f"follow: tail -F {_log(plan, planned.run_dir, 0)}", flush=True)
        time.sleep(_POLL_SECONDS)
    if num_failed:
        print(
            f"error: {num_failed} of {len(plan.runs)} run(s) did not finish; repeat the command to go on with them",
            file=sys.stderr,
        )
        raise SystemExit(1)


def _forkserver(plan: SubmissionPlan) -> multiprocessing.context.ForkServerContext:
    """Return a context whose server, and the processes that it forks, have the copy of the code first on their path."""
    code = write_snapshot(read_snapshot(own_files=plan.own_files), into=plan.home)
    os.environ.update(python_environment(code, os.environ))
    os.environ["OMP_NUM_THREADS"] = variable("OMP_NUM_THREADS") or str(plan.resources.threads_per_task)
    sys.path.insert(0, str(code))  # multiprocessing passes it on
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with outside_any_job():
        multiprocessing.forkserver.ensure_running()
    return context


def gpus_here(each: int, *, at_a_time: int) -> list[list[str]]:
    """Return the GPUs of each of the runs that train at the same time, as CUDA_VISIBLE_DEVICES has them.

    They are among those of that variable if it is set; a GPU that it names twice is shared. Raises `UserError` if
    there are fewer than `each` for each run.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        there = [str(number) for number in range(torch.cuda.device_count() if each else 0)]
    else:
        there = [word.strip() for word in visible.split(",") if word.strip() not in {"", "-1"}]
    if len(there) < each * at_a_time:
        raise UserError(
            f"this machine shows {len(there)} GPU(s) (CUDA_VISIBLE_DEVICES={visible}), but {each * at_a_time} are "
            "needed (--gpus-per-node for each of --at-a-time runs); ask for fewer"
        )
    return [there[slot * each : (slot + 1) * each] for slot in range(at_a_time)]


def _start(
    run_dir: RunDir,
    plan: SubmissionPlan,
    context: multiprocessing.context.ForkServerContext,
    *,
    gpus: Sequence[str],
    command: str,
) -> Iterator[BaseProcess]:
    """Start the ranks of a run. Each writes into a log of its own."""
    num_ranks = plan.resources.num_ranks
    port = free_port() if num_ranks > 1 else 0
    for rank in range(num_ranks):
        environ = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        if num_ranks > 1:
            environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        log = _log(plan, run_dir, rank)
        process = context.Process(target=_train, args=(plan.job(run_dir, command), environ, log))
        process.start()
        yield process


def free_port() -> int:
    """Return a port of this machine at which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _log(plan: SubmissionPlan, run_dir: RunDir, rank: int) -> Path:
    return plan.logs / f"{run_dir.path.name}_{rank}_log.out"


def _train(job: TrainJob, environ: Mapping[str, str], log: Path) -> None:
    """Train as one rank, in a process of its own. Ends the process."""
    os.environ.update(environ)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    ending = Ending()
    try:
        run_command(job)
    except SystemExit as end:
        ending.status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        ending.leave()
