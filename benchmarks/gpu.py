"""Measure everything that needs a GPU, on one that is lent for half an hour; the next session goes on where it stopped.

    python -m benchmarks.gpu --budget-minutes 25 --out DIR [--root PICTURES] [--stages A,B] [--dry-run-tiny]

The stages, in the order of their worth:

- machine: the rate of large products of matrices, to which the shares of the others refer;
- checks: recorded steps against plain steps, a step on the GPU against the CPU, the tests that need a GPU;
- throughput-256, trace, throughput-1024, throughput-4096: our training, plain and recorded, against lightly's SimCLR
  and the original's viewmaker; and the 20 kernels that take most of the time;
- compiled: our training with torch.compile;
- digits, shapes: the recipes of Table 1 at their published size, expert views and then a viewmaker, with probes.

DIR/gpu.json gets each result at once. A run that did not end lies in DIR in pieces below 16 MB; copy DIR to the next
machine, and the run goes on. What DIR or benchmarks/results/gpu*.json holds is not measured again. Without a network,
the command needs the packages of setup.py, and the pictures or built datasets; docs/performance.md has the steps.
"""

from __future__ import annotations

import argparse
import ast
import platform
import signal
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import record
from benchmarks.gpu_stages import checks, kernel_trace, science, throughput
from benchmarks.gpu_stages.session import RESULTS, Setting, Stage, begin_session, read_record, run_stage
from data_pipeline.core.errors import UserError, nearest, run_command
from data_pipeline.sources.digits import MNIST_KINDS
from trainer.distributed.environment import why_gpu_is_unusable

ROOT = Path(__file__).parents[1]
_MACHINE, *_THROUGHPUT, _COMPILED = throughput.STAGES
STAGES: Final[tuple[Stage, ...]] = (
    *(_MACHINE, checks.STAGE, _THROUGHPUT[0], kernel_trace.STAGE),
    *(*_THROUGHPUT[1:], _COMPILED, *science.STAGES),
)
_PACKAGES: Final = ("torch", "torchvision", "triton", "numpy", "lightly")


def circumstances(setting: Setting, *, commit: str | None) -> dict[str, Any]:
    """Return what the figures of a session depend on: GPU, machine, command, commit."""
    facts = record.circumstances(packages=_PACKAGES)
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


def missing_packages() -> list[str]:
    """Return the packages of setup.py that are not installed, by their requirement."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    (required,) = (
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "install_requires"
    )
    missing = []
    for requirement in required:
        name = requirement.partition("=")[0].partition(">")[0]
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(requirement)
    return missing


def check_machine(*, is_tiny: bool) -> torch.device:
    """Return the device to measure on. Raises `UserError` if it cannot be used or packages are missing."""
    if missing := missing_packages():
        wheels = f"python{platform.python_version().rpartition('.')[0]} -m pip download --no-deps -d wheels"
        raise UserError(
            f"{len(missing)} packages of setup.py are not installed; on a machine with a network, run `{wheels} "
            f"{' '.join(missing)}`, and here `pip install --no-index --no-deps wheels/*`"
        )
    if is_tiny:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} sees no GPU; check nvidia-smi, or try the stages on the CPU with --dry-run-tiny"
        )
    device = torch.device("cuda", 0)
    if (reason := why_gpu_is_unusable(device)) is not None:
        raise UserError(reason)
    return device


def chosen(names: str | None) -> list[Stage]:
    """Return the named stages in the order of their worth; None stands for all. Raises `UserError` for another name."""
    by_name = {stage.name: stage for stage in STAGES}
    wanted = list(by_name) if names is None else names.split(",")
    for name in wanted:
        if name not in by_name:
            raise UserError(f'--stages names "{name}", which is no stage{nearest(name, by_name)}')
    return [stage for name, stage in by_name.items() if name in wanted]


def run_session(
    stages: Sequence[Stage],
    setting: Setting,
    *,
    commit: str | None = None,
    is_isolated: bool = True,
    again: bool = False,
) -> None:
    """Run the stages, print a line for each, and say where the record is."""
    began = time.time()
    session = begin_session(setting, circumstances(setting, commit=commit))
    for stage in stages:
        try:
            said = str(run_stage(stage, setting, session=session, is_isolated=is_isolated, again=again))
        except KeyboardInterrupt:
            print(f"{stage.name}: interrupted; {setting.record} has all that was measured", flush=True)
            raise
        minutes, seconds = divmod(round(time.time() - began), 60)
        print(f"[{minutes:2d}:{seconds:02d}] {stage.name}: {said}", flush=True)
    num = sum(len(of_stage) for of_stage in read_record(setting.record).stages.values())
    print(f"{setting.record} holds {num} measurements")


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0 < minutes <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of minutes")
    return minutes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="the record, and the pieces of unfinished runs")
    add("--budget-minutes", type=_minutes, default=25.0, metavar="M", help="when the session ends (default: 25)")
    add("--stages", metavar="A,B", help=f"only these of {', '.join(stage.name for stage in STAGES)}")
    add("--data", type=Path, default=Path("data"), metavar="DIR", help="the built datasets (default: data)")
    add("--root", type=Path, metavar="DIR", help="the pictures and MNIST/raw from which missing datasets are built")
    add("--digits", choices=MNIST_KINDS, default="mnist", help="the digits that are drawn (default: mnist)")
    add("--runs", type=Path, default=Path("runs/gpu"), metavar="DIR", help="the run directories (default: runs/gpu)")
    add("--commit", metavar="SHA", help="the commit of this code, for a machine to which it came without git")
    add("--again", action="store_true", help="repeat what an earlier session has filed")
    add("--dry-run-tiny", action="store_true", help="try every stage on the CPU, with tiny sizes")
    arguments = parser.parse_args()
    ends_at = time.time() + 60 * arguments.budget_minutes
    stages = chosen(arguments.stages)
    is_tiny = arguments.dry_run_tiny
    setting = Setting(
        device=check_machine(is_tiny=is_tiny),
        out=arguments.out,
        data=arguments.data,
        runs=arguments.runs,
        root=arguments.root,
        digits=arguments.digits,
        is_tiny=is_tiny,
        ends_at=ends_at,
        known=() if is_tiny else tuple(sorted(RESULTS.glob("gpu*.json"))),
    )

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)  # of `timeout` and of batch systems
    run_session(stages, setting, commit=arguments.commit, again=arguments.again)


if __name__ == "__main__":
    run_command(main)
