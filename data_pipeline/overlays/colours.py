"""Coloured digits: a grey picture painted in one of ten colours, which may follow the class of the picture.

Grey level g becomes g / 255 of the colour, so black stays black. An RGB picture loses its own colours first. The usual
form is MNIST with a colour for each digit in training, and any colour in the test, in the manner of Nam et al. 2020,
"Learning from failure". Their code (alinlab/LfF, colored_mnist_protocol.py and make_dataset.py) differs in four ways:

- It has ten other colours, and shifts them for each picture: it adds normal noise to each channel, with a deviation of
  0.05 to 0.005 of white. Here each colour is constant.
- Its share of training pictures with the colour of their digit is 0.95, 0.98, 0.99 or 0.995. Here that share is
  c + (1 - c) / 10 at correlation c, because the other pictures take any of the ten colours; c = 0.9444 gives 0.95.
- It has that share exactly, in each class. Here the colour of each picture is drawn.
- It rounds the painted values down.

Shapes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Self

import torch
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import Schema, Share
from data_pipeline.overlays import (
    FIRST_PURPOSE,
    NOTHING_GIVEN,
    Overlaid,
    OverlayInputs,
    PixelOverlay,
    Shape,
    divide_by_255,
    object_mask,
)
from data_pipeline.overlays.correlation import check_base_label, correlated_classes

COLOURS: Final[Mapping[str, tuple[int, int, int]]] = {
    "red": (230, 25, 25),
    "green": (30, 180, 40),
    "blue": (40, 80, 255),
    "yellow": (255, 225, 25),
    "magenta": (240, 50, 230),
    "cyan": (70, 240, 240),
    "orange": (255, 140, 0),
    "purple": (145, 30, 180),
    "brown": (150, 90, 20),
    "grey": (190, 190, 190),
}
_RED, _GREEN, _BLUE = 299, 587, 114  # thousandths: ITU-R BT.601, as in Pillow's conversion to grey


class ColoursOptions(Schema):
    """The options of the overlay colours. `correlation`: the probability that the colour follows the base label."""

    correlation: Share = 0.0


class Colours(PixelOverlay):
    """An overlay that paints pictures of one or three channels in ten colours: the result has three.

    The label `overlay` is the colour. The mask marks every pixel that is not black, and the smallest box around them.
    """

    class_names = tuple(COLOURS)
    title = "colour"
    options_schema: ClassVar[type[Schema]] = ColoursOptions
    colours_KC: Tensor

    def __init__(self, *, correlation: float = 0.0) -> None:
        super().__init__()
        self.correlation = correlation
        self.chosen = {"correlation": correlation}
        self.register_buffer("colours_KC", torch.tensor(list(COLOURS.values()), dtype=torch.uint8), persistent=False)

    @classmethod
    def open(cls, given: OverlayInputs) -> Self:
        check_base_label(given, given.read(ColoursOptions).correlation)
        return super().open(given)

    def output_shape(self, stored_shape: Shape) -> Shape:
        num_channels, height, width = stored_shape
        if num_channels not in (1, 3):
            raise UserError(f"the overlay colours paints pictures of 1 or 3 channels, but these have {num_channels}")
        return 3, height, width

    def forward(self, inputs: Tensor, keys: DrawKeys, labels: Mapping[str, Tensor] = NOTHING_GIVEN) -> Overlaid:
        """Paint pictures (B, 1, H, W) or (B, 3, H, W) uint8: (B, 3, H, W) uint8, each value rounded."""
        label_B = correlated_classes(
            keys, labels, len(self.class_names), correlation=self.correlation, purpose=FIRST_PURPOSE
        )
        grey_B1HW = grey(inputs).to(torch.int32)
        painted_BCHW = divide_by_255(grey_B1HW * self.colours_KC[label_B][:, :, None, None])
        return Overlaid(painted_BCHW.to(torch.uint8), label_B, object_mask(grey_B1HW[:, 0] > 0))


def grey(pictures_BCHW: Tensor) -> Tensor:
    """Return the brightness of pictures of one or three channels, (B, 1, H, W) uint8, rounded down."""
    if pictures_BCHW.shape[1] == 1:
        return pictures_BCHW
    red_B1HW, green_B1HW, blue_B1HW = pictures_BCHW.to(torch.int32).chunk(3, dim=1)
    total_B1HW = red_B1HW * _RED + green_B1HW * _GREEN + blue_B1HW * _BLUE
    return torch.div(total_B1HW, 1_000, rounding_mode="floor").to(torch.uint8)
