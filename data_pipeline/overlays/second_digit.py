"""MultiDigits (Chen, Luo and Li 2021): a second handwritten digit, at a random place of a picture that has a first one.

The first digit always has the same size, and the second is 20 to 80 pixels wide. The larger the second digit, the
harder it is for contrastive learning to keep the first. `data_pipeline.sources.placed_digits` draws the first.

A pixel is the brighter one of the picture and the digit. The second digit does not hide the first where it need not:
it takes, of eight drawn places, the first that covers none of the first digit's ink, or else the one that covers least.

The authors' code (google-research/simclr, colabs/intriguing_properties) has no MultiDigits. Their page says only that
there are two digits, one of varying size. The sizes here are those of a re-implementation,
mona251/Intriguing-Properties-of-Contrastive-Losses: a canvas of 112 pixels, a digit of 20, and one of 20 to 80 in steps
of 10. It cuts off the margins of a digit, draws both places uniformly, and adds the digits up to white. So its digits
cover each other more often than here.

Shapes: B batch, N digits to choose from, K places to choose from, H height, W width, S height and width of a digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Self

import torch
from pydantic import Field
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, integers
from data_pipeline.core.options import OptionValue
from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE
from data_pipeline.core.schema import Schema
from data_pipeline.overlays import Layer
from data_pipeline.overlays.digits import DIGIT_PURPOSE, DigitOptions, DigitOverlay, resized
from data_pipeline.sources.digits import SMALLEST_SIZE, DigitSource, check_fits

NUM_TRIES: Final = 8
_ROW, _COLUMN = DIGIT_PURPOSE + 1, DIGIT_PURPOSE + 2


class SecondDigitOptions(DigitOptions):
    """The options of the overlay second_digit.

    size: the width of a digit in pixels; published are 20 to 80 of 112, and the default is 40 of 112 in proportion.
    """

    size: int | None = Field(None, ge=SMALLEST_SIZE)


class SecondDigit(DigitOverlay):
    """An overlay of one digit at a random place, in ten classes.

    Digits are drawn uniformly, with replacement, so the classes have the frequencies of `label_N`. The class does not
    depend on the picture; the place does, as the module's docstring says.

    Args:
        digits_NHW: (N, S, S) uint8, white on black; S is 8 to `image_size`, and N is at least 1.
        label_N: (N,) int64, 0 to 9.
        image_size: height and width of the pictures in pixels, at least 32.

    Raises:
        UserError: S is out of range.
    """

    title = "second digit"
    options_schema: ClassVar[type[Schema]] = SecondDigitOptions

    def __init__(self, digits_NHW: Tensor, label_N: Tensor, *, image_size: int) -> None:
        super().__init__(digits_NHW, label_N, image_size=image_size)
        self.size = digits_NHW.shape[-1]
        check_fits(self.size, image_size=image_size)
        self.chosen = {"size": self.size}

    @classmethod
    def of(cls, source: DigitSource, *, size: int | None = None, image_size: int) -> Self:
        """Return the overlay of all digits of `source`, `size` pixels wide; None stands for 40 of 112 in proportion."""
        size = size or max(SMALLEST_SIZE, image_size * 40 // 112)
        return cls(*resized(source, size), image_size=image_size)

    def options(self) -> dict[str, OptionValue]:
        return {"image_size": self.image_size}  # the digits say their size

    def draw(self, keys: DrawKeys) -> Layer:
        """Draw one digit for each key, at the first of its drawn places."""
        row_BK, column_BK = self._places(keys)
        return self._placed(keys, row_BK[:, 0], column_BK[:, 0])

    def draw_over(self, pictures_BCHW: Tensor, keys: DrawKeys, labels: Mapping[str, Tensor]) -> tuple[Tensor, Layer]:
        """Draw one digit on each picture, where it covers least of what is not black."""
        row_BK, column_BK = self._places(keys)
        windows = (pictures_BCHW.amax(1) > 0).unfold(1, self.size, 1).unfold(2, self.size, 1)
        sample_B = torch.arange(len(row_BK), device=row_BK.device)
        inked_BKSS = windows[sample_B[:, None], row_BK, column_BK]
        digit_BSS = self.digits_NHW[self.draw_numbers(keys)] > 0
        num_covered_BK = (inked_BKSS & digit_BSS[:, None]).flatten(2).count_nonzero(2)
        # No two costs are equal, so all devices choose the same.
        cost_BK = num_covered_BK * NUM_TRIES + torch.arange(NUM_TRIES, device=row_BK.device)
        best_B1 = cost_BK.argmin(1, keepdim=True)
        layer = self._placed(keys, row_BK.gather(1, best_B1)[:, 0], column_BK.gather(1, best_B1)[:, 0])
        return pictures_BCHW.maximum(layer.colour_BCHW), layer

    def _places(self, keys: DrawKeys) -> tuple[Tensor, Tensor]:
        """Return the rows and columns of the top left pixels of the drawn places, (B, 8) int64 each."""
        num_places = self.image_size - self.size + 1
        row_BK, column_BK = (integers(keys, NUM_TRIES, num_places, purpose=purpose) for purpose in (_ROW, _COLUMN))
        return row_BK, column_BK

    def _placed(self, keys: DrawKeys, row_B: Tensor, column_B: Tensor) -> Layer:
        """Return each digit with its top left pixel at (row, column)."""
        number_B = self.draw_numbers(keys)
        digit_BSS = self.digits_NHW[number_B]
        grey_BHW = digit_BSS.new_zeros(len(number_B), self.image_size, self.image_size)
        mask_BHW = torch.full_like(grey_BHW, MASK_OUTSIDE)
        place_S = torch.arange(self.size, device=row_B.device)
        sample_B = torch.arange(len(row_B), device=row_B.device)
        squares = (
            sample_B[:, None, None],
            (row_B[:, None] + place_S)[:, :, None],
            (column_B[:, None] + place_S)[:, None, :],
        )
        grey_BHW[squares] = digit_BSS
        mask_BHW[squares] = torch.where(digit_BSS > 0, MASK_OBJECT, MASK_BOX).to(torch.uint8)
        alpha_BHW = (grey_BHW > 0).to(torch.uint8) * 255
        return Layer(self.label_N[number_B], grey_BHW[:, None], alpha_BHW, mask_BHW)
