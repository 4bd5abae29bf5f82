"""Train one recipe in this process: alone, or as one rank under torchrun or srun.

python launch/train.py --config viewmaker:digits
torchrun --standalone --nproc-per-node 2 launch/train.py --config debug:image
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if not __package__:  # a script; else it would run the code of another clone that is installed here
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_pipeline.core.arguments import number, positive
from data_pipeline.core.errors import run_command
from data_pipeline.core.imports import add_code_argument, import_code, without_garbage_collection
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
    add("--plan", action="store_true", help="Print the memory that a step of the run needs, and stop.")
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
    add_code_argument(parser)
    add(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="The run directory (default: runs/NAME-seedSEED). A run that was killed goes on from its last checkpoint.",
    )
    for name, what_changed in (("data", "a dataset that was replaced"), ("code", "code of your own that has changed")):
        add(
            f"--accept-{name}",
            action="append",
            default=[],
            metavar="NAME",
            help=f"Go on with {what_changed}. The refusal says its NAME. May be repeated.",
        )
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    with without_garbage_collection():
        import_code(arguments.code)
        from configs import describe_recipes, explain, resolve_recipe
        from launch.planned_run import default_run_dir
        from launch.rank import print_plan, run
        from trainer.fault_tolerance.preemption import StoppedError
        from trainer.provenance import command_line

    if arguments.list:
        print(describe_recipes())
        return
    if arguments.explain:
        print(explain(arguments.config, arguments.set))
        return
    config = resolve_recipe(arguments.config, arguments.set)
    if arguments.plan:
        print_plan(
            config, world_size=arguments.nodes * arguments.tasks_per_node, device_gigabytes=arguments.gpu_gigabytes
        )
        return
    run_dir = arguments.run_dir or default_run_dir(config)
    try:
        run(config, run_dir, command=command_line(), accepted_data=[*arguments.accept_data, *arguments.accept_code])
    except StoppedError as stopped:
        if stopped.is_first_rank:
            print(stopped, file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run_command(main)
