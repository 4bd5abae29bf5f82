"""C+Shapes (Tamkin et al. 2022): a square, a triangle or an ellipse in the middle of the picture, half see-through.

Only class and colour change; place and size are fixed. The shapes are stored as the columns that each row covers,
as the original's drawing library drew them, because another version of the library may draw other pixels.

Shapes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, integers
from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE
from data_pipeline.overlays import FIRST_PURPOSE, IMAGE_SIZE, Layer, PictureOverlay

FIRST, LAST = 10, 21  # the box of every shape, inclusive, in both axes
ALPHA: Final = 180  # of 255

# First and last column of rows 10 to 21.
_ROWS: Final = MappingProxyType(
    {
        "square": ((10, 21),) * 12,
        "triangle": (
            *((16, 16), (15, 16), (15, 17), (14, 17), (14, 18), (13, 18)),
            *((13, 19), (12, 19), (12, 20), (11, 20), (11, 21), (10, 21)),
        ),
        "ellipse": (
            *((14, 17), (12, 19), (11, 20), (11, 20), (10, 21), (10, 21)),
            *((10, 21), (10, 21), (11, 20), (11, 20), (12, 19), (14, 17)),
        ),
    }
)
_CLASS, _COLOUR = FIRST_PURPOSE, FIRST_PURPOSE + 1


def shape_mask(name: str) -> Tensor:
    """Return the mask of the shape in its box, (32, 32) uint8 in the three mask levels."""
    mask_HW = torch.full((IMAGE_SIZE, IMAGE_SIZE), MASK_OUTSIDE, dtype=torch.uint8)
    mask_HW[FIRST : LAST + 1, FIRST : LAST + 1] = MASK_BOX
    for row, (first, last) in enumerate(_ROWS[name], start=FIRST):
        mask_HW[row, first : last + 1] = MASK_OBJECT
    return mask_HW


class Shapes(PictureOverlay):
    """An overlay of shapes in three equally likely classes, for 32x32 pictures.

    The colour is uniform over the RGB cube.
    """

    class_names = tuple(_ROWS)
    title = "shape"
    masks_KHW: Tensor

    def __init__(self) -> None:
        super().__init__()
        masks_KHW = torch.stack([shape_mask(name) for name in self.class_names])
        self.register_buffer("masks_KHW", masks_KHW, persistent=False)

    def draw(self, keys: DrawKeys) -> Layer:
        """Draw one shape for each key."""
        label_B = integers(keys, 1, len(self.class_names), purpose=_CLASS)[:, 0]
        colour_BC = integers(keys, 3, 256, purpose=_COLOUR).to(torch.uint8)
        mask_BHW = self.masks_KHW[label_B]
        alpha_BHW = (mask_BHW == MASK_OBJECT).to(torch.uint8) * ALPHA
        return Layer(label_B, colour_BC[:, :, None, None], alpha_BHW, mask_BHW)
