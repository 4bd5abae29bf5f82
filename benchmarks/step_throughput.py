"""What a training step costs beside its arithmetic: data, micro batches, gradient checkpointing.

    python -m benchmarks.step_throughput TRAIN_DIR [--only data ...] [--rounds R] [--out JSON]

TRAIN_DIR holds pictures without an online overlay (`python -m data_pipeline build cifar10_digits ...`).

- data: steps on batches from the shards, against steps on one batch that stays in memory, for resident data and for a
  stream with one worker.
- micro batches: 16 times the batch in 16 micro batches, against the batch at once; samples a second.
- checkpointing: ResNet-18 in its small form, every block, against none; samples a second, and the peak of what is alive
  in forward and backward, counted exactly.

The peers take turns, round by round. On a GPU the same command measures there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.record import Line, ratio_line
from configs import resolve_recipe
from configs.base import CIFAR10_MEAN, CIFAR10_STD
from data_pipeline.core.batch import Batch
from data_pipeline.core.errors import run_command
from trainer.build import build_training
from trainer.config import RunConfig
from trainer.data import open_stream
from trainer.memory import keep_freed_memory
from trainer.planning.live_bytes import LiveBytes

LINES = ("data", "micro batches", "checkpointing")


def configure(train_dir: Path, *overrides: str) -> RunConfig:
    """Return `simclr:digits_small` with the overlay as it is baked into the shards, and with overrides of `--set`."""
    return resolve_recipe("simclr:digits_small", [f"data.train_dir={train_dir}", "data.overlay=baked", *overrides])


def step_of(config: RunConfig, device: torch.device) -> Callable[[Batch], None]:
    """A step of training from fresh weights, as the loop does it."""
    step = build_training(config, num_samples=1, device=device).step

    def run(batch: Batch) -> None:
        step(batch, learning_rates={"encoder": 1e-3})

    return run


def batches(config: RunConfig, device: torch.device) -> Iterator[Batch]:
    """Without an end."""
    size = config.global_batch_size
    return iter(open_stream(config.data, global_batch_size=size, seed=0, end_step=1 << 20, device=device))


def rate(run: Callable[[Batch], None], stream: Iterator[Batch], *, num_steps: int, device: torch.device) -> float:
    """Samples a second over so many steps."""
    wait_for(device)
    start = time.perf_counter()
    num_samples = 0
    for batch in itertools.islice(stream, num_steps):
        run(batch)
        num_samples += len(batch)
    wait_for(device)
    return num_samples / (time.perf_counter() - start)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def data_lines(train_dir: Path, device: torch.device) -> Iterator[Line]:
    for placement, num_workers in (("auto", 0), ("stream", 1)):
        config = configure(train_dir, f"data.placement={placement}", f"data.num_workers={num_workers}")
        run, stream = step_of(config, device), batches(config, device)
        held = next(stream)
        run(held)
        yield ratio_line(
            f"training from shards, placement {placement}, {num_workers} workers",
            {
                "ours": lambda run=run, stream=stream: rate(run, stream, num_steps=12, device=device),  # type: ignore[misc]
                "one batch in memory": lambda run=run, held=held: rate(  # type: ignore[misc]
                    run, itertools.repeat(held), num_steps=12, device=device
                ),
            },
            against="one batch in memory",
            target=0.97,
        )


def micro_batch_lines(train_dir: Path, device: torch.device) -> Iterator[Line]:
    base = 64
    small = configure(train_dir, f"global_batch_size={base}")
    in_pieces = ("memory.micro_batches=16", "objective.chunk_size=512")
    large = configure(train_dir, f"global_batch_size={16 * base}", *in_pieces)
    (run, stream), (run_large, stream_large) = (
        (step_of(each, device), batches(each, device)) for each in (small, large)
    )
    run(next(stream))
    yield ratio_line(
        f"a batch of {16 * base} in 16 micro batches",
        {
            "ours": lambda: rate(run_large, stream_large, num_steps=1, device=device),
            f"a batch of {base} at once": lambda: rate(run, stream, num_steps=16, device=device),
        },
        against=f"a batch of {base} at once",
        target=1 / 1.4,
    )


def checkpointing_lines(train_dir: Path, device: torch.device) -> Iterator[Line]:
    encoder = f"{{kind: resnet18_small, mean: {list(CIFAR10_MEAN)}, std: {list(CIFAR10_STD)}}}"
    form = (f"encoder={encoder}", "global_batch_size=64")
    plain = configure(train_dir, *form)
    saving = configure(train_dir, *form, "memory.encoder_checkpointing=1")
    batch = next(batches(plain, device))
    runs = {"ours": step_of(saving, device), "nothing computed again": step_of(plain, device)}
    peaks = {}
    for name, run in runs.items():
        run(batch)
        with LiveBytes() as live:
            run(batch)
        peaks[name] = live.peak_bytes
    yield ratio_line(
        "gradient checkpointing of every block, ResNet-18, batch 64",
        {
            name: lambda run=run: rate(run, itertools.repeat(batch), num_steps=1, device=device)  # type: ignore[misc]
            for name, run in runs.items()
        },
        against="nothing computed again",
        target=1 / 1.35,
    )
    yield Line(
        "peak of what is alive in such a step, with checkpointing over without",
        "bytes",
        {name: lambda peak=peak: peak for name, peak in peaks.items()},  # type: ignore[misc]
        lambda peaks: peaks["ours"] / peaks["nothing computed again"],
        "ratio",
        target=0.5,
        at_most=True,
    )


def main() -> None:
    parser = record.benchmark_parser(__doc__, rounds=5)
    parser.add_argument("train_dir", type=Path, metavar="TRAIN_DIR")
    parser.add_argument("--only", nargs="+", choices=LINES, default=LINES, metavar="LINE", help=", ".join(LINES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    keep_freed_memory()
    lines = {"data": data_lines, "micro batches": micro_batch_lines, "checkpointing": checkpointing_lines}
    results = []
    for group in arguments.only:
        results += record.measure_each(lines[group](arguments.train_dir, device), num_rounds=arguments.rounds)
    circumstances = record.circumstances(packages=["torch"])
    record.save(arguments.out, {**circumstances, "device": str(device), "results": results})


if __name__ == "__main__":
    run_command(main)
