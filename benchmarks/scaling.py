"""Two processes that train together, against two that train apart at the same time; and the bytes that they send.

    python -m benchmarks.scaling [--batch-size B] [--rounds R] [--out JSON]

Each process has a core to itself and B samples of the batch. Encoder, views and loss are those of
`simclr:digits_small`, batch norm synchronised, on pictures held in memory. Collectives go through gloo. Apart, neither
process knows of the other. A rate is samples per second of both, from a common start to the end of the slower one.

Two more peers show where the difference comes from. "In step" trains apart, but each process waits for the other as
often as the batch norm of ranks does, without sending data: no faster figure can be expected on this machine. "Batch
norm local" trains together, but exchanges only gradients and embeddings.

The bytes that a rank puts into collectives in a step are counted, and compared with the least that the method needs:
each gradient once, its own embeddings, the gradients of the embeddings of all ranks, and two numbers per channel, batch
norm and view, both forward and backward, with one for the size of the batch.
"""

from __future__ import annotations

import collections
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import record
from benchmarks.record import ratio_line
from benchmarks.step_throughput import configure, step_of
from data_pipeline.core.batch import Batch
from data_pipeline.core.errors import UserError, run_command
from launch.here import free_port
from trainer.distributed.collectives import any_rank
from trainer.distributed.environment import WorldEnv, destroy_process_group, init_process_group
from trainer.memory import keep_freed_memory
from trainer.modules import build_modules

NUM_PROCESSES = 2
NUM_STEPS = 8


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this process puts into collectives, by collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_collective: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_").removesuffix("_base")
            takes_output_first = any(word in name for word in ("gather", "alltoall", "scatter"))
            given = [each for each in tree_leaves(args[int(takes_output_first)]) if isinstance(each, Tensor)]
            # gloo's gather of a few numbers has an input with a copy for each rank.
            copies = NUM_PROCESSES if name == "alltoall" else 1
            self.by_collective[name] += sum(each.nbytes for each in given) // copies
        return func(*args, **(kwargs or {}))


def held_batch(rank: int, size: int) -> Batch:
    pictures = torch.randint(
        0, 256, (size, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank)
    )
    return Batch(0, 0, torch.arange(size) + rank * size, pictures, pictures, None, None, {})


@contextmanager
def waiting_in_batch_norm(other: Connection) -> Iterator[None]:
    """Let every batch norm inside wait for the `other` process when that of ranks would.

    That is once forward and once backward, for both views together.
    """
    calls: collections.Counter[nn.Module] = collections.Counter()

    def wait(*_: object) -> None:
        other.send_bytes(b".")
        other.recv_bytes()

    def hook(module: nn.Module, _: object, out: Tensor) -> None:
        if isinstance(module, nn.BatchNorm2d):
            calls[module] += 1
            if calls[module] % 2:
                wait()
                out.register_hook(wait)  # type: ignore[no-untyped-call]

    handle = register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def worker(rank: int, core: int, size: int, start: Barrier, pipe: Connection, other: Connection) -> None:
    """Answer "together", "local", "in step" and "apart" with the seconds of `NUM_STEPS` steps.

    Answer "count" with the bytes of one step. `other` is connected to the other process.
    """
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    keep_freed_memory()
    device = torch.device("cpu")
    batch = held_batch(rank, size)
    while (asked := pipe.recv()) != "end":
        apart = asked in {"apart", "in step"}
        waiting: AbstractContextManager[None] = nullcontext()
        if asked == "in step":
            waiting = waiting_in_batch_norm(other)
        elif not apart:
            port = pipe.recv()
            world = WorldEnv(rank, NUM_PROCESSES, rank, NUM_PROCESSES, "127.0.0.1", port, "torchrun")
            init_process_group(world, device)
        config = configure(
            Path("unread"),
            f"global_batch_size={size * (1 if apart else NUM_PROCESSES)}",
            f"encoder.batch_norm={'local' if asked == 'local' else 'synchronized'}",
        )
        run = step_of(config, device)
        with waiting:
            run(batch)
            run(batch)  # DDP puts its buckets in order after the first
            if asked == "count":
                with SentBytes() as sent:
                    run(batch)
                pipe.send(dict(sent.by_collective))
            else:
                start.wait()
                began = time.perf_counter()
                for _ in range(NUM_STEPS):
                    run(batch)
                pipe.send(time.perf_counter() - began)
        if not apart:
            any_rank(False)  # waits for all
            destroy_process_group()


def least_bytes(size: int) -> int:
    """Return the least number of bytes that one rank must put into collectives in a step."""
    config = configure(Path("unread"), f"global_batch_size={size * NUM_PROCESSES}")
    encoder = build_modules(config).encoder
    gradients = sum(parameter.numel() for parameter in encoder.parameters())
    embeddings = 2 * size * config.encoder.embedding_size
    channels = [norm.num_features for norm in encoder.modules() if isinstance(norm, nn.BatchNorm2d)]
    statistics = sum((2 * 2 * num + 1) + 2 * 2 * num for num in channels)  # of two views
    return 4 * (gradients + embeddings + NUM_PROCESSES * embeddings + statistics)


def main() -> None:
    parser = record.benchmark_parser(__doc__, rounds=5)
    parser.add_argument("--batch-size", type=int, default=128, metavar="B", help="samples of a process; default: 128")
    arguments = parser.parse_args()
    size = arguments.batch_size
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < NUM_PROCESSES:
        raise UserError(f"this benchmark needs {NUM_PROCESSES} cores, and this process may use {len(cores)}")
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(NUM_PROCESSES)
    pipes: list[Connection] = []
    for rank, other in enumerate(context.Pipe()):
        ours, theirs = context.Pipe()
        context.Process(target=worker, args=(rank, cores[rank], size, start, theirs, other), daemon=True).start()
        pipes.append(ours)

    def ask(what: str) -> list[Any]:
        port = free_port()
        for pipe in pipes:
            pipe.send(what)
            if what in {"together", "local", "count"}:
                pipe.send(port)
        return [pipe.recv() for pipe in pipes]

    def rate(how: str) -> float:
        slower: float = max(ask(how))
        return NUM_PROCESSES * NUM_STEPS * float(size) / slower

    line = ratio_line(
        f"two processes of {size} samples, together",
        {
            "ours": lambda: rate("together"),
            "batch norm local": lambda: rate("local"),
            "in step": lambda: rate("in step"),
            "apart": lambda: rate("apart"),
        },
        against="apart",
        target=0.93,
    )
    speed = record.measure(line, num_rounds=arguments.rounds)
    speed["over_apart"] = {
        name: record.rounded(statistics.median(measured[name] / measured["apart"] for measured in speed["rounds"]))
        for name in line.peers
    }
    sent = ask("count")[0]
    for pipe in pipes:
        pipe.send("end")
    least = least_bytes(size)
    ratio = sum(sent.values()) / least
    traffic = {
        "line": "bytes put into collectives in a step, over the least",
        "ratio": record.rounded(ratio),
        "target": {"at_most": 1.05},
        "met": ratio <= 1.05,
        "sent_bytes": sent,
        "least_bytes": least,
    }
    print(record.table(speed), f"  over apart: {speed['over_apart']}", sep="\n")
    print(f"{traffic['line']}\n  ratio {ratio:.4f}, target at most 1.05: {'met' if traffic['met'] else 'NOT MET'}")
    record.save(arguments.out, record.circumstances(packages=["torch"]) | {"results": [speed, traffic]})


if __name__ == "__main__":
    run_command(main)
