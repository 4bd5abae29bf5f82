"""Make runs with encoder and views that are known by hand, on the tiny dataset: class = brightness of a half."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from configs import debug
from data_pipeline.core.counter_rng import DrawKeys, uniform
from trainer.config import RunConfig, read_config
from trainer.models.encoder import Encoder
from trainer.modules import TrainedModules
from trainer.run_dir import RunDir


class HalvesEncoder(nn.Module):
    """An encoder whose features are the mean brightness of the top half and of the bottom half."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Identity()
        self.head = nn.Identity()

    def features(self, views_BCHW: Tensor) -> Tensor:
        half = views_BCHW.shape[2] // 2
        return torch.stack([views_BCHW[:, :, :half].mean((1, 2, 3)), views_BCHW[:, :, half:].mean((1, 2, 3))], dim=1)

    def pooled(self, views_BCHW: Tensor) -> Tensor:
        """Return the same features less the middle, so that directions differ."""
        return self.features(views_BCHW) - 0.4

    def feature_size(self, height: int, width: int) -> int:
        return 2


class DropBottom(nn.Module):
    """A policy that blackens the bottom half in a share of the views, and changes nothing else."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def dropped(self, keys: DrawKeys) -> Tensor:
        return uniform(keys, 1, purpose=0)[:, 0] < self.share

    def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None) -> Tensor:
        views_BCHW = images_BCHW.clone()
        dropped_B = self.dropped(keys)
        views_BCHW[dropped_B, :, images_BCHW.shape[2] // 2 :] = 0.0
        return views_BCHW


def write_run(
    directory: Path, data: Path, *, recipe: Callable[[], RunConfig] = debug.image, name: str = "", **sections: Any
) -> RunDir:
    """Write a run directory without checkpoints, so that only its untrained modules can be loaded.

    `sections` holds further settings of sections of the config.
    """
    directory.mkdir(parents=True)
    config: dict[str, Any] = recipe().model_dump(mode="json")
    config["name"] = name or config["name"]
    for section, settings in sections.items():
        config[section] |= settings
    config["data"] |= {"train_dir": str(data / "train"), "test_dir": str(data / "test")}
    (directory / "config.json").write_text(json.dumps(config))
    return RunDir(directory)


def plant(monkeypatch: pytest.MonkeyPatch, **policies: nn.Module) -> None:
    """Let analyses find, in the run directories of these names, a `HalvesEncoder` and these policies."""

    def open_planted(run_dir: RunDir, *, step: int | None) -> TrainedModules:
        policy = policies[run_dir.path.name]
        return TrainedModules(read_config(run_dir.config), 0, cast(Encoder, HalvesEncoder()), policy)

    monkeypatch.setattr("trainer.analyses.analysis.load_modules", open_planted)
