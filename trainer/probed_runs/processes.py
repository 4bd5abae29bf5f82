"""Probe several runs at the same time, each in a process of its own.

Guarantees: a run that fails, or whose process dies, costs no other run its results. No process outlives the command.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from data_pipeline.core.environment import variable
from data_pipeline.core.errors import UserError, printable, storage_problem
from data_pipeline.core.imports import import_code
from data_pipeline.core.processes import end_with_parent, worker_context
from data_pipeline.core.progress import Progress
from data_pipeline.core.system import num_cores
from trainer.distributed.environment import choose_device, process_group, read_env
from trainer.probed_runs.options import ProbeOptions
from trainer.probed_runs.probing import print_not_probed, probe_run
from trainer.probes.features import LabelSpace
from trainer.probes.result import ProbeResult
from trainer.run_dir import RunDir

Results = Mapping[LabelSpace, ProbeResult]


@dataclass(frozen=True)
class _Answer:
    """The text that a process has printed for stdout and for stderr, and its results or the reason that it has none."""

    out: str
    err: str
    results: Results | None
    problem: str


@dataclass(frozen=True)
class _Running:
    """The process that probes the run with a number, in one of the slots for processes at the same time."""

    number: int
    slot: int
    process: BaseProcess


def probe_in_processes(run_dirs: Sequence[RunDir], options: ProbeOptions, *, at_a_time: int) -> list[Results | None]:
    """Call `probe_run` for each run, `at_a_time` of them at once, and print what each one prints.

    The processes share the cores of this machine, unless OMP_NUM_THREADS is set, and take turns with its GPUs. Returns
    the results of each run. Those of a run that failed are None, and the reason is printed.
    """
    num_threads = max(1, num_cores() // at_a_time)
    os.environ["OMP_NUM_THREADS"] = variable("OMP_NUM_THREADS") or str(num_threads)
    # Not forks of this process, which may have touched a GPU. Networks import torchvision late, and so torch._dynamo.
    context = worker_context(__name__, "torchvision.models")
    waiting = deque(enumerate(run_dirs))
    free_slots = list(range(at_a_time))
    running: dict[Connection, _Running] = {}
    found: list[Results | None] = [None] * len(run_dirs)
    with Progress("probed runs", total=len(run_dirs)) as progress:
        try:
            while waiting or running:
                while waiting and free_slots:
                    number, run_dir = waiting.popleft()
                    slot = free_slots.pop(0)
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(target=_probe, args=(run_dir, options, slot, sender))
                    process.start()
                    sender.close()  # so that the end of the process is the end of the pipe
                    running[receiver] = _Running(number, slot, process)
                for ready in wait(list(running)):
                    assert isinstance(ready, Connection)
                    ended = running.pop(ready)
                    free_slots.append(ended.slot)
                    run_dir = run_dirs[ended.number]
                    found[ended.number] = _print_answer(run_dir, ready, ended.process)
                    progress.advance(note=printable(run_dir.path.name))
        finally:
            for left in running.values():
                left.process.kill()
    return found


def _print_answer(run_dir: RunDir, receiver: Connection, process: BaseProcess) -> Results | None:
    """Print what a process has printed, and return its results; None if it has none."""
    try:
        answer: _Answer = receiver.recv()
    except EOFError:
        process.join()
        answer = _Answer("", "", None, f"its process has ended with status {process.exitcode}")
    process.join()
    receiver.close()
    print(answer.out, end="", flush=True)
    print(answer.err, end="", file=sys.stderr)
    if answer.problem:
        print_not_probed(run_dir, answer.problem)
    return answer.results


def device_of_slot(slot: int, device: torch.device) -> torch.device:
    """Return the device for the process in a slot, which is alone and would take `device`: the GPUs take turns."""
    return device if device.type != "cuda" else torch.device("cuda", slot % torch.cuda.device_count())


def _probe(run_dir: RunDir, options: ProbeOptions, slot: int, sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the command ends this one
    end_with_parent()
    Progress.hide()
    import_code(options.code)
    results, problem = None, ""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            world = read_env(os.environ)
            device = device_of_slot(slot, choose_device(world))
            with process_group(world, device):
                results = probe_run(run_dir, options, device=device)
        except UserError as error:
            problem = str(error)
        except Exception as error:
            problem = (storage_problem(error) if isinstance(error, OSError) else None) or repr(error)
            traceback.print_exc()
    sender.send(_Answer(out.getvalue(), err.getvalue(), results, problem))
