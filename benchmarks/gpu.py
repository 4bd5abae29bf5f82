"""Measure everything that needs a GPU, on one that is lent for half an hour; the next session goes on where it stopped.

    python -m benchmarks.gpu --budget-minutes 25 --out DIR [--root PICTURES] [--stages A,B] [--dry-run-tiny]

The stages, in the order of their worth:

- machine: the rate of large products of matrices, to which the shares of the others refer;
- checks: recorded steps against plain steps, a step on the GPU against the CPU, the tests that need a GPU;
- throughput-256: our training, plain and recorded, against lightly's SimCLR and the original's viewmaker;
- compiled: our training with torch.compile, and with a recorded step too;
- trace: the 20 kernels that take most of the time;
- probe: a linear probe and kNN on features in the memory of the GPU;
- throughput-1024, throughput-4096: as throughput-256, with larger batches;
- digits, shapes, cifar10: the recipes of Table 1 at their published size, expert views and a viewmaker, with probes.
  Both recipes of a stage get a part of the time that is left.

DIR/gpu.json gets each result at once. A run that did not end lies in DIR in pieces below 16 MB; copy DIR to the next
machine, and the run goes on. What DIR or benchmarks/results/gpu*.json holds is not measured again. Without a network,
the command needs the packages of setup.py, and the pictures or built datasets; docs/performance.md has the steps.
"""

from __future__ import annotations

import argparse
import ast
import platform
import re
import shlex
import signal
import time
from importlib import metadata
from pathlib import Path

from data_pipeline.core.arguments import number
from data_pipeline.core.errors import UserError, run_command

ROOT = Path(__file__).parents[1]


def missing_packages() -> list[str]:
    """Return the packages of setup.py that are not installed, by their requirement."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (required,) = (
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "install_requires"
    )
    missing = []
    for requirement in required:
        name = re.split(r"[\[=>]", requirement)[0]
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(requirement)
    return missing


def check_packages() -> None:
    """Raise `UserError` if packages of setup.py are not installed."""
    if missing := missing_packages():
        named = shlex.join(missing)
        pip = f"python{platform.python_version().rpartition('.')[0]} -m pip"
        raise UserError(
            f"{len(missing)} package(s) of setup.py are missing; on a machine with a network, run `{pip} download "
            f"-d wheels {named}`, and here `{pip} install --no-index --find-links wheels {named}`"
        )


_minutes = number("a positive number of minutes", lambda minutes: 0 < minutes <= 10_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="the record, and the pieces of unfinished runs")
    add("--budget-minutes", type=_minutes, default=25.0, metavar="M", help="when the session ends (default: 25)")
    add("--stages", metavar="A,B", help="only these stages (default: all)")
    add(
        "--only",
        action="append",
        default=[],
        metavar="A",
        help="only measurements with A in their names; may be repeated",
    )
    add("--epochs", type=int, metavar="N", help="the epochs of digits, shapes and cifar10 (default: 200)")
    add("--data", type=Path, default=Path("data"), metavar="DIR", help="the built datasets (default: data)")
    add("--root", type=Path, metavar="DIR", help="the pictures and MNIST/raw from which missing datasets are built")
    add("--digits", metavar="KIND", default="mnist", help="the digits that are drawn (default: mnist)")
    add("--runs", type=Path, default=Path("runs/gpu"), metavar="DIR", help="the run directories (default: runs/gpu)")
    add("--commit", metavar="SHA", help="the commit of this code, for a machine to which it came without git")
    add("--again", action="store_true", help="repeat what an earlier session has filed")
    add("--dry-run-tiny", action="store_true", help="try every stage on the CPU, with tiny sizes")
    arguments = parser.parse_args()
    ends_at = time.time() + 60 * arguments.budget_minutes
    check_packages()
    import torch  # not before packages that are missing are named

    from benchmarks.gpu_stages.all_stages import choose_gpu, chosen, run_session
    from benchmarks.gpu_stages.session import RESULTS, Setting

    stages = chosen(arguments.stages)
    is_tiny = arguments.dry_run_tiny
    setting = Setting(
        device=torch.device("cpu") if is_tiny else choose_gpu(),
        out=arguments.out,
        data=arguments.data,
        runs=arguments.runs,
        root=arguments.root,
        digits=arguments.digits,
        is_tiny=is_tiny,
        ends_at=ends_at,
        only=tuple(arguments.only),
        num_epochs=arguments.epochs,
        known=() if is_tiny else tuple(sorted(RESULTS.glob("gpu*.json"))),
    )

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)  # of `timeout` and of batch systems
    run_session(stages, setting, commit=arguments.commit, again=arguments.again)


if __name__ == "__main__":
    run_command(main)
