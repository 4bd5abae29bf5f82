"""Digits in two modalities (Bleeker et al. 2024, arXiv 2402.17510): a number that both streams of a sample show.

The paper pastes the handwritten digits of a number on a picture, and appends the number to its caption. So picture and
caption can be matched by the number alone. Here the second stream needs no text model: it is the grey picture without
digits, and a channel for each digit of the number, whose level is the digit.

With a draw for each view (`data.overlay=online_per_view`), the first view of a sample is the picture with the digits,
its channels dark, and the second view is the other stream. All else, such as a probe, sees the picture with digits.

The number of a sample, and its handwriting, follow from a hash of the picture. Each digit has a corner of its own;
C+Digits has four copies of one digit there.

Shapes: B batch, C channels, H height, W width, L digits of a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Self

import torch
from pydantic import Field
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, integers
from data_pipeline.core.options import OptionValue
from data_pipeline.core.sample import MASK_OUTSIDE
from data_pipeline.core.schema import Schema
from data_pipeline.overlays import IMAGE_SIZE, Layer, Shape, keys_of_pictures, paint, scaled
from data_pipeline.overlays.digits import CORNERS, DIGIT_PURPOSE, DIGIT_SIZE, DigitOptions, DigitOverlay, resized
from data_pipeline.sources.digits import DigitSource
from data_pipeline.storage.manifest import LabelEntry

SECOND_VIEW: Final = 1  # the number of the view that shows the second stream
_LEVEL: Final = 28  # of digit 1 in a channel; digit 9 has 252


class SharedNumberOptions(DigitOptions):
    """The options of the overlay shared_number. `length` is the number of digits: there are 10^length numbers."""

    length: Annotated[int, Field(ge=1, le=len(CORNERS))] = 4


class SharedNumber(DigitOverlay):
    """An overlay of a number in two streams, with `length` channels behind those of the picture.

    The label `overlay` is the first digit, and `digit_2`, `digit_3`, ... are the others.
    """

    title = "first digit"
    options_schema: ClassVar[type[Schema]] = SharedNumberOptions

    def __init__(self, digits_NHW: Tensor, label_N: Tensor, *, length: int, image_size: int = IMAGE_SIZE) -> None:
        super().__init__(digits_NHW, label_N, image_size=image_size)
        self.length = length
        self.chosen = {"length": length}
        names = [f"digit_{n}" for n in range(2, length + 1)]
        self.more_labels = {name: LabelEntry(title=name.replace("_", " "), classes=self.class_names) for name in names}

    @classmethod
    def of(cls, source: DigitSource, *, length: int, image_size: int = IMAGE_SIZE) -> Self:
        """Return the overlay of all digits of `source`."""
        size = scaled(DIGIT_SIZE, drawn_size=image_size)
        return cls(*resized(source, size), length=length, image_size=image_size)

    def options(self) -> dict[str, OptionValue]:
        return {"length": self.length, "image_size": self.image_size}

    def output_shape(self, stored_shape: Shape) -> Shape:
        num_channels, height, width = super().output_shape(stored_shape)
        return num_channels + self.length, height, width

    def draw(self, keys: DrawKeys) -> Layer:
        """Draw the digits of one number for each key."""
        number_BL = integers(keys, self.length, self.label_N.numel(), purpose=DIGIT_PURPOSE)
        others = zip(self.more_labels, self.label_N[number_BL[:, 1:]].unbind(1), strict=True)
        return dataclasses.replace(self.in_corners(number_BL), more_labels=dict(others))

    def draw_over(self, pictures_BCHW: Tensor, keys: DrawKeys, labels: Mapping[str, Tensor]) -> tuple[Tensor, Layer]:
        """Return the stream of a view: the picture with digits, or the grey picture with the channels of the number."""
        layer = self.draw(keys_of_pictures(pictures_BCHW))
        level_BL = torch.stack([layer.label_B, *layer.more_labels.values()], dim=1).to(torch.uint8) * _LEVEL
        channels_BLHW = level_BL[:, :, None, None].expand(-1, -1, *pictures_BCHW.shape[2:])
        if keys.view != SECOND_VIEW:
            return torch.cat([paint(pictures_BCHW, layer), torch.zeros_like(channels_BLHW)], dim=1), layer
        grey_B1HW = (pictures_BCHW.sum(1, keepdim=True, dtype=torch.int32) // pictures_BCHW.shape[1]).to(torch.uint8)
        layer = dataclasses.replace(layer, mask_BHW=torch.full_like(layer.mask_BHW, MASK_OUTSIDE))
        return torch.cat([grey_B1HW.expand_as(pictures_BCHW), channels_BLHW], dim=1), layer
