"""Train one recipe in this process: alone, or as one rank under torchrun or srun.

python launch/train.py --config viewmaker:digits
torchrun --standalone --nproc-per-node 2 launch/train.py --config debug:image
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from configs import explain, resolve_recipe
from data_pipeline.errors import run_command
from trainer.config import RunConfig
from trainer.distributed.env import choose_device, destroy_process_group, init_process_group, read_env
from trainer.memory import keep_freed_memory
from trainer.preemption import StoppedError
from trainer.provenance import command_line
from trainer.rundir import RunDir
from trainer.train import train


def run(config: RunConfig, run_dir: Path, *, command: str) -> None:
    """Train as the rank that the environment says this process is; alone where it says nothing. Raises as `train`."""
    keep_freed_memory()
    world = read_env(os.environ)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = choose_device(world)
    init_process_group(world, device)
    try:
        train(config, RunDir(run_dir), device=device, command=command)
    finally:
        destroy_process_group()


def default_run_dir(config: RunConfig) -> Path:
    return Path("runs") / f"{config.name}-seed{config.seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", required=True, metavar="RECIPE", help="module:function in configs/, or a config file"
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one setting; repeatable")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/NAME-seedSEED; a killed run goes on")
    parser.add_argument("--explain", action="store_true", help="print every setting and where it came from, and stop")
    arguments = parser.parse_args()
    if arguments.explain:
        print(explain(arguments.config, arguments.set))
        return
    config = resolve_recipe(arguments.config, arguments.set)
    try:
        run(config, arguments.run_dir or default_run_dir(config), command=command_line())
    except StoppedError as stopped:
        if stopped.is_first_rank:
            print(stopped, file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run_command(main)
