"""What every analysis starts from: a run, loaded at one checkpoint, with its samples, and the options of an analysis.

Shapes: N samples, B batch, C channels, H height, W width.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.randomness import generator
from data_pipeline.core.schema import Schema
from trainer.checkpoint.restore import load_players
from trainer.checkpoint.run_state import other_data
from trainer.config import RunConfig, read_config
from trainer.modules import Players
from trainer.probes.features import (
    LABEL_SPACES,
    TRAIN_DRAW,
    LabelSpace,
    Pictures,
    ViewFunction,
    frozen,
    read_pictures,
    to_float,
)
from trainer.run_dir import RunDir, write_atomically, write_json
from trainer.views import expert_image

CPU = torch.device("cpu")
_BATCH_SIZE = 256


@dataclass(frozen=True)
class AnalysisOptions:
    """The options that all analyses share.

    step: the checkpoint. None is the newest, 0 the untrained encoder.
    seed: the seed of every random draw. None is the run's own.
    allow_pipe: whether a `pipe:` location in the run's config may be executed.
    """

    step: int | None = None
    device: torch.device = CPU
    seed: int | None = None
    allow_pipe: bool = False


@dataclass(frozen=True)
class LoadedRun:
    """A run at one checkpoint. Its modules are on `device`, in eval mode."""

    run_dir: RunDir
    players: Players
    device: torch.device
    seed: int

    @cached_property
    def train(self) -> Pictures:
        data = self.players.config.data
        train = read_pictures(data.train_dir, read=data, draw=TRAIN_DRAW)
        return self._checked(train, "train", location=data.train_dir)

    @cached_property
    def test(self) -> Pictures:
        data = self.players.config.data
        return self._checked(read_pictures(data.test_dir, read=data), "test", location=data.test_dir)

    def _checked(self, pictures: Pictures, which: Literal["train", "test"], *, location: str) -> Pictures:
        """Return them, and warn if they are of another dataset than that of the training."""
        sha256 = pictures.manifest.sha256
        if warning := other_data(self.players.trained_on, which=which, sha256=sha256, location=location):
            print(f"warning: {warning}", file=sys.stderr)
        return pictures

    def label_spaces(self) -> tuple[LabelSpace, ...]:
        """The labels that the samples have: `base`, and `overlay` where something was drawn or mixed in."""
        return tuple(space for space in LABEL_SPACES if self.test.class_names(space))


@dataclass(frozen=True)
class ViewBatch:
    """Samples as the encoder sees them without a view, and one view of each: (B, C, H, W) float32 on the device.

    `masks_BHW` are on the host, None for sounds.
    """

    seen_BCHW: Tensor
    views_BCHW: Tensor
    masks_BHW: Tensor | None


def load_run(run_dir: RunDir, options: AnalysisOptions) -> LoadedRun:
    """Load a run's players. Raises `UserError` where there is no such checkpoint."""
    players = load_players(run_dir, step=options.step, allow_pipe=options.allow_pipe).to(options.device)
    return LoadedRun(run_dir, players, options.device, seed_of(players.config, options))


def read_test_pictures(run_dir: RunDir, options: AnalysisOptions, *, what_for: str) -> tuple[RunConfig, Pictures]:
    """The config and the test pictures of a run, for an analysis of expert views that needs no checkpoint.

    Raises `UserError` where they are sounds, and `what_for` begins that sentence, or where they are not square.
    """
    config = read_config(run_dir.config, allow_pipe=options.allow_pipe)
    test = read_pictures(config.data.test_dir, read=config.data)
    refuse_sounds(test, run_dir, what_for=what_for)
    _, height, width = test.manifest.input_shape
    try:
        expert_image.check_image_size(height=height, width=width)
    except ValueError as error:
        raise UserError(f"{config.data.test_dir}: {error}") from None
    return config, test


def refuse_sounds(pictures: Pictures, run_dir: RunDir, *, what_for: str) -> None:
    if pictures.sounds is not None:
        raise UserError(f"{what_for} is of pictures, and those of {run_dir.path} are sounds; take a run on pictures")


def seed_of(config: RunConfig, options: AnalysisOptions) -> int:
    return config.seed if options.seed is None else options.seed


def choose_rows(num_samples: int, num: int, *, seed: int) -> Tensor:
    """Rows of `num` samples, or all if there are fewer, drawn without replacement; (num,) int64, ascending."""
    order = generator(seed, "samples of an analysis").permutation(num_samples)
    return torch.from_numpy(order[:num]).sort().values


def view_batches(
    policy: ViewFunction,
    pictures: Pictures,
    rows_N: Tensor,
    *,
    seed: int,
    view: int,
    device: torch.device,
    index_N: Tensor | None = None,
) -> Iterator[ViewBatch]:
    """The samples of `rows_N` in order, each with its view number `view`, drawn as in the first epoch of training, or,
    with `index_N`, as if the samples had those indices.
    """
    index_N = pictures.index_N[rows_N] if index_N is None else index_N
    with frozen(policy):
        for rows_B, index_B in zip(torch.split(rows_N, _BATCH_SIZE), torch.split(index_N, _BATCH_SIZE), strict=True):
            batch = pictures.inputs(rows_B)
            inputs = to_float(batch.inputs, device)
            keys = DrawKeys(seed=seed, epoch=0, index_B=index_B.to(device), view=view)
            masks_BHW = None if batch.masks_BHW is None else batch.masks_BHW.to(device)
            views_BCHW = policy(inputs, keys, masks_BHW).float()
            yield ViewBatch(pictures.seen(inputs), views_BCHW, batch.masks_BHW)


def write_result(run_dir: RunDir, name: str, result: Schema, png: bytes) -> list[Path]:
    """Write analysis/NAME.png and NAME.json, and return their paths."""
    png_path, json_path = run_dir.analysis / f"{name}.png", run_dir.analysis / f"{name}.json"
    write_atomically(png_path, png)
    write_json(json_path, result.model_dump(mode="json"))  # last: the numbers are there only if the picture is
    return [png_path, json_path]
