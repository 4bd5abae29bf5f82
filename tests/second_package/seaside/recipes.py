"""Recipes of this package."""

from __future__ import annotations

from configs import debug
from trainer.config import RunConfig

from .encoders import PatchesConfig
from .engines import CalmConfig
from .losses import TripletConfig
from .views import LightConfig


def mine() -> RunConfig:
    """Everything of our own, on the data of debug:image."""
    ours = {
        "name": "seaside",
        "views": LightConfig(),
        "encoder": PatchesConfig(embedding_size=16),
        "objective": TripletConfig(),
        "engine": CalmConfig(),
    }
    return RunConfig.model_validate(debug.image().model_dump() | ours)


def study() -> list[RunConfig]:
    """Return two runs that differ in their margin."""
    return [
        mine().model_copy(update={"name": f"seaside-{margin}", "objective": TripletConfig(margin=margin)})
        for margin in (0.2, 0.8)
    ]


def _private() -> RunConfig:
    return mine()
