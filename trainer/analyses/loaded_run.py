"""The input of every analysis: a run at one checkpoint, its samples, and the options of the command.

Shapes: N samples, B batch, C channels, H height, W width.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.randomness import generator
from data_pipeline.core.schema import Schema
from trainer.checkpoint.run_state import other_data
from trainer.config import RunConfig, read_run_config
from trainer.modules import TrainedModules
from trainer.pretrained import load_modules
from trainer.probes.features import (
    TRAIN_DRAW,
    LabelSpace,
    Pictures,
    read_pictures,
)
from trainer.run_dir import RunDir, write_atomically, write_json

CPU = torch.device("cpu")


@dataclass(frozen=True)
class AnalysisOptions:
    """Options of an analysis.

    step: the checkpoint (None: the newest; 0: untrained).
    seed: of all draws (None: the seed of the run).
    """

    step: int | None = None
    device: torch.device = CPU
    seed: int | None = None


@dataclass(frozen=True)
class LoadedRun:
    """A run at one checkpoint; its modules are on `device`, in eval mode."""

    run_dir: RunDir
    modules: TrainedModules
    device: torch.device
    seed: int

    @cached_property
    def train(self) -> Pictures:
        data = self.modules.config.data
        train = read_pictures(data.probed_dir, read=data, draw=TRAIN_DRAW)
        return self._checked(train, "train", location=data.probed_dir)

    @cached_property
    def test(self) -> Pictures:
        data = self.modules.config.data
        return self._checked(read_pictures(data.test_dir, read=data), "test", location=data.test_dir)

    def _checked(self, pictures: Pictures, which: Literal["train", "test"], *, location: str) -> Pictures:
        """Return the pictures. Prints a warning if their dataset is not the one of the training."""
        sha256 = pictures.manifest.sha256
        if warning := other_data(self.modules.trained_on, which=which, sha256=sha256, location=location):
            print(f"warning: {warning}", file=sys.stderr)
        return pictures

    def label_spaces(self) -> tuple[LabelSpace, ...]:
        """Return the labels of the samples, such as `base`, and `overlay` if something was drawn or mixed in."""
        return tuple(self.test.manifest.labels)


def load_run(run_dir: RunDir, options: AnalysisOptions) -> LoadedRun:
    """Load the modules of a run. Raises `UserError` if there is no such checkpoint."""
    modules = load_modules(run_dir, step=options.step).to(options.device)
    return LoadedRun(run_dir, modules, options.device, seed_of(modules.config, options))


def read_test_pictures(run_dir: RunDir, options: AnalysisOptions, *, what_for: str) -> tuple[RunConfig, Pictures]:
    """Return the config and the test pictures of a run, for an analysis of expert views that needs no checkpoint.

    Raises `UserError` if they are sounds; the message begins with `what_for`.
    """
    config = read_run_config(run_dir)
    test = read_pictures(config.data.test_dir, read=config.data)
    refuse_sounds(test, run_dir, what_for=what_for)
    return config, test


def refuse_sounds(pictures: Pictures, run_dir: RunDir, *, what_for: str) -> None:
    """Raise `UserError` if the pictures are spectrograms; the message begins with `what_for`."""
    if pictures.are_sounds:
        raise UserError(
            f"{what_for} needs pictures, but the samples of {run_dir.path} are sounds; pass a run on pictures"
        )


def seed_of(config: RunConfig, options: AnalysisOptions) -> int:
    return config.seed if options.seed is None else options.seed


def choose_rows(num_samples: int, num: int, *, seed: int) -> Tensor:
    """Draw rows of `num` samples without replacement, or of all if there are fewer; (num,) int64, ascending."""
    order = generator(seed, "samples of an analysis").permutation(num_samples)
    return torch.from_numpy(order[:num]).sort().values


def write_result(run_dir: RunDir, name: str, result: Schema, png: bytes) -> list[Path]:
    """Write analysis/NAME.png and NAME.json, and return their paths."""
    png_path, json_path = run_dir.analysis / f"{name}.png", run_dir.analysis / f"{name}.json"
    write_atomically(png_path, png)
    write_json(json_path, result.model_dump(mode="json"))  # last: the numbers are there only if the picture is
    return [png_path, json_path]
