"""Random mask and its complement: each of the two views keeps the numbers of a picture that the other view loses.

The views of a picture x are 2 D x and 2 (I - D) x. D is diagonal, with independent entries that are 0 or 1 with
probability 1/2 each. For this augmentation, Wen and Li (2021, Theorem 3.4) prove what contrastive learning finds: two
disjoint halves of a picture have a sparse feature in common, but not dense noise. Their negatives are pictures without
a mask, which take a third pass of the encoder in each step: `negatives` of NT-Xent.

Legend: B samples, C channels, H rows, W columns; N integers of T bits.
"""

from __future__ import annotations

import math
from typing import ClassVar, Final, Literal

import torch
from torch import Tensor, nn

from data_pipeline.core.counter_rng import DrawKeys, integers
from trainer.views.inputs import check_pictures
from trainer.views.policy import BaseViewsConfig, ViewsInputs

_PURPOSE: Final = 0  # `purpose` in `data_pipeline.core.counter_rng`
_BITS: Final = 30  # bits of one draw of `integers`


class RandomMaskConfig(BaseViewsConfig):
    """The config of the random mask.

    rescale: whether to multiply views by 2, so that the expectation of a view is the picture; views are then in [0, 2].
    """

    is_bounded: ClassVar[bool] = False  # views are doubled

    kind: Literal["random_mask"] = "random_mask"
    rescale: bool = True

    def build(self, given: ViewsInputs) -> RandomMask:
        return RandomMask(self)


class RandomMask(nn.Module):
    """The view policy of the random mask: a module `policy(images_BCHW, keys, masks_BHW) -> views_BCHW`.

    It has no parameters, and its draws depend on `keys` alone.
    """

    def __init__(self, config: RandomMaskConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None = None) -> Tensor:
        """Return one view of each picture, with the shape and float dtype of the pictures, (B, C, H, W).

        The views 2k and 2k + 1 of a sample are complements, and each k has its own mask.
        """
        check_pictures(images_BCHW, keys)
        keep_BCHW = coins(keys.of_pair(), images_BCHW[0].numel()).view(images_BCHW.shape)
        if keys.is_next_B is not None:
            keep_BCHW ^= keys.is_next_B[:, None, None, None]
        elif keys.view & 1:
            keep_BCHW = ~keep_BCHW
        return images_BCHW * keep_BCHW.to(images_BCHW.dtype).mul_(2 if self.config.rescale else 1)


def coins(keys: DrawKeys, num: int) -> Tensor:
    """Draw (B, num) independent bools, True with probability 1/2, from the bits of integers."""
    words_BN = integers(keys, math.ceil(num / _BITS), 1 << _BITS, purpose=_PURPOSE).to(torch.int32)
    bit_T = 1 << torch.arange(_BITS, dtype=torch.int32, device=words_BN.device)
    return (words_BN[:, :, None] & bit_T).flatten(1)[:, :num] != 0
