"""Print the state of a run, or of all runs of a study, and submit the failed ones again.

python launch/status.py runs/table1
python launch/status.py runs/table1 --resubmit-failed
"""

from __future__ import annotations

import argparse
from pathlib import Path

from data_pipeline.core.errors import printable, run_command
from data_pipeline.core.imports import add_code_argument, import_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="A run directory, or the directory of a study.")
    add("--resubmit-failed", action="store_true", help="Submit the runs that failed again, and no others.")
    add_code_argument(parser)
    add(
        "--accept-code",
        action="append",
        default=[],
        metavar="NAME",
        help="Go on with code of your own that has changed. The refusal says its NAME. May be repeated.",
    )
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    import_code(arguments.code)
    from launch.runs import resubmit, runs_in, status_of, table
    from launch.submitted import last_submission, queue_for
    from trainer.provenance import command_line
    from trainer.run_dir import say_what_is_left_out

    say_what_is_left_out([arguments.directory])
    runs = runs_in(arguments.directory.absolute())
    queue = queue_for(runs)
    statuses = {run_dir: status_of(run_dir, queue) for run_dir in runs}
    print(table({run_dir.path.name: status for run_dir, status in statuses.items()}))
    if arguments.resubmit_failed:
        failed = [run_dir for run_dir, status in statuses.items() if status.state == "failed"]
        submitted = [run_dir for run_dir in failed if last_submission(run_dir) is not None]
        for run_dir in failed:
            if run_dir not in submitted:
                print(f"{printable(run_dir.path.name)} was never submitted; start it again with its own command")
        if submitted:
            resubmit(
                submitted,
                command=command_line(),
                accepted_data=arguments.accept_code,
            )
        elif not failed:
            print("nothing has failed")


if __name__ == "__main__":
    run_command(main)
