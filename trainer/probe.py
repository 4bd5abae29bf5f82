"""`python -m trainer.probe RUN_DIR...`: one linear probe and one kNN vote for each label, from the frozen encoder.

Reads run directories and the shards that their configs name. For each checkpoint it writes into
RUN_DIR/probes/step_00010000/ a result for each label, such as base.json and, if the samples have overlays,
overlay.json, and the trained heads in heads.safetensors.

It runs in one process. `torchrun --standalone --nproc-per-node 8 -m trainer.probe RUN_DIR`, or srun, is faster.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from data_pipeline.core.arguments import positive, program, whole
from data_pipeline.core.errors import run_command
from data_pipeline.core.imports import add_code_argument, import_code
from trainer.run_dir import RunDir, open_run, runs_of, say_what_is_left_out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("trainer.probe"),
        description="Fit one linear probe and one kNN vote for each label on the features of the frozen encoder.",
    )
    add = parser.add_argument
    add("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="A run directory, or the directory of a study.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", type=whole, help="The checkpoint to probe; 0 is the untrained encoder (default: the newest)."
    )
    which.add_argument("--all-steps", action="store_true", help="Probe every checkpoint of the run.")
    add(
        "--missing",
        action="store_true",
        help="Leave out the runs that have all results asked for, and only count them.",
    )
    add("--untrained", action="store_true", help="Also probe the untrained encoder, for comparison.")
    add(
        "--label",
        action="append",
        metavar="NAME",
        help="Probe this label only, such as base or overlay; may be given several times (default: probe.labels of the "
        "run, or all labels of the data).",
    )
    add_code_argument(parser)
    fit = parser.add_argument_group(
        "probes", "The defaults are in the config of the run. A changed value becomes part of the file names."
    )
    fit.add_argument(
        "--views",
        choices=["policy", "none"],
        help="Fit on views of the run's policy, or on samples without views, which is much faster.",
    )
    fit.add_argument(
        "--batch-norm",
        choices=["eval", "train"],
        help="The mode of batch norm during the fit; train uses batch statistics, as in the published code.",
    )
    fit.add_argument(
        "--reads",
        choices=["features", "embedding", "pixels"],
        help="The input of the probes: the features of the encoder, its embedding, or the raw pixels.",
    )
    fit.add_argument("--epochs", type=positive, metavar="N", help="The number of epochs of the fit.")
    fit.add_argument(
        "--neighbors", type=positive, metavar="K", help="The number of neighbours that vote, the k of kNN."
    )
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    import_code(arguments.code)
    from trainer.distributed.collectives import from_first_rank, on_first_rank, rank
    from trainer.distributed.environment import choose_device, process_group, read_env
    from trainer.probed_runs.probing import ProbeOptions, is_probed, probe_each

    world = read_env(os.environ)
    changes = {
        "views": arguments.views,
        "batch_norm": arguments.batch_norm,
        "num_epochs": arguments.epochs,
        "num_neighbors": arguments.neighbors,
        "reads": arguments.reads,
    }
    options = ProbeOptions(
        steps="all" if arguments.all_steps else arguments.step,
        labels=arguments.label,
        changes={name: value for name, value in changes.items() if value is not None},
        untrained=arguments.untrained,
    )
    device = choose_device(world)
    with process_group(world, device):
        paths = runs_of(arguments.run_dirs)
        run_dirs = [RunDir(path) for path in paths]

        def check() -> None:
            say_what_is_left_out(arguments.run_dirs)
            for path in paths:
                open_run(path)

        on_first_rank(check)  # check all before the first is probed
        if arguments.missing:
            are_probed = from_first_rank(lambda: [is_probed(run_dir, options) for run_dir in run_dirs], list[bool])
            left = [run_dir for run_dir, is_done in zip(run_dirs, are_probed, strict=True) if not is_done]
            if rank() == 0 and len(left) < len(run_dirs):
                print(f"{len(run_dirs) - len(left)} of {len(run_dirs)} run(s) are probed already")
            run_dirs = left
        if num_failed := probe_each(run_dirs, options, device=device).count(None):
            if rank() == 0:
                print(f"error: {num_failed} of {len(run_dirs)} run(s) were not probed", file=sys.stderr)
            raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
