"""`python -m trainer.report RUN_DIR...`: one self-contained HTML file that compares runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from data_pipeline.errors import run_command
from trainer.reporting.page import page
from trainer.reporting.publish import publish
from trainer.reporting.runs import arms_of, read_runs
from trainer.rundir import RunDir, write_atomically


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.report", description=__doc__)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument(
        "--out", type=Path, help="file to write (default: RUN_DIR/report.html; of several: ./report.html)"
    )
    parser.add_argument("--wandb", action="store_true", help="also log it to Weights & Biases; needs a login")
    arguments = parser.parse_args()
    runs = read_runs(arguments.run_dirs)
    out = arguments.out or (RunDir(arguments.run_dirs[0]).report if len(runs) == 1 else Path("report.html"))
    write_atomically(out, page(arms_of(runs)))
    if arguments.wandb:
        publish(out, project=runs[0].config.tracking.wandb_project)
    print(out)


if __name__ == "__main__":
    run_command(main)
