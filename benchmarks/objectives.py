"""NT-Xent against lightly's, and against the contrastive loss of open_clip: time and memory, forward and backward.

    python -m benchmarks.objectives [--batch-sizes B ...] [--only PEER ...] [--rounds R] [--out JSON]

At batch B, NT-Xent compares 2 B embeddings with each other: (2 B)^2 logits. open_clip's loss compares P pictures with P
texts and makes that matrix twice, 2 P^2 logits, so it is given P = 1.41 B pairs: as many logits. It comes last, where
the package open_clip_torch is installed.

With several batch sizes, a last line says how the memory of ours grows from the smallest to the largest. Time grows
with the square of the batch.

Each measurement is one forward and one backward in a fresh process that has done a pass of batch 1,024 before: then
libraries are loaded, and matrix products hold their work space, which is no loss's own. What that pass left unused is
given back to the system, and the peak starts anew. So memory is the peak of resident memory above what the process
holds with the embeddings there, and the gradients by the embeddings are part of it. The peers take turns, round by
round; one thread, and its processor time. Memory is read from /proc, so this runs on Linux.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightly.loss import NTXentLoss
from torch import Tensor
from torch.nn import functional as F

from benchmarks import record
from benchmarks.record import Line, replayed
from data_pipeline.core.errors import run_command
from trainer.objectives import nt_xent_loss

TEMPERATURE = 0.5
EMBEDDING_SIZE = 128
WARM_UP_SIZE = 1024
OURS, OURS_WHOLE, LIGHTLY, OPEN_CLIP = "ours, in chunks", "ours, whole matrix", "lightly", "open_clip, as many logits"


@dataclass(frozen=True)
class Passed:
    """One forward and backward: seconds of processor time, `peak_bytes` above what was held before, the loss."""

    seconds: float
    peak_bytes: int
    loss: float


def lightly(z_a_BD: Tensor, z_b_BD: Tensor, chunk_size: int) -> Tensor:
    loss: Tensor = NTXentLoss(temperature=TEMPERATURE)(z_a_BD, z_b_BD)
    return loss


def open_clip(z_a_BD: Tensor, z_b_BD: Tensor, chunk_size: int) -> Tensor:
    """Which expects unit vectors."""
    clip_loss: Any = importlib.import_module("open_clip.loss").ClipLoss()
    loss: Tensor = clip_loss(F.normalize(z_a_BD, dim=1), F.normalize(z_b_BD, dim=1), 1 / TEMPERATURE)
    return loss


def whole(z_a_BD: Tensor, z_b_BD: Tensor, chunk_size: int) -> Tensor:
    return nt_xent_loss(z_a_BD, z_b_BD, temperature=TEMPERATURE).loss


def chunked(z_a_BD: Tensor, z_b_BD: Tensor, chunk_size: int) -> Tensor:
    return nt_xent_loss(z_a_BD, z_b_BD, temperature=TEMPERATURE, chunk_size=chunk_size).loss


LOSSES: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    OURS: chunked,
    OURS_WHOLE: whole,
    LIGHTLY: lightly,
    OPEN_CLIP: open_clip,
}


def one_pass(name: str, batch_size: int, chunk_size: int) -> Passed:
    """In a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_one_pass, (name, batch_size, chunk_size))


def _one_pass(name: str, batch_size: int, chunk_size: int) -> Passed:
    torch.set_num_threads(1)
    _forward_and_backward(name, _embeddings(WARM_UP_SIZE), chunk_size)
    num = round(math.sqrt(2) * batch_size) if name == OPEN_CLIP else batch_size
    embeddings = _embeddings(num)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is what is held now
    held_before = _status_bytes("VmRSS")
    seconds, loss = _forward_and_backward(name, embeddings, chunk_size)
    return Passed(seconds, _status_bytes("VmHWM") - held_before, loss)


