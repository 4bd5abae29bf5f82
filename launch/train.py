"""Train one recipe in this process: alone, or as one rank under torchrun or srun. A sweep trains one run after another.

python launch/train.py --config viewmaker:digits
torchrun --standalone --nproc-per-node 2 launch/train.py --config debug:image
python launch/train.py --config debug:image --sweep objective.temperature=0.1,0.5 --sweep seed=0,1
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from data_pipeline.core.arguments import number, positive
from data_pipeline.core.errors import UserError, run_command
from data_pipeline.core.imports import add_code_argument, import_code
from data_pipeline.core.overrides import SET_HELP

_gigabytes = number("a positive number up to 1,000,000,000", lambda size: 0 < size <= 10**9)
CONFIG_HELP = (
    "The recipe: module:function in configs/, package.module:function of your own package, ./FILE.py:function, or a "
    "config file."
)


def _parser() -> argparse.ArgumentParser:
    listing = "Print all recipes and studies, each with its first line."
    parser = run_parser(__doc__, "--list", action="store_true", help=listing)
    add = parser.add_argument
    add("--explain", action="store_true", help="Print every setting and where it comes from, and stop.")
    add("--dry-run", action="store_true", help="Check the runs and their data, print the runs as a table, and stop.")
    add("--plan", action="store_true", help="Print the memory and the network traffic that the run needs, and stop.")
    add("--nodes", type=positive, default=1, metavar="N", help="The nodes of the plan (default: 1).")
    add(
        "--tasks-per-node",
        type=positive,
        default=1,
        metavar="N",
        help="The ranks on each node (default: 1).",
    )
    add("--gpu-gigabytes", type=_gigabytes, metavar="GB", help="The device memory that the plan fits a batch into.")
    return parser


def run_parser(description: str | None, instead_of_config: str, **options: Any) -> argparse.ArgumentParser:
    """Return a parser with the arguments that launch/train.py and launch/slurm.py share.

    Either --config is required, or the argument `instead_of_config` with its `options`. --accept-data names the new
    dataset, so that a requeue or a script cannot accept a later replacement with it.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", metavar="RECIPE", help=CONFIG_HELP)
    what.add_argument(instead_of_config, **options)
    add = parser.add_argument
    add("--set", action="append", default=[], metavar="a.b=c", help=SET_HELP)
    add(
        "--sweep",
        action="append",
        default=[],
        metavar="a.b=c,d",
        help="Make a run for each of these values of a setting. May be repeated for other settings: then there is a "
        "run for each combination. Values are as for --set; commas in brackets do not split.",
    )
    add(
        "--sweep-file",
        type=Path,
        metavar="FILE",
        help="Make a run for each entry of this YAML list of mappings, such as '- {objective.temperature: 0.1}'.",
    )
    add("--max-runs", type=positive, metavar="N", help="The most runs that a sweep may have (default: 100, then ask).")
    add(
        "--study-dir",
        type=Path,
        metavar="DIR",
        help="The directory of all runs of a sweep or a study (default: runs/NAME, with the name of the sweep).",
    )
    add_code_argument(parser)
    add(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="The run directory (default: runs/NAME-seedSEED). A run that was killed goes on from its last checkpoint.",
    )
    add(
        "--accept-data",
        action="append",
        default=[],
        metavar="NAME",
        help="Go on with a dataset that was replaced. The refusal says its NAME. May be repeated.",
    )
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
    from configs import describe_recipes, explain, resolve_recipe
    from launch.planned_run import PlannedRun, default_run_dir
    from launch.rank import print_plan, run_noting_its_end
    from launch.sweeps import check_runs, planned_sweep, run_sweep
    from trainer.fault_tolerance.preemption import StoppedError
    from trainer.provenance import command_line

    if arguments.list:
        print(describe_recipes())
        return
    sweep = planned_sweep(arguments)
    if sweep is not None:
        run_sweep(sweep, arguments, command=command_line())
        return
    if arguments.study_dir is not None:
        raise UserError("--study-dir belongs to --sweep; use --run-dir for one run")
    if arguments.explain:
        print(explain(arguments.config, arguments.set))
        return
    config = resolve_recipe(arguments.config, arguments.set)
    if arguments.plan:
        print_plan(
            config, world_size=arguments.nodes * arguments.tasks_per_node, device_gigabytes=arguments.gpu_gigabytes
        )
        return
    accepted = [*arguments.accept_data, *arguments.accept_code]
    planned = PlannedRun.at(arguments.run_dir or default_run_dir(config), config)
    if arguments.dry_run:
        print(check_runs([planned], accepted_data=accepted))
        return
    try:
        run_noting_its_end(planned.config, planned.run_dir.path, command=command_line(), accepted_data=accepted)
    except StoppedError as stopped:
        if stopped.is_first_rank:
            print(stopped, file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run_command(main)
