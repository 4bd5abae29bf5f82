"""`python -m trainer.analyze NAME RUN_DIR...`: figures and numbers that explain a run, in RUN_DIR/analysis/."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from data_pipeline.errors import UserError, nearest, run_command
from trainer.analysis.views import analyze_views
from trainer.rundir import RunDir, open_run


class Analysis(Protocol):
    """Looks at one run, at `step` or the newest checkpoint; returns the files it wrote."""

    def __call__(self, run_dir: RunDir, /, *, step: int | None = None) -> list[Path]: ...


ANALYSES: Mapping[str, Analysis] = {"views": analyze_views}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainer.analyze", description=__doc__)
    parser.add_argument("name", metavar="NAME", help=f"one of: {', '.join(ANALYSES)}")
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--step", type=int, help="checkpoint to look at; 0 is untrained (default: the newest)")
    arguments = parser.parse_args()
    if arguments.name not in ANALYSES:
        raise UserError(f'there is no analysis "{arguments.name}"{nearest(arguments.name, ANALYSES)}')
    runs = [open_run(path) for path in arguments.run_dirs]  # all of them before the first is worked on
    for run_dir in runs:
        for path in ANALYSES[arguments.name](run_dir, step=arguments.step):
            print(path)


if __name__ == "__main__":
    run_command(main)
