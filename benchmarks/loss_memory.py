"""How the memory of NT-Xent in tiles grows with the batch: one forward and backward at each size.

    python -m benchmarks.loss_memory [--batch-sizes B ...] [--out JSON]

Measured as in `benchmarks.objectives`. Time grows with the square of the batch: on one core of 2026, batch 65,536 takes
two minutes and batch 131,072 about ten.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import record
from benchmarks.objectives import EMBEDDING_SIZE, OURS, WARM_UP_SIZE, Passed, one_pass
from benchmarks.record import Line, replayed
from data_pipeline.core.errors import run_command

GIGABYTE_SIZE = 65_536


def lines_of(passes: dict[int, Passed]) -> list[Line]:
    """Growth from the smallest batch to the largest, and batch 65,536 against 1 GB, if it is one of them."""
    smallest, largest = min(passes), max(passes)
    megabytes = {f"batch {size:,}": passed.peak_bytes / 1e6 for size, passed in passes.items()}
    lines = [
        Line(
            f"memory at batch {largest:,} over that at {smallest:,}, times {largest // smallest}: 1 is linear",
            "MB",
            {name: replayed([value]) for name, value in megabytes.items()},
            lambda measured: measured[f"batch {largest:,}"] / measured[f"batch {smallest:,}"] * smallest / largest,
            "ratio",
            1.2,
            at_most=True,
        )
    ]
    if GIGABYTE_SIZE in passes:
        value = passes[GIGABYTE_SIZE].peak_bytes / 1e9
        title = f"gigabytes at batch {GIGABYTE_SIZE:,}"
        lines.append(Line(title, "GB", {"ours": replayed([value])}, lambda m: m["ours"], "ratio", 1.0, at_most=True))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="memory of NT-Xent in tiles from one batch size to the next")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8192, 16384, 32768], metavar="B")
    parser.add_argument("--chunk-size", type=int, default=512, metavar="N", help="rows of a tile")
    parser.add_argument("--out", type=Path, metavar="JSON", help="where to file what was measured")
    args = parser.parse_args()
    before = record.circumstances(packages=["torch"])
    passes = {}
    print(f"{'batch':>8}{'MB':>10}{'bytes an embedding':>20}{'seconds':>10}")
    for size in sorted(args.batch_sizes):
        passes[size] = one_pass(OURS, size, args.chunk_size)
        peak, seconds = passes[size].peak_bytes, passes[size].seconds
        print(f"{size:>8,}{peak / 1e6:>10,.1f}{peak / (2 * size):>20,.0f}{seconds:>10,.1f}", flush=True)
    results = record.measure_each(lines_of(passes), num_rounds=1)
    settings = {"chunk_size": args.chunk_size, "dimension": EMBEDDING_SIZE, "warm_up_batch": WARM_UP_SIZE}
    seconds_of = {f"{size}": record.rounded(passed.seconds) for size, passed in passes.items()}
    record.save(args.out, {**before, **settings, "seconds": seconds_of, "lines": results})


if __name__ == "__main__":
    run_command(main)
