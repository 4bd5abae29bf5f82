"""Random mask and its complement: each of the two views keeps the numbers of a picture that the other one loses.

Of a picture x the views are 2 D x and 2 (I - D) x, where D is diagonal, with independent entries that are 0 or 1 with
probability 1/2 each. It is the augmentation under which Wen and Li (2021) prove what contrastive learning finds: noise
that is dense in the picture has nothing in common in two disjoint halves of it, a sparse feature has. There the
negatives are pictures without a mask; here they are whatever the objective compares, which is views.

Legend: B samples, C channels, H rows, W columns; N whole numbers of T bits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final, Literal

import torch
from torch import Tensor, nn

from data_pipeline.core.counter_rng import DrawKeys, integers
from data_pipeline.core.schema import ImageSize, Schema

_PURPOSE: Final = 0  # of `data_pipeline.core.counter_rng`
_BITS: Final = 30  # of one draw of `integers`


class RandomMaskConfig(Schema):
    """unit: what is kept or lost as one. "value": every number of the raw picture, as in the paper; "pixel": all the
        channels of a pixel.
    patch_size: rows and columns of squares that share a draw; 1 is the paper's.
    rescale: the factor 2, with which a view's expectation is the picture; views are then in [0, 2].
    """

    kind: Literal["random_mask"] = "random_mask"
    unit: Literal["value", "pixel"] = "value"
    patch_size: ImageSize = 1
    rescale: bool = True


def check_image_size(config: RandomMaskConfig, *, height: int, width: int) -> None:
    """Raises `ValueError` if the patches do not cover a picture of that size."""
    if height % config.patch_size or width % config.patch_size:
        raise ValueError(
            f"views.patch_size={config.patch_size} needs a height and width that are multiples of it, "
            f"got {height} x {width}"
        )


class RandomMask(nn.Module):
    """`policy(images_BCHW, keys, masks_BHW) -> views_BCHW`; no parameters, and draws that depend on `keys` alone."""

    def __init__(self, config: RandomMaskConfig) -> None:
        super().__init__()
        self.config = config

    @torch.no_grad()
    def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """One view of each picture: (B, C, H, W) of any float dtype to the same.

        Views number 2k and 2k + 1 of a sample are complements, of a mask of their own for every k. `masks_BHW` are
        those of any view policy, of drawn objects, which this one ignores.

        Raises:
            ValueError: `check_image_size` refuses the pictures.
        """
        config = self.config
        _, C, H, W = images_BCHW.shape
        check_image_size(config, height=H, width=W)
        first_of_pair = dataclasses.replace(keys, view=keys.view & ~1)
        shape = (1 if config.unit == "pixel" else C, H, W)
        keep_BCHW = draw_mask(first_of_pair, shape=shape, patch_size=config.patch_size)
        if keys.view & 1:
            keep_BCHW = ~keep_BCHW
        return images_BCHW * keep_BCHW.to(images_BCHW.dtype).mul_(2 if config.rescale else 1)


def draw_mask(keys: DrawKeys, *, shape: tuple[int, int, int], patch_size: int = 1) -> Tensor:
    """(B, *shape) bool, true with probability 1/2, independently but for the squares of `patch_size` in each channel.

    The sides of `shape`, which is (channels, rows, columns), are multiples of `patch_size`.
    """
    C, H, W = shape
    num_rows, num_columns = H // patch_size, W // patch_size
    keep_BCHW = coins(keys, C * num_rows * num_columns).view(-1, C, num_rows, num_columns)
    if patch_size > 1:
        for axis, size in ((3, W), (2, H)):
            patch_of = torch.arange(size, device=keep_BCHW.device) // patch_size
            keep_BCHW = keep_BCHW.index_select(axis, patch_of)
    return keep_BCHW


def coins(keys: DrawKeys, num: int) -> Tensor:
    """(B, num) bool, independent and true with probability 1/2: the bits of whole numbers."""
    words_BN = integers(keys, math.ceil(num / _BITS), 1 << _BITS, purpose=_PURPOSE).to(torch.int32)
    bit_T = 1 << torch.arange(_BITS, dtype=torch.int32, device=words_BN.device)
    return (words_BN[:, :, None] & bit_T).flatten(1)[:, :num] != 0
