"""Encoders and their parts: trunks, heads, batch norm.

Input: views (B, C, H, W) with any number of channels. Output: embeddings (B, D) for the objective, features (B, F) for
the linear probe and pooled features (B, C) for kNN, all float32.

Invariant: batch statistics do not depend on the number of ranks, unless the config has `batch_norm="local"`.
"""

from trainer.models.encoder import (
    ConvNetConfig,
    Encoder,
    EncoderConfig,
    Normalization,
    ResNetConfig,
    TimmConfig,
    WideResNet34x5Config,
    build_encoder,
)
from trainer.models.heads import HeadConfig, build_head

__all__ = [
    "ConvNetConfig",
    "Encoder",
    "EncoderConfig",
    "HeadConfig",
    "Normalization",
    "ResNetConfig",
    "TimmConfig",
    "WideResNet34x5Config",
    "build_encoder",
    "build_head",
]
