"""Objectives: the losses that train the embeddings of two views.

Input: this rank's embeddings of two views, (B, D) each, of any length and float type. Output: this rank's loss, and
scalars to log. The mean of the losses over the ranks is the loss of the global batch. Each file holds one objective:
its config, its pure loss function and, if it has state, a small class. `OBJECTIVES` in `objective.py` names the
configs; another package adds its own by an entry point or `--code` (`data_pipeline.core.kinds`).

Invariant: neither loss nor gradient depends on the number of ranks, on the chunk size or on autocast.
"""

from trainer.objectives.barlow_twins import BarlowTwinsConfig, barlow_twins_loss
from trainer.objectives.byol import BYOLConfig, byol_loss
from trainer.objectives.dcl import DCLConfig, dcl_loss
from trainer.objectives.dino import DINOConfig, dino_loss
from trainer.objectives.ifm import IFMConfig, ifm_loss
from trainer.objectives.info_nce import InfoNCEConfig, info_nce_loss
from trainer.objectives.instance_discrimination import InstanceDiscriminationConfig
from trainer.objectives.joint_contrastive import JointContrastiveConfig, joint_contrastive_loss
from trainer.objectives.linear_loss import LinearLossConfig, linear_loss
from trainer.objectives.macl import MACLConfig, macl_loss
from trainer.objectives.moco import MoCoConfig
from trainer.objectives.nt_xent import NTXentConfig, nt_xent_loss
from trainer.objectives.nt_xent_cycle import NTXentCycleConfig
from trainer.objectives.nt_xent_decoder import NTXentDecoderConfig
from trainer.objectives.objective import (
    BaseObjectiveConfig,
    Objective,
    ObjectiveConfig,
    ObjectiveInputs,
    ObjectiveOutput,
    PureObjective,
    ViewPair,
)
from trainer.objectives.published_nt_xent import PublishedNTXentConfig, published_nt_xent_loss
from trainer.objectives.sieve import SieveConfig, sieve_loss
from trainer.objectives.sigreg import SIGRegConfig, sigreg_loss
from trainer.objectives.simsiam import SimSiamConfig, simsiam_loss
from trainer.objectives.split_loss import SplitLossConfig, split_loss
from trainer.objectives.supervised import SupervisedConfig, labelled_cross_entropy
from trainer.objectives.symmetric_info_nce import SymmetricInfoNCEConfig, symmetric_info_nce_loss
from trainer.objectives.vicreg import VICRegConfig, vicreg_loss

__all__ = [
    "BYOLConfig",
    "BarlowTwinsConfig",
    "BaseObjectiveConfig",
    "DCLConfig",
    "DINOConfig",
    "IFMConfig",
    "InfoNCEConfig",
    "InstanceDiscriminationConfig",
    "JointContrastiveConfig",
    "LinearLossConfig",
    "MACLConfig",
    "MoCoConfig",
    "NTXentConfig",
    "NTXentCycleConfig",
    "NTXentDecoderConfig",
    "Objective",
    "ObjectiveConfig",
    "ObjectiveInputs",
    "ObjectiveOutput",
    "PublishedNTXentConfig",
    "PureObjective",
    "SIGRegConfig",
    "SieveConfig",
    "SimSiamConfig",
    "SplitLossConfig",
    "SupervisedConfig",
    "SymmetricInfoNCEConfig",
    "VICRegConfig",
    "ViewPair",
    "barlow_twins_loss",
    "byol_loss",
    "dcl_loss",
    "dino_loss",
    "ifm_loss",
    "info_nce_loss",
    "joint_contrastive_loss",
    "labelled_cross_entropy",
    "linear_loss",
    "macl_loss",
    "nt_xent_loss",
    "published_nt_xent_loss",
    "sieve_loss",
    "sigreg_loss",
    "simsiam_loss",
    "split_loss",
    "symmetric_info_nce_loss",
    "vicreg_loss",
]
