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


def random_resized_crops(
    sizes_B2: Tensor,
    keys: DrawKeys,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    purpose: int,
) -> Tensor:
    """Draw one box for each picture: (B, 4) int64 of top, left, height and width in pixels, the fields of `Crop`.

    `sizes_B2` is (B, 2) int64, height and width of each picture. `scale` is the range of the share of the area, `ratio`
    the range of width / height.

    Examples:
        >>> keys = DrawKeys(seed=0, epoch=0, index_B=torch.tensor([5]), view=0)
        >>> box = random_resized_crops(torch.tensor([[400, 500]]), keys, scale=(1, 1), ratio=(1, 1), purpose=0)
        >>> Crop(*box[0].tolist())
        Crop(top=0, left=50, height=400, width=400)
    """
    numbers_BN = uniform(keys, NUM_CROP_NUMBERS, purpose=purpose)
    return crop_boxes(numbers_BN, sizes_B2, scale=scale, ratio=ratio).long()


def crop_boxes(
    numbers_BN: Tensor, sizes_B2: Tensor, *, scale: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Return the boxes that uniform numbers in [0, 1) give: (B, 4) float32 of top, left, height and width in pixels.

    `numbers_BN` is (B, `NUM_CROP_NUMBERS`) float32, `sizes_B2` (B, 2) int64 of heights and widths.
    """
    area_BT, aspect_BT, place_B2 = torch.split(numbers_BN, [_ATTEMPTS, _ATTEMPTS, 2], dim=1)
    size_B2 = sizes_B2.to(torch.float32)
    area_BT = size_B2.prod(dim=1, keepdim=True) * between(scale, area_BT)
    aspect_BT = torch.exp(between((math.log(ratio[0]), math.log(ratio[1])), aspect_BT))
    side_BT2 = torch.stack([torch.sqrt(area_BT / aspect_BT), torch.sqrt(area_BT * aspect_BT)], dim=2).round_()
    fits_BT = ((side_BT2 > 0) & (side_BT2 <= size_B2[:, None])).all(dim=2)
    first_B12 = fits_BT.to(torch.uint8).argmax(dim=1)[:, None, None].expand(-1, 1, 2)
    drawn_B2 = side_BT2.gather(1, first_B12)[:, 0]
    drawn_B4 = torch.cat([torch.floor(place_B2 * (size_B2 - drawn_B2 + 1)), drawn_B2], dim=1)
    return torch.where(fits_BT.any(dim=1, keepdim=True), drawn_B4, _middle_boxes(sizes_B2, ratio))


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
