"""Measure everything that needs a GPU, on one that is lent for half an hour; the next session goes on where it stopped.

    python -m benchmarks.gpu --budget-minutes 25 --out DIR [--stages A,B] [--dry-run-tiny]

The stages, in the order of their worth:

- machine: the rate of large products of matrices, to which the shares of the others refer;
- checks: recorded steps against plain steps, a step on the GPU against the CPU, the tests that need a GPU;
- throughput-256: our training, plain and recorded, against lightly's SimCLR and the original's viewmaker;
- compiled: our training with torch.compile, and with a recorded step too;
- trace: the 20 kernels that take most of the time;
- probe: a linear probe and kNN on features in the memory of the GPU;
- throughput-1024, throughput-4096: as throughput-256, with larger batches.

DIR/gpu.json gets each result at once, and what it holds for this kind of GPU is not measured again.
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
from benchmarks.gpu_stages import checks, kernel_trace, probe, throughput
from benchmarks.gpu_stages.session import Setting, Stage, begin_session, run_stage
from data_pipeline.core.arguments import number
from data_pipeline.core.errors import UserError, nearest, run_command

_MACHINE, *_THROUGHPUT, _COMPILED = throughput.STAGES
STAGES: Final[tuple[Stage, ...]] = (
    *(_MACHINE, checks.STAGE, _THROUGHPUT[0], _COMPILED, kernel_trace.STAGE),
    *(probe.STAGE, *_THROUGHPUT[1:]),
)
_PACKAGES: Final = ("torch", "torchvision", "triton", "numpy", "lightly", "simplejpeg")
_minutes = number("a positive number of minutes", lambda minutes: 0 < minutes <= 10_000)


def circumstances(setting: Setting, *, commit: str | None) -> dict[str, Any]:
    """Return what the figures of a session depend on: GPU, machine, command, commit."""
    facts = record.circumstances(packages=_PACKAGES)
    # The places on a lent machine mean nothing elsewhere.
    words = str(facts["command"]).split(" ")
    facts["command"] = " ".join(Path(word).name if word.startswith("/") else word for word in words)
    facts["git_commit"] = facts["git_commit"] or commit
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
    add("--out", type=Path, required=True, metavar="DIR", help="the directory of the record")
    add("--budget-minutes", type=_minutes, default=25.0, metavar="M", help="when the session ends (default: 25)")
    add("--stages", metavar="A,B", help="only these stages (default: all)")
    add("--only", action="append", default=[], metavar="A", help="only measurements with A in their names; repeatable")
    add("--data", type=Path, default=Path("data"), metavar="DIR", help="the built datasets (default: data)")
    add("--commit", metavar="SHA", help="the commit of this code, for a machine to which it came without git")
    add("--dry-run-tiny", action="store_true", help="try every stage on the CPU, with tiny sizes")
    arguments = parser.parse_args()
    is_tiny = arguments.dry_run_tiny
    setting = Setting(
        device=torch.device("cpu") if is_tiny else choose_gpu(),
        out=arguments.out,
        data=arguments.data,
        is_tiny=is_tiny,
        ends_at=time.time() + 60 * arguments.budget_minutes,
        only=tuple(arguments.only),
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of `timeout` and of batch systems: end the stage, too
    run_session(chosen(arguments.stages), setting, commit=arguments.commit)


if __name__ == "__main__":
    run_command(main)
