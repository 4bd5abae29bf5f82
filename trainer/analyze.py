"""`python -m trainer.analyze NAME RUN_DIR...`: figures and numbers that explain runs, in RUN_DIR/analysis/."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_pipeline.core.errors import UserError, nearest, run_command
from data_pipeline.core.overrides import SET_HELP
from data_pipeline.core.schema import MAX_SEED, Schema
from trainer.analyses.alignment import AlignmentConfig, analyze_alignment
from trainer.analyses.collision import CollisionConfig, analyze_collision
from trainer.analyses.concentration import ConcentrationConfig, analyze_concentration
from trainer.analyses.embedding import EmbeddingConfig, analyze_embedding
from trainer.analyses.feature_dropout import FeatureDropoutConfig, analyze_feature_dropout
from trainer.analyses.filters import FiltersConfig, analyze_filters
from trainer.analyses.loaded_run import AnalysisOptions
from trainer.analyses.views import ViewsAnalysisConfig, analyze_views
from trainer.run_dir import ALLOW_PIPE_HELP, RunDir, open_run, runs_of


@dataclass(frozen=True)
class Analysis:
    """An analysis: its question, its settings, and the function that writes its files and yields their paths."""

    question: str
    config: type[Schema]
    make: Callable[[Sequence[RunDir], Any, AnalysisOptions], Iterator[Path]]


def _of_each(analyze: Callable[..., list[Path]]) -> Callable[[Sequence[RunDir], Any, AnalysisOptions], Iterator[Path]]:
    """An analysis of one run, for several one after the other."""

    def make(run_dirs: Sequence[RunDir], config: Any, options: AnalysisOptions) -> Iterator[Path]:
        for run_dir in run_dirs:
            yield from analyze(run_dir, config=config, options=options)

    return make


def _of_all(run_dirs: Sequence[RunDir], config: Any, options: AnalysisOptions) -> Iterator[Path]:
    yield from analyze_feature_dropout(run_dirs, config=config, options=options)


ANALYSES: Mapping[str, Analysis] = {
    "views": Analysis(
        "what does the view policy do to pictures, and where?", ViewsAnalysisConfig, _of_each(analyze_views)
    ),
    "feature_dropout": Analysis(
        "how often do the views of one run destroy what another can read? (two runs or more)",
        FeatureDropoutConfig,
        _of_all,
    ),
    "alignment": Analysis(
        "are views of a sample close, and classes far apart?", AlignmentConfig, _of_each(analyze_alignment)
    ),
    "concentration": Analysis(
        "which pair of transforms brings pictures of a class together?",
        ConcentrationConfig,
        _of_each(analyze_concentration),
    ),
    "embedding": Analysis("do the features form clusters?", EmbeddingConfig, _of_each(analyze_embedding)),
    "collision": Analysis(
        "how fast do transforms, used again and again, make pictures alike?",
        CollisionConfig,
        _of_each(analyze_collision),
    ),
    "filters": Analysis(
        "how sparsely do features fire, and do they see more than colour?", FiltersConfig, _of_each(analyze_filters)
    ),
}


def main() -> None:
    width = max(map(len, ANALYSES))
    listing = "\n".join(f"  {name:{width}}  {analysis.question}" for name, analysis in ANALYSES.items())
    parser = argparse.ArgumentParser(
        prog="python -m trainer.analyze",
        description=__doc__,
        epilog=f"NAME is one of\n{listing}\ndocs/analyses.md explains their numbers.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="or a study's directory")
    parser.add_argument("--step", type=int, help="checkpoint to look at; 0 is untrained (default: the newest)")
    parser.add_argument("--seed", type=int, help="of all that is drawn (default: the seed of the run)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=f"of the analysis: {SET_HELP}")
    parser.add_argument("--allow-pipe", action="store_true", help=ALLOW_PIPE_HELP)
    arguments = parser.parse_args()
    if arguments.name not in ANALYSES:
        raise UserError(f'there is no analysis "{arguments.name}"{nearest(arguments.name, ANALYSES)}')
    if arguments.seed is not None and not 0 <= arguments.seed <= MAX_SEED:
        raise UserError(f"--seed must be 0 to {MAX_SEED:,}, got {arguments.seed}")
    analysis = ANALYSES[arguments.name]
    config = analysis.config().override(arguments.set, where=f"settings of {arguments.name}")
    options = AnalysisOptions(
        step=arguments.step,
        device=_device(arguments.device),
        seed=arguments.seed,
        allow_pipe=arguments.allow_pipe,
    )
    runs = [open_run(path) for path in runs_of(arguments.run_dirs)]  # all of them before the first is worked on
    for path in analysis.make(runs, config, options):
        print(path)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UserError(f'--device {name}: this machine has no such device; take "cpu" or leave it out') from None
    return device


if __name__ == "__main__":
    run_command(main)
