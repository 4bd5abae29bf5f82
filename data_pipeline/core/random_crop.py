"""Draw the boxes of random-resized crops for pictures of any sizes, by the law of torchvision's `RandomResizedCrop`.

Up to ten attempts draw a share of the area uniformly and an aspect (width / height) log-uniformly. The first box that
fits in the picture is placed uniformly. If none fits, the box is the largest of an allowed aspect in the middle.

Guarantees: a box depends on the size of its picture and the keys alone, not on the rest of the batch.

Shapes: B pictures, T attempts, N random numbers of one box.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, uniform

_ATTEMPTS: Final = 10
NUM_CROP_NUMBERS: Final = 2 * _ATTEMPTS + 2  # uniform numbers of one box: areas, aspects, and two for the place


class Crop(NamedTuple):
    """A box of whole pixels inside an upright picture."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class CropLaw:
    """How the crop of a view is drawn.

    Attributes:
        scale: the range of the crop's share of the area.
        ratio: the range of width / height.
        purpose: of the random numbers, as in `data_pipeline.core.counter_rng`.
    """

    scale: tuple[float, float]
    ratio: tuple[float, float]
    purpose: int


def random_resized_crops(sizes_B2: Tensor, keys: DrawKeys, law: CropLaw) -> Tensor:
    """Draw one box for each picture: (B, 4) int64 of top, left, height and width in pixels, the fields of `Crop`.

    `sizes_B2` is (B, 2) int64, height and width of each picture.

    Examples:
        >>> keys = DrawKeys(seed=0, epoch=0, index_B=torch.tensor([5]), view=0)
        >>> box = random_resized_crops(torch.tensor([[400, 500]]), keys, CropLaw((1, 1), (1, 1), purpose=0))
        >>> Crop(*box[0].tolist())
        Crop(top=0, left=50, height=400, width=400)
    """
    numbers_BN = uniform(keys, NUM_CROP_NUMBERS, purpose=law.purpose)
    return crop_boxes(numbers_BN, sizes_B2, scale=law.scale, ratio=law.ratio).long()


def crop_boxes(
    numbers_BN: Tensor, sizes_B2: Tensor, *, scale: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Return the boxes that uniform numbers in [0, 1) give: (B, 4) float32 of top, left, height and width in pixels.

    `numbers_BN` is (B, `NUM_CROP_NUMBERS`) float32, `sizes_B2` (B, 2) int64 of heights and widths.
    """
    size_B2 = sizes_B2.to(torch.float32)
    share_BT, aspect_BT, place_B2 = torch.split(numbers_BN, [_ATTEMPTS, _ATTEMPTS, 2], dim=1)
    area_BT = size_B2.prod(dim=1, keepdim=True) * between(scale, share_BT)
    aspect_BT = torch.exp(between((math.log(ratio[0]), math.log(ratio[1])), aspect_BT))
    side_BT2 = torch.stack([area_BT / aspect_BT, area_BT * aspect_BT], dim=2).sqrt_().round_()
    fits_BT = ((side_BT2 > 0) & (side_BT2 <= size_B2[:, None])).all(dim=2)
    # The sides of the first attempt that fits.
    fits_B1, first_B1 = fits_BT.to(torch.uint8).max(dim=1, keepdim=True)
    drawn_B2 = side_BT2.gather(1, first_B1[:, :, None].expand(-1, 1, 2))[:, 0]
    drawn_B4 = torch.cat([torch.floor(place_B2 * (size_B2 - drawn_B2 + 1)), drawn_B2], dim=1)
    return torch.where(fits_B1 == 0, _middle_boxes(sizes_B2, ratio), drawn_B4)


def _middle_boxes(sizes_B2: Tensor, ratio: tuple[float, float]) -> Tensor:
    """Return the largest boxes of an allowed aspect in the middle of the pictures, (B, 4) float32."""
    height_B, width_B = sizes_B2.to(torch.float64).unbind(dim=1)
    largest_B2 = torch.stack(
        [torch.round(width_B / ratio[0]).minimum(height_B), torch.round(height_B * ratio[1]).minimum(width_B)], dim=1
    )
    start_B2 = torch.floor((sizes_B2 - largest_B2) / 2)
    return torch.cat([start_B2, largest_B2], dim=1).to(torch.float32)


def between(limits: tuple[float, float], u: Tensor) -> Tensor:
    """Return numbers in [0, 1) stretched to lie between two limits."""
    low, high = limits
    return low + (high - low) * u
