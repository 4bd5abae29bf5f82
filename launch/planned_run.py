"""A run that is about to be trained or submitted, and the directory in which runs are by default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.config import RunConfig
from trainer.run_dir import RunDir


@dataclass(frozen=True)
class PlannedRun:
    """A run: alone, or one of a study or a sweep."""

    run_dir: RunDir
    config: RunConfig

    @property
    def name(self) -> str:
        return self.run_dir.path.name


def default_run_dir(config: RunConfig) -> Path:
    return Path("runs") / f"{config.name}-seed{config.seed}"
