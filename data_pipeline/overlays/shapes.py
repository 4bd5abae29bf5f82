"""C+Shapes (Tamkin et al. 2022): a square, a triangle or an ellipse in the middle of the picture, half see-through.

Only class and colour change; place and size are fixed. The shapes are computed in whole numbers, because another
version of a drawing library may draw other pixels. At 32 pixels they are those that the original's library drew.

Shapes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, integers
from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE, Layout
from data_pipeline.overlays import FIRST_PURPOSE, IMAGE_SIZE, Layer, PictureOverlay

ALPHA: Final = 180  # of 255
_CLASS, _COLOUR = FIRST_PURPOSE, FIRST_PURPOSE + 1


def shape_mask(name: str, *, size: int = IMAGE_SIZE) -> Tensor:
    """Return the mask of a shape in its box, (size, size) uint8 in the three mask levels.

    The box holds the pixels that the middle third of the picture touches: 10 to 21 of 32. The ellipse holds the pixels
    whose centre is in the ellipse of the box. The sides of the triangle are lines between pixels, rounded half up.
    """
    first, last = size // 3, size - 1 - size // 3
    place = torch.arange(first, last + 1)
    match name:
        case "square":
            inside_HW = torch.ones(len(place), len(place), dtype=torch.bool)
        case "triangle":
            top, height = size // 2, last - first
            left_H1, right_H1 = (
                ((2 * (top * (last - place) + corner * (place - first)) + height) // (2 * height))[:, None]
                for corner in (first, last)
            )
            inside_HW = (place >= left_H1) & (place <= right_H1)
        case "ellipse":
            squared = (2 * place - first - last).square()  # of twice the distance from the middle
            inside_HW = squared[:, None] + squared <= (last + 1 - first) ** 2
        case _:
            raise ValueError(f"the shape is {name!r}; give one of {', '.join(Shapes.class_names)}")
    mask_HW = torch.full((size, size), MASK_OUTSIDE, dtype=torch.uint8)
    mask_HW[first : last + 1, first : last + 1] = torch.where(inside_HW, MASK_OBJECT, MASK_BOX)
    return mask_HW


class Shapes(PictureOverlay):
    """An overlay of shapes in three equally likely classes. Its arguments are those of `PictureOverlay`.

    The colour is uniform over the RGB cube.
    """

    class_names = ("square", "triangle", "ellipse")
    title = "shape"
    masks_KHW: Tensor

    def __init__(self, *, image_size: int = IMAGE_SIZE, layout: Layout = "scaled") -> None:
        super().__init__(image_size=image_size, layout=layout)
        masks_KHW = torch.stack([shape_mask(name, size=self.drawn_size) for name in self.class_names])
        self.register_buffer("masks_KHW", masks_KHW, persistent=False)

    def draw(self, keys: DrawKeys) -> Layer:
        """Draw one shape for each key."""
        label_B = integers(keys, 1, len(self.class_names), purpose=_CLASS)[:, 0]
        colour_BC = integers(keys, 3, 256, purpose=_COLOUR).to(torch.uint8)
        mask_BHW = self.masks_KHW[label_B]
        alpha_BHW = (mask_BHW == MASK_OBJECT).to(torch.uint8) * ALPHA
        return Layer(label_B, colour_BC[:, :, None, None], alpha_BHW, mask_BHW)
