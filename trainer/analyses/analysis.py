"""The form of an analysis for the command `python -m trainer.analyze`: settings, and a function that writes files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.core.schema import Schema
from trainer.analyses.loaded_run import AnalysisOptions
from trainer.run_dir import RunDir


@dataclass(frozen=True)
class Analysis:
    """The settings of an analysis, and the function that runs it and yields the paths that it has written."""

    settings: type[Schema]
    run: Callable[[Sequence[RunDir], Any, AnalysisOptions], Iterator[Path]]


def of_each_run(settings: type[Schema], analyze: Callable[..., list[Path]]) -> Analysis:
    """Return an analysis that takes several runs one after the other."""

    def run(run_dirs: Sequence[RunDir], config: Any, options: AnalysisOptions) -> Iterator[Path]:
        for run_dir in run_dirs:
            yield from analyze(run_dir, config=config, options=options)

    return Analysis(settings, run)


def of_all_runs(settings: type[Schema], analyze: Callable[..., list[Path]]) -> Analysis:
    """Return an analysis that compares runs."""

    def run(run_dirs: Sequence[RunDir], config: Any, options: AnalysisOptions) -> Iterator[Path]:
        yield from analyze(run_dirs, config=config, options=options)

    return Analysis(settings, run)
