"""Where metrics and pictures of a training go besides metrics.jsonl: Weights & Biases and TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_pipeline.core.schema import Count, Line, Schema
from data_pipeline.core.system import variable

# The limits of W&B.
Project = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\p{C}\p{Zl}\p{Zp}/\\#?%:]*$")]
Tag = Annotated[Line, Field(max_length=64)]
Group = Annotated[Line, Field(max_length=128)]
FactorName = Annotated[Line, Field(max_length=64)]
Level = Annotated[Line, Field(max_length=128)]


class TrackingConfig(Schema):
    """Where metrics go besides metrics.jsonl.

    wandb: "auto" is online if the user is logged in (`wandb login`, WANDB_API_KEY), otherwise offline. The environment
        variable WANDB_MODE=offline makes "auto" and "online" offline; WANDB_MODE=disabled disables W&B in any case.
    wandb_project: the name of the W&B project.
    tags: labels of the W&B run, such as its study.
    group: the group of the W&B run, such as its study or sweep; None means the run's name, which seeds share.
    axes: the settings that the sweep of this run varies, by their dotted names. --sweep sets them; reports draw over
        them.
    factors: the level of this run in each factor of an experiment's design, such as {"setting": "RandBit", "cure":
        "viewmaker"}. They change no result. Reports build their tables from them, and W&B gets them with the config.
    tensorboard: also write RUN_DIR/tensorboard (needs the extra "tensorboard").
    pictures_every_steps: the steps between two grids of views with histograms of their changes; None means never.
    """

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    wandb_project: Project = "feature-dropout"
    tags: Annotated[tuple[Tag, ...], Field(max_length=100)] = ()
    group: Group | None = None
    axes: Annotated[tuple[Line, ...], Field(max_length=100)] = ()
    factors: Annotated[dict[FactorName, Level], Field(max_length=20)] = Field(default_factory=dict)
    tensorboard: bool = False
    pictures_every_steps: Count | None = 500


@dataclass(frozen=True)
class StepPictures:
    """The pictures of a step, by name: images (H, W, 3) uint8, and values (N,) for histograms."""

    images: Mapping[str, NDArray[np.uint8]]
    histograms: Mapping[str, NDArray[np.float32]]

    def finite(self) -> StepPictures:
        """Return the pictures without inf and nan, which have no bin, and without histograms that are then empty."""
        finite = {name: values[np.isfinite(values)] for name, values in self.histograms.items()}
        return StepPictures(self.images, {name: values for name, values in finite.items() if len(values)})


def uses_wandb(config: TrackingConfig) -> bool:
    """Return whether to use W&B: not if the config or WANDB_MODE says "disabled"."""
    return config.wandb != "disabled" and variable("WANDB_MODE") != "disabled"
