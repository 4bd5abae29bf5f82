"""C+Letters (Tamkin et al. 2022): one capital letter in one colour, drawn in each of the four corners.

The place of each copy in its corner is drawn. The font is Liberation Sans, which is free and has the widths of Arial,
the original's font. At size 12 its capitals are 9 pixels high and begin 2 pixels below the drawing point. In the right
column a W can lose its last pixel at the picture's edge, as in the original. In the lower row a Q can lose up to 2
pixels, one more than in the original: its tail reaches 2 pixels below the baseline, and Arial's reaches 1.

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
from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE
from data_pipeline.overlays import FIRST_PURPOSE, IMAGE_SIZE, Layer, PictureOverlay, divide_by_255

FONT_PATH: Final = Path(__file__).parent / "assets" / "LiberationSans-Regular.ttf"
FONT_SIZE: Final = 12
GLYPH_SIZE: Final = 2 * FONT_SIZE
NEAR, FAR = (0, 6), (16, 21)  # inclusive ranges of a drawing point's coordinate
_CLASS, _COLOUR, _NEAR, _FAR = range(FIRST_PURPOSE, FIRST_PURPOSE + 4)


def render_glyphs() -> Tensor:
    """Return the letters A to Z with the drawing point at (0, 0), (26, 24, 24) uint8; 255 is a pixel all covered."""
    # Without the basic layout the result would depend on whether libraqm is installed.
    font = ImageFont.truetype(FONT_PATH, FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)
    glyphs = []
    for letter in string.ascii_uppercase:
        picture = Image.new("L", (GLYPH_SIZE, GLYPH_SIZE))
        ImageDraw.Draw(picture).text((0, 0), letter, fill=255, font=font, anchor="la")
        glyphs.append(np.array(picture))
    return torch.from_numpy(np.stack(glyphs))


def glyph_mask(glyph_GG: Tensor) -> Tensor:
    """Return the mask of one glyph, (G, G) uint8 in the three mask levels: its ink, and the smallest box around it."""
    ink = glyph_GG > 0
    rows, columns = ink.any(dim=1).nonzero(), ink.any(dim=0).nonzero()
    mask = torch.full_like(glyph_GG, MASK_OUTSIDE)
    mask[int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1] = MASK_BOX
    mask[ink] = MASK_OBJECT
    return mask


class Letters(PictureOverlay):
    """An overlay of letters in 26 equally likely classes, for 32x32 pictures.

    The colour is opaque, and uniform over the RGB cube.

    Args:
        glyphs_KHW: (26, 24, 24) uint8; None stands for the result of `render_glyphs`. An online dataset stores them,
            because another version of Pillow may draw other pixels.

    Raises:
        ValueError: `glyphs_KHW` is of another shape or dtype, or a glyph has no ink.
    """

    class_names = tuple(string.ascii_uppercase)
    title = "letter"
    glyphs_KHW: Tensor
    masks_KHW: Tensor

    def __init__(self, glyphs_KHW: Tensor | None = None) -> None:
        super().__init__()
        glyphs_KHW = render_glyphs() if glyphs_KHW is None else glyphs_KHW
        if glyphs_KHW.shape != (26, GLYPH_SIZE, GLYPH_SIZE) or glyphs_KHW.dtype != torch.uint8:
            raise ValueError(
                f"glyphs_KHW is {tuple(glyphs_KHW.shape)} {glyphs_KHW.dtype}; give (26, {GLYPH_SIZE}, {GLYPH_SIZE}) "
                "uint8"
            )
        if not glyphs_KHW.flatten(1).any(dim=1).all():
            raise ValueError("glyphs_KHW has a glyph without ink; give coverage from 0 to 255")
        self.register_buffer("glyphs_KHW", glyphs_KHW)
        self.register_buffer("masks_KHW", torch.stack([glyph_mask(glyph) for glyph in glyphs_KHW]), persistent=False)

    def draw(self, keys: DrawKeys) -> Layer:
        """Draw one letter for each key."""
        label_B = integers(keys, 1, len(self.class_names), purpose=_CLASS)[:, 0]
        colour_BC = integers(keys, 3, 256, purpose=_COLOUR).to(torch.uint8)
        x_BP, y_BP = drawing_points(keys)
        transparency_BPHW = 255 - _placed(self.glyphs_KHW, label_B, x_BP, y_BP).to(torch.int32)
        through_BHW = transparency_BPHW[:, 0]
        for place in range(1, transparency_BPHW.shape[1]):  # copies may overlap
            through_BHW = divide_by_255(through_BHW * transparency_BPHW[:, place])
        mask_BHW = _placed(self.masks_KHW, label_B, x_BP, y_BP).amax(dim=1)
        return Layer(label_B, colour_BC[:, :, None, None], (255 - through_BHW).to(torch.uint8), mask_BHW)


def drawing_points(keys: DrawKeys) -> tuple[Tensor, Tensor]:
    """Draw x and y of the four copies, (B, 4) int64 each: top left, top right, bottom left, bottom right."""
    near_BN = NEAR[0] + integers(keys, 4, NEAR[1] - NEAR[0] + 1, purpose=_NEAR)
    far_BN = FAR[0] + integers(keys, 4, FAR[1] - FAR[0] + 1, purpose=_FAR)
    x_BP = torch.stack([near_BN[:, 0], far_BN[:, 0], near_BN[:, 1], far_BN[:, 1]], dim=1)
    y_BP = torch.stack([near_BN[:, 2], near_BN[:, 3], far_BN[:, 2], far_BN[:, 3]], dim=1)
    return x_BP, y_BP


def _placed(glyphs_KHW: Tensor, label_B: Tensor, x_BP: Tensor, y_BP: Tensor) -> Tensor:
    """Return each sample's glyph at each of its positions, cut at the edge of the picture: (B, P, 32, 32)."""
    # A picture with the glyph at (x, y) is a window of one canvas that holds the glyph at (last, last).
    last = FAR[1]
    after = IMAGE_SIZE - GLYPH_SIZE
    canvas_KHW = F.pad(glyphs_KHW, (last, after, last, after))
    windows = canvas_KHW.unfold(1, IMAGE_SIZE, 1).unfold(2, IMAGE_SIZE, 1)
    return windows[label_B[:, None], last - y_BP, last - x_BP]
