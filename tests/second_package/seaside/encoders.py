"""An encoder of patches: one convolution over them, a batch norm and a linear map of each."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from data_pipeline.core.schema import LayerSize
from trainer.models.encoder import BaseEncoderConfig
from trainer.models.trunk import Trunk


class PatchesConfig(BaseEncoderConfig):
    kind: Literal["seaside_patches"] = "seaside_patches"
    channels: LayerSize = 16
    patch_size: LayerSize = 4

    def build_trunk(self) -> Patches:
        return Patches(self)


class Patches(Trunk):
    def __init__(self, config: PatchesConfig) -> None:
        super().__init__()
        self.num_channels = config.channels
        self.cut = nn.Conv2d(config.in_channels, config.channels, config.patch_size, stride=config.patch_size)
        self.norm = nn.BatchNorm2d(config.channels)
        self.mix = nn.Conv2d(config.channels, config.channels, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        map_BCHW: Tensor = self.mix(F.relu(self.norm(self.cut(x_BCHW))))
        return map_BCHW
