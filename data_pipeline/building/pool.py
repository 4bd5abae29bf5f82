"""Run tasks in worker processes, in order.

Guarantees: no worker of a killed command goes on.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, TypeVar

from data_pipeline.core.errors import UserError
from data_pipeline.core.system import end_with_parent, signals_blocked

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")

_inputs_of_worker: Any  # set once in each worker process, because a source may hold all pictures of a dataset


def _start_worker(inputs: bytes) -> None:
    global _inputs_of_worker
    end_with_parent()  # else it would wait for work forever when its build is killed
    _inputs_of_worker = pickle.loads(inputs)  # noqa: S301  of the process that has started this one
    if "torch" in sys.modules:  # the work that looks at files does without it
        sys.modules["torch"].set_num_threads(1)


def _in_worker(work: Callable[[Any, U], T], task: U) -> T:
    return work(_inputs_of_worker, task)


def run_all(
    work: Callable[[V, U], T],
    inputs: V,
    tasks: Sequence[U],
    *,
    num_workers: int,
) -> Generator[T, None, None]:
    """Yield `work(inputs, task)` for every task, in order; worker processes do it if there are several tasks.

    With `num_workers` 1, this process does it. It takes less time than to start another one for a single task.
    """
    if min(num_workers, len(tasks)) <= 1:
        yield from (work(inputs, task) for task in tasks)
        return
    # A server without threads forks the workers: a fork of this process could copy a held lock.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, work.__module__])
    # Pickled here, to bytes: multiprocessing itself would share the overlay's tensors through files in memory.
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(pickle.dumps(inputs),))
    try:
        # Workers inherit this: Ctrl-C reaches all processes, but the build ends its workers itself, between two tasks.
        with signals_blocked({signal.SIGINT}):
            found = pool.map(partial(_in_worker, work), tasks)
        yield from found
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, most likely for lack of memory; run the same command with fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
