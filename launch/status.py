"""Print the state of runs, and of all runs of studies.

python launch/status.py runs/table1

Repeat the command that submitted a study to submit those of its runs again that have failed or stopped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # a script; else it would run the code of another clone that is installed here
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_pipeline.core.errors import run_command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    help_of_paths = "Run directories, and directories of studies."
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIR", help=help_of_paths)
    return parser


def main() -> None:
    paths = [path.absolute() for path in _parser().parse_args().directories]
    from launch.states import runs_in, status_of, table
    from launch.submitted import queue_for
    from trainer.run_dir import say_what_is_left_out

    say_what_is_left_out(paths)
    runs = runs_in(paths)
    queue = queue_for(runs)
    names = [str(Path(*run_dir.path.parts[-1 if len(paths) == 1 else -2 :])) for run_dir in runs]
    print(table(zip(names, [status_of(run_dir, queue) for run_dir in runs], strict=True)))


if __name__ == "__main__":
    run_command(main)
