"""The form of an analysis for the command `python -m trainer.analyze`: settings, and a function that measures runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.core.schema import Schema
from trainer.analyses.loaded_run import AnalysisOptions, LoadedRun, write_result
from trainer.run_dir import RunDir


@dataclass(frozen=True)
class Analysis:
    """An analysis of a run, or of several runs together.

    name: of the files.
    settings: their class.
    measure: takes a `LoadedRun`, or a list of all runs if the analysis `compares_runs`, and the settings. Returns the
        numbers and a picture as PNG.
    in_name: the setting that becomes a part of the name if it is given.
    """

    name: str
    settings: type[Schema]
    measure: Callable[..., tuple[Schema, bytes]]
    compares_runs: bool = False
    in_name: str | None = None

    def groups(self, run_dirs: Sequence[RunDir]) -> list[Sequence[RunDir]]:
        """Return what `analyze` takes, one call after the other: each run, or all of them together."""
        return [run_dirs] if self.compares_runs else [[run_dir] for run_dir in run_dirs]

    def analyze(self, run_dirs: Sequence[RunDir], *, config: Schema, options: AnalysisOptions) -> list[Path]:
        """Write RUN_DIR/analysis/NAME.png and NAME.json of each run, and return their paths.

        Raises `UserError` if a checkpoint or data is missing, or if the analysis cannot measure these runs.
        """
        runs = [LoadedRun(run_dir, options) for run_dir in run_dirs]
        result, png = self.measure(runs if self.compares_runs else runs[0], config)
        value = None if self.in_name is None else getattr(config, self.in_name)
        name = self.name if value is None else f"{self.name}-{self.in_name}_{value}"
        return [path for run_dir in run_dirs for path in write_result(run_dir, name, result, png)]
