"""Adversarial masks: a network that learns which part of a picture to hide from the encoder (ADIOS, Shi et al. 2022).

A U-Net gives each pixel one of N masks, by a softmax. One of the masks, drawn for each view, is taken from the picture.
The network learns like a viewmaker, on minus the loss of the encoder, and it pays a penalty for masks that hide nothing
or everything. This is the form with a single mask (ADIOS-s, arXiv 2201.13100); the other one sums the losses of all N.

The paper masks one view and keeps the other one: a `pair` of expert views and of a `sequence` that ends with this
policy. Hidden pixels are 0; in the published code they are the mean, because pictures are normalised there before.

Legend: B samples, C channels, H rows, W columns, N masks.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Final, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from data_pipeline.core.counter_rng import DrawKeys, integers
from data_pipeline.core.schema import Factor
from trainer.views.inputs import check_pictures
from trainer.views.policy import BaseViewsConfig, ViewsInputs

_PURPOSE: Final = 0  # `purpose` in `data_pipeline.core.counter_rng`
_NUM_GROUPS: Final = 8  # of a group norm
_LEAST: Final = 8  # pixels of a side, which the U-Net halves three times


class AdversarialMaskConfig(BaseViewsConfig):
    """The config of adversarial masks; the defaults are those of the published SimCLR with a single mask.

    num_masks: the masks N among which the pixels are shared out.
    sparsity_weight: the weight of the penalty, alpha in the paper.
    base_width: the channels of the first map of the U-Net; later maps have twice as many.
    """

    is_learned: ClassVar[bool] = True

    kind: Literal["adversarial_mask"] = "adversarial_mask"
    num_masks: Annotated[int, Field(ge=2, le=64)] = 4
    sparsity_weight: Factor = 0.75
    base_width: Annotated[int, Field(ge=8, le=1_024, multiple_of=_NUM_GROUPS)] = 8

    def build(self, given: ViewsInputs) -> AdversarialMask:
        return AdversarialMask(self, image_channels=given.image_channels)

    def check_image_size(self, *, height: int, width: int) -> None:
        if min(height, width) < _LEAST:
            raise ValueError(
                f'views of kind "{self.kind}" need pictures of {_LEAST} x {_LEAST} or more, got {height} x {width}'
            )


class AdversarialMask(nn.Module):
    """The view policy of adversarial masks: a module `policy(images_BCHW, keys, masks_BHW) -> views_BCHW`.

    The setting `memory.viewmaker_checkpointing` has no effect on it.
    """

    def __init__(self, config: AdversarialMaskConfig, *, image_channels: int) -> None:
        super().__init__()
        self.config = config
        self._penalty: Tensor | None = None
        self.network = UNet(image_channels, config.num_masks, width=config.base_width)

    def compile_layers(self, **options: Any) -> None:
        """Compile the network by `torch.compile` with these options. The masks are drawn outside: their keys change."""
        self.network.compile(**options)

    def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Return one view of each picture, with the shape and dtype of the pictures."""
        check_pictures(images_BCHW, keys)
        masks_BNHW = self.masks(images_BCHW)
        self._penalty = self.config.sparsity_weight * mask_penalty(masks_BNHW)
        drawn_B = integers(keys, 1, self.config.num_masks, purpose=_PURPOSE)[:, 0]
        hidden_B1HW = masks_BNHW[torch.arange(len(drawn_B), device=drawn_B.device), drawn_B].unsqueeze(1)
        return images_BCHW * (1 - hidden_B1HW).to(images_BCHW.dtype)

    def masks(self, images_BCHW: Tensor) -> Tensor:
        """Return the N masks of each picture, (B, N, H, W), which add up to 1 at each pixel."""
        logits_BNHW: Tensor = self.network(images_BCHW)
        return logits_BNHW.softmax(1)

    def take_penalty(self) -> Tensor:
        """Return the penalty of the last call, which the network minimises beside its loss, and drop it here."""
        penalty, self._penalty = self._penalty, None
        assert penalty is not None
        return penalty


class UNet(nn.Module):
    """A U-Net from pictures of any size to `num_out` maps of the same size.

    The last map going down is changed by its mean over the pixels, as a dense layer changes the whole map in the
    published network.
    """

    def __init__(self, num_in: int, num_out: int, *, width: int) -> None:
        super().__init__()
        wide = 2 * width
        self.down = nn.ModuleList([_layer(num_in, width), _layer(width, wide), _layer(wide, wide), _layer(wide, wide)])
        self.whole = nn.Sequential(nn.Linear(wide, 128), nn.ReLU(), nn.Linear(128, wide), nn.ReLU())
        up = [_layer(2 * wide, wide), _layer(2 * wide, wide), _layer(2 * wide, width), _layer(wide, width)]
        self.up = nn.ModuleList(up)
        self.out = nn.Conv2d(width, num_out, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        maps: list[Tensor] = []
        for layer in self.down:
            x_BCHW = layer(F.avg_pool2d(x_BCHW, 2) if maps else x_BCHW)
            maps.append(x_BCHW)
        x_BCHW = x_BCHW + self.whole(x_BCHW.mean((2, 3)))[:, :, None, None]
        for layer, map_BCHW in zip(self.up, reversed(maps), strict=True):
            x_BCHW = F.interpolate(x_BCHW, size=map_BCHW.shape[2:])
            x_BCHW = layer(torch.cat([x_BCHW, map_BCHW], dim=1))
        out_BNHW: Tensor = self.out(x_BCHW)
        return out_BNHW


def mask_penalty(masks_BNHW: Tensor) -> Tensor:
    """Return the mean over the samples of the sum over the masks of 1 / sin(pi share) (Shi et al. 2022).

    The share is the mean of a mask, and the sine is raised by 1e-10, as published. The penalty is least if each mask
    hides half of a picture. With a process group, the mean over the ranks is the penalty of the whole batch.
    """
    share_BN = masks_BNHW.to(torch.promote_types(masks_BNHW.dtype, torch.float32)).mean((2, 3))
    return (1 / (torch.sin(math.pi * share_BN) + 1e-10)).sum(1).mean()


def _layer(num_in: int, num_out: int) -> nn.Sequential:
    convolution = nn.Conv2d(num_in, num_out, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.GroupNorm(_NUM_GROUPS, num_out), nn.ReLU(inplace=True))
