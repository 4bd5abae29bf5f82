"""Train on a Slurm cluster, or on this machine as several ranks or several runs at a time.

python launch/slurm.py --nodes 4 --config simclr:digits_4096 --gpus-per-node 8 --partition gpu
python launch/slurm.py --study studies:table1 --at-a-time 4 --gpus-per-node 8
python launch/slurm.py --executor local --tasks-per-node 2 --config debug:image --wait
python launch/slurm.py --executor local --study studies:table1_small --at-a-time 2
python launch/slurm.py --config debug:image --sweep objective.temperature=0.1,0.5 --sweep seed=0,1,2

Settings of your cluster can stand in ./slurm.yaml, as lines such as `partition: gpu`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # a script; else it would run the code of another clone that is installed here
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_pipeline.core.arguments import positive, whole
from data_pipeline.core.errors import run_command
from data_pipeline.core.imports import import_code, without_garbage_collection
from launch.train import run_parser


def _parser() -> argparse.ArgumentParser:
    parser = run_parser(__doc__, "--study", metavar="studies:NAME", help="All runs of this study, as one job array.")
    add = parser.add_argument
    add(
        "--only",
        metavar="PATTERN",
        help='Train only the runs of a study whose names fit, such as "randbit-*-seed0".',
    )
    add(
        "--sweep",
        action="append",
        default=[],
        metavar="a.b=c,d",
        help="Make a run for each of these values of a setting. May be repeated for other settings: then there is a "
        "run for each combination. Values are as for --set; commas in brackets do not split.",
    )
    add(
        "--study-dir",
        type=Path,
        metavar="DIR",
        help="The directory of all runs of a sweep or a study (default: runs/NAME, with the name of the sweep).",
    )
    add(
        "--at-a-time",
        type=positive,
        metavar="N",
        help="The runs of a study or a sweep that train at the same time (default: all, or 1 on this machine).",
    )
    add("--nodes", type=positive, default=1, metavar="N", help="The nodes of each run (default: 1).")
    add(
        "--tasks-per-node",
        type=positive,
        metavar="N",
        help="The ranks on each node (default: one for each GPU, or 1 without GPUs).",
    )
    add(
        "--cpus-per-task",
        type=positive,
        metavar="N",
        help="The cores of each rank (default: one, and one for each data worker of the recipe; on this machine, an "
        "equal share of its cores).",
    )
    add(
        "--gpus-per-node",
        type=whole,
        metavar="N",
        help="The GPUs of each node (default: none). 0 says that the job is meant for the CPU.",
    )
    add(
        "--time-minutes",
        type=positive,
        metavar="N",
        help="Slurm's time limit; a run that is not finished is then requeued (default: 240).",
    )
    add("--mem-gb", type=positive, metavar="N", help="The memory of each node (default: that of the cluster).")
    add("--partition", metavar="NAME", help="The partition (default: that of the cluster).")
    add("--account", metavar="NAME", help="The account to charge.")
    add("--qos", metavar="NAME", help="The quality of service.")
    add("--constraint", metavar="FEATURES", help="The features that nodes must have.")
    add(
        "--sbatch",
        action="append",
        metavar="KEY=VALUE",
        help="Any other field of sbatch that asks for resources; KEY for one without a value.",
    )
    add("--executor", choices=("slurm", "local"), default="slurm", help="local starts the ranks on this machine.")
    add(
        "--dry-run",
        action="store_true",
        help="Check everything, print the batch script (with --executor local: a table of the runs), and stop.",
    )
    add(
        "--wait",
        action="store_true",
        help="Show the states until the end, and the log of rank 0 of a single run; exit with 1 if a run fails.",
    )
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    with without_garbage_collection():
        import_code(arguments.code)
        from launch.slurm_command import run

    run(arguments)


if __name__ == "__main__":
    run_command(main)
