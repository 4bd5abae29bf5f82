"""Objectives: the losses that train the embeddings of two views.

Input: this rank's embeddings of two views, (B, D) each, of any length and float type. Output: this rank's loss, and
scalars to log. The mean of the losses over the ranks is the loss of the global batch. Each file holds one objective:
its config, its pure loss function and a small class. The union below is the registry.

Invariant: neither loss nor gradient depends on the number of ranks, on the chunk size or on autocast.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.models.encoder import Encoder
from trainer.objectives.barlow_twins import BarlowTwins, BarlowTwinsConfig, barlow_twins_loss
from trainer.objectives.info_nce import InfoNCE, InfoNCEConfig, info_nce_loss
from trainer.objectives.instance_discrimination import InstanceDiscrimination, InstanceDiscriminationConfig
from trainer.objectives.linear_loss import LinearLoss, LinearLossConfig, linear_loss
from trainer.objectives.moco import MoCo, MoCoConfig
from trainer.objectives.nt_xent import NTXent, NTXentConfig, nt_xent_loss
from trainer.objectives.objective import Objective, ObjectiveOutput, ViewPair
from trainer.objectives.published_nt_xent import PublishedNTXent, PublishedNTXentConfig, published_nt_xent_loss
from trainer.objectives.simsiam import SimSiam, SimSiamConfig, simsiam_loss
from trainer.objectives.split_loss import SplitLoss, SplitLossConfig, split_loss

ObjectiveConfig = Annotated[
    NTXentConfig
    | PublishedNTXentConfig
    | InfoNCEConfig
    | SplitLossConfig
    | LinearLossConfig
    | BarlowTwinsConfig
    | MoCoConfig
    | SimSiamConfig
    | InstanceDiscriminationConfig,
    Field(discriminator="kind"),
]

__all__ = [
    "BarlowTwinsConfig",
    "InfoNCEConfig",
    "InstanceDiscriminationConfig",
    "LinearLossConfig",
    "MoCoConfig",
    "NTXent",
    "NTXentConfig",
    "Objective",
    "ObjectiveConfig",
    "ObjectiveOutput",
    "PublishedNTXent",
    "PublishedNTXentConfig",
    "SimSiamConfig",
    "SplitLossConfig",
    "ViewPair",
    "barlow_twins_loss",
    "build_objective",
    "info_nce_loss",
    "linear_loss",
    "nt_xent_loss",
    "published_nt_xent_loss",
    "simsiam_loss",
    "split_loss",
]


def build_objective(
    config: ObjectiveConfig, *, encoder: Encoder, embedding_size: int, num_samples: int, seed: int
) -> Objective:
    """Return the objective of a config for an encoder and a dataset. Draws its weights from torch's generator."""
    match config:
        case NTXentConfig():
            return NTXent(config)
        case PublishedNTXentConfig():
            return PublishedNTXent(config)
        case InfoNCEConfig():
            return InfoNCE(config)
        case SplitLossConfig():
            return SplitLoss(config)
        case LinearLossConfig():
            return LinearLoss(config)
        case BarlowTwinsConfig():
            return BarlowTwins(config)
        case MoCoConfig():
            return MoCo(config, encoder=encoder, embedding_size=embedding_size)
        case SimSiamConfig():
            return SimSiam(config, embedding_size=embedding_size)
        case InstanceDiscriminationConfig():
            return InstanceDiscrimination(config, num_samples=num_samples, embedding_size=embedding_size, seed=seed)
