"""`python -m trainer.theory NAME`: run an experiment, judge the claims of its paper, draw its figures."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from data_pipeline.core.errors import UserError, nearest, run_command
from data_pipeline.core.overrides import SET_HELP
from trainer.memory import keep_freed_memory
from trainer.theory.framework.claim import claim_table
from trainer.theory.framework.experiment import RESULT, Experiment, default_out, run_experiment
from trainer.theory.generalization import command as generalization
from trainer.theory.linear_contrastive import command as linear_contrastive
from trainer.theory.sparse_coding import command as sparse_coding

EXPERIMENTS: Mapping[str, Experiment[Any]] = {
    "generalization": generalization.EXPERIMENT,
    "linear_contrastive": linear_contrastive.EXPERIMENT,
    "sparse_coding": sparse_coding.EXPERIMENT,
}


def main() -> None:
    names = "".join(f"\n  {name}: {experiment.title}" for name, experiment in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m trainer.theory",
        description=f"{__doc__}\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help=f"one of: {', '.join(EXPERIMENTS)}")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help=SET_HELP)
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/theory/NAME")
    parser.add_argument("--device", metavar="D", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("--explain", action="store_true", help="print the settings and stop")
    arguments = parser.parse_args()
    name = arguments.name
    if name not in EXPERIMENTS:
        raise UserError(f'there is no experiment "{name}"{nearest(name, EXPERIMENTS)}')
    experiment = EXPERIMENTS[name]
    settings = experiment.defaults.override(arguments.set, where=name)
    if arguments.explain:
        print(settings.model_dump_json(indent=2))
        return
    keep_freed_memory()
    out = arguments.out or default_out(name, settings, experiment.defaults)
    result = run_experiment(name, experiment, settings, out=out, device=choose_device(arguments.device))
    print(claim_table(result.claims))
    for path in (*result.figures, RESULT):
        print(out / path)


def choose_device(name: str | None) -> torch.device:
    """The device of that name, the GPU if none is given and there is one; raises `UserError` where it is not there."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in {"cpu", "cuda"}:
        raise UserError(f"--device {name} is no device; write cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: this machine has {torch.cuda.device_count()} GPUs; pass --device cpu")
    return device


if __name__ == "__main__":
    run_command(main)
