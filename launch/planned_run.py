"""A run that is about to be trained or submitted, and the directory in which runs are by default."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from data_pipeline.core.errors import UserError
from trainer.config import RunConfig
from trainer.data import Manifests
from trainer.preflight import claim, refuse_other_config
from trainer.run_dir import RunDir


@dataclass(frozen=True)
class PlannedRun:
    """A run: alone, or one of a study or a sweep.

    option: the option of the command line that decides its directory.
    """

    run_dir: RunDir
    config: RunConfig
    option: Literal["--run-dir", "--study-dir"] = "--run-dir"

    @classmethod
    def at(cls, path: Path, config: RunConfig) -> Self:
        """Return the run in a directory."""
        return cls(RunDir(path), config)

    @classmethod
    def within(cls, home: Path, config: RunConfig) -> Self:
        """Return the run of a study or a sweep whose directory is `home`, as `at` does."""
        return replace(cls.at(home / default_run_dir(config).name, config), option="--study-dir")

    def refuse_other_config(self) -> None:
        """Raise `UserError` if the run has begun with another config: see `trainer.preflight.refuse_other_config`."""
        if self.run_dir.config.is_file():
            refuse_other_config(self.run_dir, self.config, option=self.option)

    def claim(self, manifests: Manifests, *, accepted_data: Collection[str]) -> None:
        """Check that the run can be trained in its directory, and write its config: see `trainer.preflight.claim`."""
        claim(self.run_dir, self.config, manifests, accepted_data=accepted_data, option=self.option).close()

    @property
    def name(self) -> str:
        return self.run_dir.path.name


def refuse_other_configs(runs: Sequence[PlannedRun]) -> None:
    """Raise `UserError` if runs of a study or a sweep have begun with other configs. It names the first of them."""
    errors = []
    for planned in runs:
        try:
            planned.refuse_other_config()
        except UserError as error:
            errors.append(error)
    if errors:
        more = f" and {len(errors) - 1} more like it" if len(errors) > 1 else ""
        raise UserError(f"{errors[0]}{more}")


def default_run_dir(config: RunConfig) -> Path:
    return Path("runs") / f"{config.name}-seed{config.seed}"
