"""Views in another light: each picture times a number that is drawn for it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from data_pipeline.core.counter_rng import DrawKeys, uniform
from data_pipeline.core.schema import PositiveShare
from trainer.views import BaseViewsConfig, ViewsInputs


class LightConfig(BaseViewsConfig):
    kind: Literal["seaside_light"] = "seaside_light"
    darkest: PositiveShare = 0.5

    def build(self, given: ViewsInputs) -> Light:
        return Light(self)


class Light(nn.Module):
    def __init__(self, config: LightConfig) -> None:
        super().__init__()
        self.darkest = config.darkest

    @torch.no_grad()
    def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        light_B = self.darkest + (1 - self.darkest) * uniform(keys, 1, purpose=0)[:, 0]
        return images_BCHW * light_B[:, None, None, None].to(images_BCHW.dtype)
