"""`python -m trainer.theory NAME`: run an experiment, judge the claims of its paper, draw its figures."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.core.arguments import program
from data_pipeline.core.errors import UserError, nearest, run_command
from data_pipeline.core.overrides import SET_HELP

if TYPE_CHECKING:
    from trainer.theory.framework.experiment import Experiment

# A name is also the package in trainer/theory.
EXPERIMENTS: Mapping[str, str] = {
    "generalization": "Huang et al. 2023: collapse, divergence and the error bound of alignment.",
    "linear_contrastive": "Tamkin et al. 2022: feature suppression in a linear model (Theorem 4.1, Lemma E.1).",
    "sparse_coding": "Wen and Li 2021: sparse features, dense noise, and what the random mask and the bias do.",
}


def load_experiment(name: str) -> Experiment[Any]:
    """Import the experiment called `name`. Raises `UserError` with the nearest name if there is none."""
    if name not in EXPERIMENTS:
        raise UserError(f'there is no experiment "{name}"{nearest(name, EXPERIMENTS)}')
    experiment: Experiment[Any] = importlib.import_module(f"trainer.theory.{name}.experiment").EXPERIMENT
    return experiment


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name}: {title}" for name, title in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        prog=program("trainer.theory"),
        description="Run an experiment, judge the claims of its paper, and draw its figures.",
        epilog=f"experiments:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", metavar="NAME", help="The experiment to run: one of the list below.")
    add("--set", action="append", default=[], metavar="A.B=C", help=SET_HELP)
    add("--out", type=Path, metavar="DIR", help="The directory to write (default: runs/theory/NAME).")
    add("--device", metavar="D", help="The device: cpu or cuda (default: cuda if there is a GPU).")
    add("--explain", action="store_true", help="Print the settings, and stop.")
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    name = arguments.name
    experiment = load_experiment(name)
    settings = experiment.defaults.override(arguments.set, where=name)
    if arguments.explain:
        print(settings.model_dump_json(indent=2))
        return
    from data_pipeline.core.devices import named_device
    from trainer.memory import keep_freed_memory
    from trainer.theory.framework.claim import claim_table
    from trainer.theory.framework.experiment import RESULT, default_out, run_experiment

    keep_freed_memory()
    out = arguments.out or default_out(name, settings, experiment.defaults)
    result = run_experiment(name, experiment, settings, out=out, device=named_device(arguments.device))
    print(claim_table(result.claims))
    for path in (*result.figures, RESULT):
        print(out / path)


if __name__ == "__main__":
    run_command(main)
