"""Measure everything that needs a GPU, on one that is lent for a short time; the next session goes on where it stopped.

    python -m benchmarks.gpu --budget-minutes 9.5 --commit SHA [--stages A,B] [--only A] [--list] [--dry-run-tiny]

The stages, in the order of their worth:

- kernels: the rate of large products of matrices, to which all shares refer; the tests of models and views;
- throughput-256: short trainings of C+Digits: recorded, compiled and recorded, plain;
- digits, ours, table2, shapes, digits-masked, cifar10, letters, pairs, firing: the runs of the papers, at their
  published size, each with its readouts;
- seeds: the same with the other seeds;
- tests, trace, throughput-1024, throughput-4096, peers: all other tests that need a GPU; the kernels that take most of
  the time; larger batches; lightly's SimCLR and the original's viewmaker.

DIR/gpu_CARD.json gets each result at once; it begins as the filed record of the card. Runs that are filed for any card
are not made again, and figures of speed are if the card or the commit is another one. A training that the end of a
session stops goes on from its checkpoint in DIR/runs. docs/performance.md has the commands of a visit.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import record
from benchmarks.gpu_stages import gpu_tests, kernel_trace, peers, runs
from benchmarks.gpu_stages.session import Setting, Stage, begin_session, done_where, run_stage
from data_pipeline.core.arguments import number
from data_pipeline.core.errors import UserError, nearest, run_command

_FIRST_SPEED, *_SPEEDS = runs.SPEED_STAGES
STAGES: Final[tuple[Stage, ...]] = (
    *(gpu_tests.KERNELS, _FIRST_SPEED, *runs.STAGES),
    *(gpu_tests.STAGE, kernel_trace.STAGE, *_SPEEDS, peers.STAGE),
)
_PACKAGES: Final = ("torch", "torchvision", "triton", "numpy", "lightly", "simplejpeg")
_minutes = number("a positive number of minutes", lambda minutes: 0 < minutes <= 10_000)


def circumstances(setting: Setting, *, commit: str | None) -> dict[str, Any]:
    """Return what the figures of a session depend on: GPU, machine, command, commit."""
    facts = record.circumstances(packages=_PACKAGES)
    # The places on a lent machine mean nothing elsewhere.
    words = str(facts["command"]).split(" ")
    facts["command"] = " ".join(Path(word).name if word.startswith("/") else word for word in words)
    facts["git_commit"] = commit or facts["git_commit"]
    facts["device"] = "cpu"
    if setting.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(setting.device)
        facts["device"] = gpu.name
        facts["gpu"] = {
            "gigabytes": record.rounded(gpu.total_memory / 1e9),
            "capability": [gpu.major, gpu.minor],
            "multiprocessors": gpu.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "architectures": torch.cuda.get_arch_list(),
        }
    return facts


def choose_gpu() -> torch.device:
    """Return the first GPU. Raises `UserError` if there is none."""
    if not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} sees no GPU; check nvidia-smi, or try the stages on the CPU with --dry-run-tiny"
        )
    return torch.device("cuda", 0)


def chosen(names: str | None) -> list[Stage]:
    """Return the named stages in the order of their worth; None stands for all. Raises `UserError` for another name."""
    by_name = {stage.name: stage for stage in STAGES}
    wanted = list(by_name) if names is None else names.split(",")
    for name in wanted:
        if name not in by_name:
            raise UserError(f'--stages names "{name}", which is no stage{nearest(name, by_name)}')
    return [stage for name, stage in by_name.items() if name in wanted]


def listing(stages: Sequence[Stage], setting: Setting) -> str:
    """Return a line for each stage: its expected minutes, and how many measurements are filed, of which commits."""
    lines = []
    for stage in stages:
        tasks = stage.wanted(setting)
        minutes = sum(task.expected_seconds or task.needs_seconds for task in tasks.values()) / 60
        done = [where for name in tasks if (where := done_where(stage.name, name, setting)) is not None]
        places = sorted({f"{where.get('device')} at {str(where.get('git_commit'))[:8]}" for where in done})
        filed = f"{len(done)} of {len(tasks)} filed" + (f" ({', '.join(places)})" if places else "")
        lines.append(f"{stage.name:16}{minutes:7.1f} min   {filed}")
    return "\n".join(lines)


def run_session(stages: Sequence[Stage], setting: Setting, *, commit: str | None, is_isolated: bool = True) -> None:
    """Run the stages, and print a line for each, and where the record is."""
    began = time.time()
    session = begin_session(setting, circumstances(setting, commit=commit))
    print(f"{setting.record} gets each measurement as it ends", flush=True)
    for stage in stages:
        found = run_stage(stage, setting, session=session, is_isolated=is_isolated)
        said = "; ".join(f"{len(names)} {kind}: {', '.join(names)}" for kind, names in found.items() if names)
        minutes, seconds = divmod(round(time.time() - began), 60)
        print(f"[{minutes:2d}:{seconds:02d}] {stage.name}: {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    out = Path("runs/gpu")
    add("--out", type=Path, default=out, metavar="DIR", help=f"the directory of record and runs (default: {out})")
    add("--budget-minutes", type=_minutes, default=25.0, metavar="M", help="when the session ends (default: 25)")
    add("--stages", metavar="A,B", help="only these stages (default: all)")
    add("--only", action="append", default=[], metavar="A", help="only measurements with A in their names; repeatable")
    add("--data", type=Path, default=Path("data"), metavar="DIR", help="the built datasets (default: data)")
    add("--root", type=Path, default=Path(".data"), metavar="DIR", help="the files to build them from (default: .data)")
    add("--commit", metavar="SHA", help="the commit of this code, for a machine to which it came without git")
    add("--list", action="store_true", help="print the stages, their expected minutes and what is filed, and stop")
    add("--dry-run-tiny", action="store_true", help="try every stage on the CPU, with tiny sizes")
    arguments = parser.parse_args()
    is_tiny, stages = arguments.dry_run_tiny, chosen(arguments.stages)
    setting = Setting(
        device=torch.device("cpu") if is_tiny or arguments.list else choose_gpu(),
        out=arguments.out,
        data=arguments.data,
        root=arguments.root,
        is_tiny=is_tiny,
        ends_at=time.time() + 60 * arguments.budget_minutes,
        only=tuple(arguments.only),
    )
    if arguments.list:
        print(listing(stages, setting))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of `timeout` and of batch systems: end the stage, too
    run_session(stages, setting, commit=arguments.commit)


if __name__ == "__main__":
    run_command(main)
