"""NT-Xent against lightly's, forward and backward: time and peak memory at one batch size after another.

    python benchmarks/objectives.py                            batches 1,024 and 4,096, a minute on 2 cores
    python benchmarks/objectives.py --batch-sizes 8192

Each loss runs in a fresh process, so that its peak of resident memory is its own; the time is the best of the repeats.
Memory is read from /proc, so this runs on Linux.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from lightly.loss import NTXentLoss
from torch import Tensor

from trainer.objectives import nt_xent_loss

TEMPERATURE = 0.5
EMBEDDING_SIZE = 128


@dataclass(frozen=True)
class Result:
    """`seconds` of one forward and backward pass; `peak_bytes` above what the process held before; the loss itself."""

    seconds: float
    peak_bytes: int
    loss: float


def lightly(z_a_BD: Tensor, z_b_BD: Tensor, chunk_size: int) -> Tensor:
    loss: Tensor = NTXentLoss(temperature=TEMPERATURE)(z_a_BD, z_b_BD)
    return loss


def full(z_a_BD: Tensor, z_b_BD: Tensor, chunk_size: int) -> Tensor:
    return nt_xent_loss(z_a_BD, z_b_BD, temperature=TEMPERATURE)


def chunked(z_a_BD: Tensor, z_b_BD: Tensor, chunk_size: int) -> Tensor:
    return nt_xent_loss(z_a_BD, z_b_BD, temperature=TEMPERATURE, chunk_size=chunk_size)


LOSSES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"lightly": lightly, "full": full, "chunked": chunked}


def measure(name: str, batch_size: int, chunk_size: int, repeats: int) -> Result:
    forward_and_backward(name, 32, chunk_size)  # loads libraries, starts threads
    held_before = _status_bytes("VmRSS")
    passes = [forward_and_backward(name, batch_size, chunk_size) for _ in range(repeats)]
    seconds, loss = min(passes)
    return Result(seconds, _status_bytes("VmHWM") - held_before, loss)


def forward_and_backward(name: str, batch_size: int, chunk_size: int) -> tuple[float, float]:
    """Seconds, and the loss."""
    z_VBD = torch.randn(2, batch_size, EMBEDDING_SIZE, generator=torch.Generator().manual_seed(0), requires_grad=True)
    start = time.perf_counter()
    loss = LOSSES[name](z_VBD[0], z_VBD[1], chunk_size)
    torch.autograd.backward(loss)
    return time.perf_counter() - start, loss.item()


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and peak memory of NT-Xent against lightly's, in one run.")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1024, 4096], metavar="B", help="pictures a batch"
    )
    parser.add_argument("--chunk-size", type=int, default=512, help="rows of a tile of the chunked loss")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    print(f"dimension {EMBEDDING_SIZE}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'batch':>6} {'loss':<8} {'seconds':>8} {'peak MB':>8} {'faster':>7} {'smaller':>8}   value")
    for batch_size in arguments.batch_sizes:
        results = {}
        for name in LOSSES:
            with spawn.Pool(1) as pool:
                task = (name, batch_size, arguments.chunk_size, arguments.repeats)
                results[name] = pool.apply(measure, task)
        peer = results["lightly"]
        for name, result in results.items():
            faster, smaller = peer.seconds / result.seconds, peer.peak_bytes / result.peak_bytes
            print(
                f"{batch_size:>6} {name:<8} {result.seconds:>8.3f} {result.peak_bytes / 1e6:>8.0f} "
                f"{faster:>6.1f}x {smaller:>7.1f}x   {result.loss:.6f}"
            )


if __name__ == "__main__":
    main()
