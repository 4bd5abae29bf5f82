"""A wave over the picture: high or low."""

from __future__ import annotations

import torch

from data_pipeline.core.counter_rng import DrawKeys, integers
from data_pipeline.core.sample import MASK_OBJECT
from data_pipeline.overlays import FIRST_PURPOSE, Layer, PictureOverlay


class Waves(PictureOverlay):
    class_names = ("high", "low")
    title = "wave"

    def draw(self, keys: DrawKeys) -> Layer:
        label_B = integers(keys, 1, 2, purpose=FIRST_PURPOSE)[:, 0]
        colour_BC = integers(keys, 3, 256, purpose=FIRST_PURPOSE + 1).to(torch.uint8)
        row_H = torch.arange(self.drawn_size, device=label_B.device)
        first_B = torch.where(label_B == 0, self.drawn_size // 4, 3 * self.drawn_size // 4)
        mask_BH = (row_H >= first_B[:, None]) & (row_H < first_B[:, None] + 4)
        mask_BHW = (mask_BH[:, :, None] * MASK_OBJECT).to(torch.uint8).expand(-1, -1, self.drawn_size).contiguous()
        return Layer(label_B, colour_BC[:, :, None, None], mask_BHW, mask_BHW)
