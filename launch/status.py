"""Print the state of a run, or of all runs of a study.

python launch/status.py runs/table1

Repeat the command that submitted a study to submit those of its runs again that have failed or stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from data_pipeline.core.errors import run_command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="A run directory, or the directory of a study.")
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    from launch.states import runs_in, status_of, table
    from launch.submitted import queue_for
    from trainer.run_dir import say_what_is_left_out

    say_what_is_left_out([arguments.directory])
    runs = runs_in(arguments.directory.absolute())
    queue = queue_for(runs)
    print(table({run_dir.path.name: status_of(run_dir, queue) for run_dir in runs}))


if __name__ == "__main__":
    run_command(main)
