"""Objectives: what the two views' embeddings are trained to do.

Comes in: this rank's embeddings of two views, (B, D) each, of any length and float type. Goes out: this rank's loss,
such that the mean over the ranks is the loss of the global batch, and scalars to log. One file holds an objective: its
config, its pure loss function, a small class; the union below is the registry. What may never happen: a loss or a
gradient that depends on the number of ranks, on the chunk size or on autocast.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.objectives.nt_xent import NTXent, NTXentConfig, nt_xent_loss
from trainer.objectives.objective import Objective, ObjectiveOutput, ViewPair
from trainer.objectives.published_nt_xent import PublishedNTXent, PublishedNTXentConfig, published_nt_xent_loss

ObjectiveConfig = Annotated[NTXentConfig | PublishedNTXentConfig, Field(discriminator="kind")]

__all__ = [
    "NTXent",
    "NTXentConfig",
    "Objective",
    "ObjectiveConfig",
    "ObjectiveOutput",
    "PublishedNTXent",
    "PublishedNTXentConfig",
    "ViewPair",
    "build_objective",
    "nt_xent_loss",
    "published_nt_xent_loss",
]


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective that a config names; what it trains is drawn from torch's default generator."""
    match config:
        case NTXentConfig():
            return NTXent(config)
        case PublishedNTXentConfig():
            return PublishedNTXent(config)
