"""`python -m trainer.report RUN_DIR...`: one self-contained HTML file that compares runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from data_pipeline.errors import run_command
from trainer.reporting.page import page
from trainer.reporting.runs import arms_of, read_runs
from trainer.rundir import RunDir, write_atomically


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.report", description=__doc__)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument(
        "--out", type=Path, help="file to write (default: RUN_DIR/report.html; of several: ./report.html)"
    )
    arguments = parser.parse_args()
    alone = len(arguments.run_dirs) == 1
    out = arguments.out or (RunDir(arguments.run_dirs[0]).report if alone else Path("report.html"))
    write_report(arguments.run_dirs, out)
    print(out)


def write_report(run_dirs: list[Path], out: Path) -> None:
    """Write the report of some runs. Raises `UserError` where one is not a run directory."""
    write_atomically(out, page(arms_of(read_runs(run_dirs))))


if __name__ == "__main__":
    run_command(main)
