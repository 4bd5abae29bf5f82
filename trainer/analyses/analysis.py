"""The form of an analysis for the command `python -m trainer.analyze`: settings, and a function that writes files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.core.schema import Schema
from trainer.run_dir import RunDir


@dataclass(frozen=True)
class Analysis:
    """The settings of an analysis, and the function that writes its files and returns their paths.

    `analyze` takes one run directory, or all of them if the analysis `compares_runs`.
    """

    settings: type[Schema]
    analyze: Callable[..., list[Path]]
    compares_runs: bool = False

    def groups(self, run_dirs: Sequence[RunDir]) -> Sequence[Any]:
        """Return what `analyze` takes, one call after the other: each run, or all of them together."""
        return [run_dirs] if self.compares_runs else run_dirs