def _embeddings(batch_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z_a_BD, z_b_BD = (torch.randn(batch_size, EMBEDDING_SIZE, generator=generator) for _ in range(2))
    return z_a_BD.requires_grad_(), z_b_BD.requires_grad_()


def _forward_and_backward(name: str, embeddings: tuple[Tensor, Tensor], chunk_size: int) -> tuple[float, float]:
    """Seconds, and the loss."""
    start = time.process_time()
    loss = LOSSES[name](*embeddings, chunk_size)
    torch.autograd.backward(loss)
    return time.process_time() - start, loss.item()


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def lines_of(batch_size: int, passes: Mapping[str, Sequence[Passed]]) -> list[Line]:
    """Time and memory of the peers, judged against lightly's, and time against open_clip's, if those were measured."""

    def line(what: str, unit: str, read: Callable[[Passed], float], against: str, target: float) -> Line:
        return Line(
            f"{what} of NT-Xent, batch {batch_size:,}, dimension {EMBEDDING_SIZE}: ours over {against}",
            unit,
            {name: replayed([read(passed) for passed in of_peer]) for name, of_peer in passes.items()},
            lambda measured: measured[OURS] / measured[against],
            "ratio",
            target,
            at_most=True,
        )

    lines = []
    if LIGHTLY in passes:
        lines.append(line("time", "s", lambda passed: passed.seconds, LIGHTLY, 0.5))
        lines.append(line("memory", "MB", lambda passed: passed.peak_bytes / 1e6, LIGHTLY, 0.05))
    if OPEN_CLIP in passes:
        lines.append(line("time", "s", lambda passed: passed.seconds, OPEN_CLIP, 1.0))
    return lines


def growth_line(of_ours: Mapping[int, Sequence[Passed]]) -> Line:
    """Compare the memory of ours at the largest batch with that at the smallest, for the same number of embeddings."""
    smallest, largest = min(of_ours), max(of_ours)
    megabytes = {f"batch {size:,}": [each.peak_bytes / 1e6 for each in passes] for size, passes in of_ours.items()}
    return Line(
        f"memory at batch {largest:,} over that at {smallest:,}, times {largest // smallest}: 1 is linear",
        "MB",
        {name: replayed(values) for name, values in megabytes.items()},
        lambda measured: measured[f"batch {largest:,}"] / measured[f"batch {smallest:,}"] * smallest / largest,
        "ratio",
        1.2,
        at_most=True,
    )


def main() -> None:
    parser = record.benchmark_parser("time and memory of NT-Xent against lightly's, of open_clip's loss", rounds=3)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4096], metavar="B", help="pictures a batch")
    parser.add_argument("--chunk-size", type=int, default=512, metavar="N", help="anchors at a time")
    parser.add_argument("--only", nargs="+", choices=LOSSES, default=[*LOSSES], metavar="PEER", help="; ".join(LOSSES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    has_open_clip = importlib.util.find_spec("open_clip") is not None
    before = record.circumstances(packages=["torch", "lightly", *(["open_clip_torch"] if has_open_clip else [])])
    peers = [name for name in LOSSES if name in args.only and (name != OPEN_CLIP or has_open_clip)]
    results: list[dict[str, Any]] = []
    of_ours: dict[int, list[Passed]] = {}
    for batch_size in args.batch_sizes:
        passes: dict[str, list[Passed]] = {name: [] for name in peers}
        for _ in range(args.rounds):
            for name, of_peer in passes.items():
                of_peer.append(one_pass(name, batch_size, args.chunk_size))
        values = ", ".join(f"{name} {of_peer[0].loss:.6f}" for name, of_peer in passes.items())
        print(f"batch {batch_size:,}; values: {values}")
        results += record.measure_each(lines_of(batch_size, passes), num_rounds=args.rounds)
        of_ours |= {batch_size: passes[OURS]} if OURS in passes else {}
    if len(of_ours) > 1:
        results += record.measure_each([growth_line(of_ours)], num_rounds=args.rounds)
    settings = {"rounds": args.rounds, "chunk_size": args.chunk_size, "warm_up_batch": WARM_UP_SIZE}
    record.save(args.out, {**before, **settings, "lines": results})


if __name__ == "__main__":
    run_command(main)
