"""C+Letters (Tamkin et al. 2022): one capital letter in one colour, drawn in each of the four corners.

The place of each copy in its corner is drawn. The font is Liberation Sans, which is free and has the widths of Arial,
the original's font. At size 12 its capitals are 9 pixels high and begin 2 pixels below the drawing point. In the right
column a W can lose its last pixel at the picture's edge, as in the original. In the lower row a Q can lose up to 2
pixels, one more than in the original: its tail reaches 2 pixels below the baseline, and Arial's reaches 1.

On larger pictures the letters are rendered anew from the font, in proportion. The font rounds its metrics, so in some
sizes other letters of the lower row can lose one row of pixels too.

Shapes: B batch, K classes, P places, H height, W width, G height and width of a glyph.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, integers
from data_pipeline.core.sample import MASK_OUTSIDE, Layout
from data_pipeline.overlays import FIRST_PURPOSE, IMAGE_SIZE, Layer, PictureOverlay, divide_by_255, object_mask, scaled

FONT_PATH: Final = Path(__file__).parent / "assets" / "LiberationSans-Regular.ttf"
FONT_SIZE: Final = 12  # in a picture of 32 pixels, like the ranges
NEAR, FAR = (0, 6), (16, 21)  # inclusive ranges of a drawing point's coordinate
_CLASS, _COLOUR, _NEAR, _FAR = range(FIRST_PURPOSE, FIRST_PURPOSE + 4)


def render_glyphs(drawn_size: int = IMAGE_SIZE) -> Tensor:
    """Return the letters A to Z for a drawing of this size, (26, G, G) uint8; 255 is a pixel all covered.

    The drawing point is at (0, 0). G is twice the size of the font, which holds any letter: 24 for 32 pixels.
    """
    size = 2 * scaled(FONT_SIZE, drawn_size=drawn_size)
    # Without the basic layout the result would depend on whether libraqm is installed.
    font = ImageFont.truetype(FONT_PATH, size // 2, layout_engine=ImageFont.Layout.BASIC)
    glyphs = []
    for letter in string.ascii_uppercase:
        picture = Image.new("L", (size, size))
        ImageDraw.Draw(picture).text((0, 0), letter, fill=255, font=font, anchor="la")
        glyphs.append(np.array(picture))
    return torch.from_numpy(np.stack(glyphs))


class Letters(PictureOverlay):
    """An overlay of letters in 26 equally likely classes.

    The colour is opaque, and uniform over the RGB cube.

    Args:
        glyphs_KHW: (26, G, G) uint8; None stands for the result of `render_glyphs`. An online dataset stores them,
            because another version of Pillow may draw other pixels.
        image_size, layout: see `PictureOverlay`.
    """

    class_names = tuple(string.ascii_uppercase)
    title = "letter"
    glyphs_KHW: Tensor
    masks_KHW: Tensor

    def __init__(
        self, glyphs_KHW: Tensor | None = None, *, image_size: int = IMAGE_SIZE, layout: Layout = "scaled"
    ) -> None:
        super().__init__(image_size=image_size, layout=layout)
        glyphs_KHW = render_glyphs(self.drawn_size) if glyphs_KHW is None else glyphs_KHW
        self.register_buffer("glyphs_KHW", glyphs_KHW)
        self.register_buffer("masks_KHW", object_mask(glyphs_KHW > 0), persistent=False)

    def draw(self, keys: DrawKeys) -> Layer:
        """Draw one letter for each key."""
        label_B = integers(keys, 1, len(self.class_names), purpose=_CLASS)[:, 0]
        colour_BC = integers(keys, 3, 256, purpose=_COLOUR).to(torch.uint8)
        x_BP, y_BP = drawing_points(keys, drawn_size=self.drawn_size)
        shape = (len(label_B), self.drawn_size, self.drawn_size)
        through_BHW = torch.full(shape, 255, dtype=torch.int32, device=label_B.device)
        mask_BHW = torch.full(shape, MASK_OUTSIDE, dtype=torch.uint8, device=label_B.device)
        for x_B, y_B in zip(x_BP.T, y_BP.T, strict=True):  # copies may overlap
            transparency_BHW = 255 - self._placed(self.glyphs_KHW, label_B, x_B, y_B).to(torch.int32)
            through_BHW = divide_by_255(through_BHW * transparency_BHW)
            mask_BHW = mask_BHW.maximum(self._placed(self.masks_KHW, label_B, x_B, y_B))
        return Layer(label_B, colour_BC[:, :, None, None], (255 - through_BHW).to(torch.uint8), mask_BHW)

    def _placed(self, glyphs_KHW: Tensor, label_B: Tensor, x_B: Tensor, y_B: Tensor) -> Tensor:
        """Return each sample's glyph at its position, cut at the edge of the drawing: (B, H, W)."""
        # A drawing with the glyph at (x, y) is a window of one canvas that holds the glyph at (last, last).
        last = scaled(FAR[1], drawn_size=self.drawn_size)
        after = self.drawn_size - glyphs_KHW.shape[-1]
        canvas_KHW = F.pad(glyphs_KHW, (last, after, last, after))
        windows = canvas_KHW.unfold(1, self.drawn_size, 1).unfold(2, self.drawn_size, 1)
        return windows[label_B, last - y_B, last - x_B]


def drawing_points(keys: DrawKeys, *, drawn_size: int = IMAGE_SIZE) -> tuple[Tensor, Tensor]:
    """Draw x and y of the four copies, (B, 4) int64 each: top left, top right, bottom left, bottom right."""
    (near, near_last), (far, far_last) = (
        (scaled(first, drawn_size=drawn_size), scaled(last, drawn_size=drawn_size)) for first, last in (NEAR, FAR)
    )
    near_BN = near + integers(keys, 4, near_last - near + 1, purpose=_NEAR)
    far_BN = far + integers(keys, 4, far_last - far + 1, purpose=_FAR)
    x_BP = torch.stack([near_BN[:, 0], far_BN[:, 0], near_BN[:, 1], far_BN[:, 1]], dim=1)
    y_BP = torch.stack([near_BN[:, 2], near_BN[:, 3], far_BN[:, 2], far_BN[:, 3]], dim=1)
    return x_BP, y_BP
