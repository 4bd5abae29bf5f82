"""Boolean features (Qiu et al. 2024, arXiv 2403.03375): two parities of bits, a core feature and an easier one.

In place of a picture there are channels of 0 or 255 over the whole of it: `size` bits of the core feature, then `size`
bits of the easier one. A feature is the parity of the first bits of its half, and their number is its degree: one bit
is the bit itself, two are their exclusive or. The other bits of a half say nothing. So complexity and correlation are
two dials.

In the paper a label tells what to learn. Here the two views of a sample do: with a draw for each view
(`data.overlay=online_per_view`), they have the same two features and no bit in common otherwise. A feature is learned
as the sum over its bits that no single bit shows.

The two features of a sample follow from a hash of the stored picture, of which nothing else is shown. The easier one
equals the core feature with the probability `correlation`, and is uniform otherwise. In the paper, lambda is the share
of samples in which they are equal, (1 + correlation) / 2.

Shapes: B batch, C channels, H height, W width, N bits of a half.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, integers, uniform
from data_pipeline.core.schema import Schema, Share
from data_pipeline.overlays import (
    FIRST_PURPOSE,
    NOTHING_GIVEN,
    Overlaid,
    PixelOverlay,
    Shape,
    keys_of_pictures,
    no_mask,
)
from data_pipeline.storage.manifest import LabelEntry

CORE: Final = "core"
_ON: Final = 255
_VALUES = ("0", "1")
_FEATURES, _DRAWN = FIRST_PURPOSE, FIRST_PURPOSE + 1

Degree = Annotated[int, Field(ge=1, le=32)]


class BooleanOptions(Schema):
    """The options of the overlay boolean.

    degree, easy_degree: the number of bits of which the core feature and the easier one are the parity.
    size: the number of bits of each half.
    correlation: the probability that the easier feature is the core feature.
    """

    degree: Degree = 2
    easy_degree: Degree = 1
    size: Degree = 8
    correlation: Share = 0.0

    @model_validator(mode="after")
    def _bits_suffice(self) -> Self:
        if max(self.degree, self.easy_degree) > self.size:
            raise ValueError(f"a half has size={self.size} bits; set a size of at least degree and easy_degree")
        return self


class Boolean(PixelOverlay):
    """An overlay that shows bits in place of a picture. The label `overlay` is the easier feature, `core` the other.

    Bits are drawn uniformly among those that have the features of the sample. Nothing is marked in the mask.
    """

    class_names = _VALUES
    title = "easier feature"
    more_labels: Mapping[str, LabelEntry] = {CORE: LabelEntry(title="core feature", classes=_VALUES)}
    options_schema: ClassVar[type[Schema]] = BooleanOptions

    def __init__(self, *, degree: int, easy_degree: int, size: int, correlation: float) -> None:
        super().__init__()
        self.degrees, self.size, self.correlation = (degree, easy_degree), size, correlation
        self.chosen = {"degree": degree, "easy_degree": easy_degree, "size": size, "correlation": correlation}

    def output_shape(self, stored_shape: Shape) -> Shape:
        return 2 * self.size, *stored_shape[1:]

    def forward(self, inputs: Tensor, keys: DrawKeys, labels: Mapping[str, Tensor] = NOTHING_GIVEN) -> Overlaid:
        """Return bits in place of pictures (B, C, H, W) uint8: (B, 2 N, H, W) uint8."""
        core_B, easy_B = self.features_of(inputs)
        bits_B2N = integers(keys, 2 * self.size, 2, purpose=_DRAWN).view(-1, 2, self.size)
        for half, (feature_B, degree) in enumerate(zip((core_B, easy_B), self.degrees, strict=True)):
            bits_B2N[:, half, 0] ^= bits_B2N[:, half, :degree].sum(1) % 2 ^ feature_B
        shown_BC11 = (bits_B2N.flatten(1) * _ON).to(torch.uint8)[:, :, None, None]
        pictures_BCHW = shown_BC11.expand(-1, -1, *inputs.shape[2:]).contiguous()
        return Overlaid(pictures_BCHW, easy_B, no_mask(inputs), {CORE: core_B})

    def features_of(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the core and the easier feature of each stored picture, (B,) int64 of 0 and 1 each."""
        draws_B3 = uniform(keys_of_pictures(inputs), 3, purpose=_FEATURES)
        core_B, other_B = (draws_B3[:, :2] < 0.5).long().unbind(1)
        return core_B, torch.where(draws_B3[:, 2] < self.correlation, core_B, other_B)
