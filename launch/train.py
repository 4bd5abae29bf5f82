"""Train one recipe in this process: alone, or as one rank under torchrun or srun.

python launch/train.py --config viewmaker:digits
torchrun --standalone --nproc-per-node 2 launch/train.py --config debug:image
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Collection
from pathlib import Path

import torch

from configs import explain, resolve_recipe
from data_pipeline.core.errors import UserError, log_to_terminal, run_command
from data_pipeline.core.overrides import SET_HELP
from launch.outcome import last_line, note_end
from trainer.config import RunConfig
from trainer.data import read_manifests
from trainer.distributed.engines.deepspeed_engine import DeepSpeedConfig, deepspeed_dictionary
from trainer.distributed.environment import choose_device, process_group, read_env
from trainer.fault_tolerance.preemption import StoppedError
from trainer.memory import keep_freed_memory
from trainer.planning.describe import describe
from trainer.planning.fit import plan
from trainer.provenance import command_line
from trainer.run_dir import RunDir
from trainer.train import train

_MAX_NUMBER = 10**7
_MAX_GIGABYTES = 10**9


def run(config: RunConfig, run_dir: Path, *, command: str, accepted_data: Collection[str] = ()) -> None:
    """Train as the rank given by the variables of torchrun or Slurm; alone if there are none. Raises as `train`."""
    keep_freed_memory()
    world = read_env(os.environ)
    log_to_terminal()
    device = choose_device(world)
    with process_group(world, device):
        try:
            train(config, RunDir(run_dir), device=device, command=command, accepted_data=accepted_data)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"rank {world.rank} has not enough memory on {device} ({str(error).partition('. GPU')[0]}); raise "
                "memory.micro_batches, set memory.encoder_checkpointing=whole, or see what fits with `--plan "
                "--gpu-gigabytes`"
            ) from error


def run_noting_its_end(config: RunConfig, run_dir: Path, *, command: str, accepted_data: Collection[str] = ()) -> None:
    """Call `run`; if it ends early, the first rank writes why into the run directory, for launch/status.py."""
    is_first = read_env(os.environ).rank == 0
    try:
        run(config, run_dir, command=command, accepted_data=accepted_data)
    except Exception as error:
        if is_first and isinstance(error, StoppedError):
            note_end(RunDir(run_dir), config, "stopped", str(error))
        elif is_first:
            note_end(RunDir(run_dir), config, "failed", last_line(error))
        raise


def print_plan(config: RunConfig, *, world_size: int, device_gigabytes: float | None) -> None:
    """The plan of a run on so many ranks, of its dataset where that is there, and what DeepSpeed would be told."""
    try:
        manifest = read_manifests(config.data).train
    except UserError:
        manifest = None
    planned = plan(
        config,
        world_size=world_size,
        num_samples=None if manifest is None else manifest.num_samples,
        input_shape=None if manifest is None else manifest.input_shape,
        device_gigabytes=device_gigabytes,
    )
    print(describe(planned))
    if isinstance(config.engine, DeepSpeedConfig):
        told = deepspeed_dictionary(config.engine, global_batch_size=config.global_batch_size, num_ranks=world_size)
        print(f"\nDeepSpeed is told\n{json.dumps(told, indent=2)}")


def positive(text: str) -> int:
    """Return a number of nodes, tasks and the like, from the command line."""
    number = int(text) if text.isdecimal() and len(text) <= len(str(_MAX_NUMBER)) else 0
    if not 1 <= number <= _MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number up to {_MAX_NUMBER:,}")
    return number


def gigabytes(text: str) -> float:
    """Return the memory of a device, from the command line."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= _MAX_GIGABYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number up to {_MAX_GIGABYTES:,}")
    return number


def add_accept_data(parser: argparse.ArgumentParser) -> None:
    """Add the flag by which a run goes on with a dataset that was replaced.

    It names the new data, so that no later replacement is accepted with it, by a requeue or by a script.
    """
    parser.add_argument(
        "--accept-data",
        action="append",
        default=[],
        metavar="NAME",
        help="go on with a dataset that was replaced; the refusal says its NAME; repeatable",
    )


def default_run_dir(config: RunConfig) -> Path:
    return Path("runs") / f"{config.name}-seed{config.seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", required=True, metavar="RECIPE", help="module:function in configs/, or a config file"
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help=SET_HELP)
    parser.add_argument("--allow-pipe", action="store_true", help="run the pipe: locations of a config file")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/NAME-seedSEED; a killed run goes on")
    add_accept_data(parser)
    parser.add_argument("--explain", action="store_true", help="print every setting and where it came from, and stop")
    parser.add_argument("--plan", action="store_true", help="print what the run would take of memory and net, and stop")
    parser.add_argument("--nodes", type=positive, default=1, metavar="N", help="of the plan; default: 1")
    parser.add_argument(
        "--tasks-per-node", type=positive, default=1, metavar="N", help="ranks, of the plan; default: 1"
    )
    parser.add_argument("--gpu-gigabytes", type=gigabytes, metavar="GB", help="memory into which the plan fits a batch")
    arguments = parser.parse_args()
    if arguments.explain:
        print(explain(arguments.config, arguments.set))
        return
    config = resolve_recipe(arguments.config, arguments.set, allow_pipe=arguments.allow_pipe)
    if arguments.plan:
        print_plan(
            config, world_size=arguments.nodes * arguments.tasks_per_node, device_gigabytes=arguments.gpu_gigabytes
        )
        return
    try:
        run_dir = arguments.run_dir or default_run_dir(config)
        run_noting_its_end(config, run_dir, command=command_line(), accepted_data=arguments.accept_data)
    except StoppedError as stopped:
        if stopped.is_first_rank:
            print(stopped, file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run_command(main)
