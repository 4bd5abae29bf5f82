"""Encoders and what they are made of.

Comes in: views (B, 3, H, W) in [0, 1]. Goes out: embeddings (B, D) for the objective, features (B, F) for the linear
probe, pooled features (B, C) for kNN, all float32. What may never happen: batch statistics that depend on how many
ranks share the batch, unless the config asks for `batch_norm="local"`.
"""

from trainer.models.encoder import Encoder, EncoderConfig, ResNet10Config, ResNet18SmallConfig, build_encoder
from trainer.models.loading import load_encoder

__all__ = ["Encoder", "EncoderConfig", "ResNet10Config", "ResNet18SmallConfig", "build_encoder", "load_encoder"]
