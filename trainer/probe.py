"""`python -m trainer.probe RUN_DIR...`: one linear probe and one kNN vote for each label, from the frozen encoder.

Reads run directories and the shards that their configs name. For each checkpoint it writes into
RUN_DIR/probes/step_00010000/ a result for each label, such as base.json and, if the samples have overlays,
overlay.json, and the trained heads in heads.safetensors.

`--encoder ENCODER --train DIR --test DIR` scores an encoder of others in the same form, below scored/; `--data DIR` in
place of the two does so on every setting of the suppression benchmark in DIR.

It runs in one process. `torchrun --standalone --nproc-per-node 8 -m trainer.probe RUN_DIR`, or srun, is faster.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from data_pipeline.core.arguments import program, whole
from data_pipeline.core.errors import run_command
from data_pipeline.core.imports import add_code_argument, import_code
from trainer.run_dir import RunDir, open_run, runs_of, say_what_is_left_out

_SET_HELP = (
    "Change a setting of the run's probe, such as views=none, num_epochs=20, batch_norm=train, reads=pixels, "
    "num_neighbors=5 or labels=[overlay]; the value is YAML. May be repeated. Settings that change a result become a "
    "part of the file names."
)
_ENCODER_HELP = (
    "Score this encoder in place of runs: FILE.py:NAME or package.module:NAME, a torch module or a function from "
    "pictures (B, C, H, W) in [0, 1] to rows (B, D), which normalises them itself; timm:NAME or torchvision:NAME, with "
    "the normalisation and the input size of its weights; an export; or a run directory."
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("trainer.probe"),
        description="Fit one linear probe and one kNN vote for each label on the features of the frozen encoder.",
    )
    add = parser.add_argument
    add("run_dirs", type=Path, nargs="*", metavar="RUN_DIR", help="A run directory, or the directory of a study.")
    add("--encoder", help=_ENCODER_HELP)
    add("--train", metavar="DIR", help="Fit on this dataset (default: the train set of the run).")
    add("--test", metavar="DIR", help="Test on this dataset (default: the test set of the run).")
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="Score --encoder on the suppression benchmark in DIR.",
    )
    add("--out", type=Path, metavar="DIR", help="The directory of the results of --encoder (default: below scored/).")
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
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=_SET_HELP)
    add_code_argument(parser)
    return parser


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.encoder is not None and RunDir(Path(arguments.encoder)).config.is_file():
        arguments.run_dirs, arguments.encoder = [*arguments.run_dirs, Path(arguments.encoder)], None
    if bool(arguments.run_dirs) == (arguments.encoder is not None):
        parser.error("pass either RUN_DIR or --encoder")
    num_datasets = (arguments.train is not None) + (arguments.test is not None)
    if arguments.encoder is not None and num_datasets != (2 if arguments.data is None else 0):
        parser.error("--encoder needs either --train DIR and --test DIR, two datasets, or --data DIR, the benchmark")
    if arguments.encoder is None and (arguments.out is not None or arguments.data is not None):
        parser.error("--out and --data are for --encoder; the results of a run lie in its directory")
    of_runs = (arguments.step is not None, arguments.all_steps, arguments.missing, arguments.untrained)
    if arguments.encoder is not None and any(of_runs):
        parser.error("--step, --all-steps, --missing and --untrained are for runs, not for --encoder")
    import_code(arguments.code)
    from trainer.distributed.collectives import on_first_rank, rank
    from trainer.distributed.environment import choose_device, process_group, read_env
    from trainer.probed_runs.probing import ProbeOptions, probe_each

    world = read_env(os.environ)
    options = ProbeOptions(
        steps="all" if arguments.all_steps else arguments.step,
        settings=arguments.set,
        untrained=arguments.untrained,
        missing=arguments.missing,
        train_dir=arguments.train,
        test_dir=arguments.test,
    )
    device = choose_device(world)
    with process_group(world, device):
        if arguments.encoder is not None:
            from trainer.probed_runs.scoring import score, score_benchmark

            how = {"out": arguments.out, "settings": arguments.set, "device": device}
            if arguments.data is not None:
                score_benchmark(arguments.encoder, root=arguments.data, **how)
            else:
                score(arguments.encoder, train_dir=arguments.train, test_dir=arguments.test, **how)
            return
        paths = runs_of(arguments.run_dirs)

        def check() -> None:
            say_what_is_left_out(arguments.run_dirs)
            for path in paths:
                open_run(path)

        on_first_rank(check)  # check all before the first is probed
        found = probe_each([RunDir(path) for path in paths], options, device=device)
        num_left_out, num_failed = found.count({}), found.count(None)
        if rank() == 0 and num_left_out:
            print(f"{num_left_out} of {len(found)} run(s) are probed already")
        if num_failed:
            if rank() == 0:
                print(f"error: {num_failed} of {len(found)} run(s) were not probed", file=sys.stderr)
            raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
