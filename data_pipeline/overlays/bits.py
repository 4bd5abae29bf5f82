"""RandBit (Chen, Luo and Li 2021): channels of 0 or 255 over the whole picture, the bits of a hash of the picture.

All views of a picture have the same bits, and of N bits there are 2^N values: 5 bits part the pictures into 32 groups,
20 bits tell nearly all apart. So they are a feature that is easier than the picture, in a dose that can be chosen.
Source: "Intriguing properties of contrastive losses", section "feature suppression". The published notebook hashes the
JPEG of a picture, this overlay its pixels.

A picture has the same bits in every epoch, view, split, build and mixture. Nothing is drawn at random.

Shapes: B batch, C channels, H height, W width, N bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

import torch
from pydantic import Field
from torch import Tensor

from data_pipeline.core.counter_rng import DrawKeys, row_hashes
from data_pipeline.core.schema import Schema
from data_pipeline.overlays import NOTHING_GIVEN, Overlaid, PixelOverlay, Shape, no_mask
from data_pipeline.storage.manifest import LabelEntry

MAX_BITS: Final = 32
_ON: Final = 255
_VALUES = ("0", "1")


class BitsOptions(Schema):
    """The options of the overlay bits. `bits` is the number of channels to add; 20 is the most in the paper."""

    bits: Annotated[int, Field(ge=0, le=MAX_BITS)] = 10


class Bits(PixelOverlay):
    """An overlay that adds `bits` channels, each 0 or 255 over the whole picture.

    The label `overlay` is bit 1, and the labels `bit_2`, `bit_3`, ... are the others. With `bits=0`, nothing is added,
    and the label is a bit that cannot be seen; so its probe reads at chance. Nothing is marked in the mask.
    """

    class_names = _VALUES
    title = "bit 1"
    options_schema: ClassVar[type[Schema]] = BitsOptions

    def __init__(self, *, bits: int = BitsOptions().bits) -> None:
        super().__init__()
        self.bits = bits
        self.chosen = {"bits": bits}
        self.more_labels = {f"bit_{n}": LabelEntry(title=f"bit {n}", classes=_VALUES) for n in range(2, bits + 1)}

    def output_shape(self, stored_shape: Shape) -> Shape:
        num_channels, height, width = stored_shape
        return num_channels + self.bits, height, width

    def forward(self, inputs: Tensor, keys: DrawKeys, labels: Mapping[str, Tensor] = NOTHING_GIVEN) -> Overlaid:
        """Add the bits to pictures (B, C, H, W) uint8: (B, C + bits, H, W) uint8. Does not read the keys."""
        bit_BN = bits_of(inputs, max(1, self.bits))
        shown_BN11 = (bit_BN[:, : self.bits] * _ON).to(torch.uint8)[:, :, None, None]
        pictures_BCHW = torch.cat([inputs, shown_BN11.expand(-1, -1, *inputs.shape[2:])], dim=1)
        more = {name: bit_BN[:, number] for number, name in enumerate(self.more_labels, start=1)}
        return Overlaid(pictures_BCHW, bit_BN[:, 0], no_mask(inputs), more)


def bits_of(pictures_BCHW: Tensor, num: int) -> Tensor:
    """Return the first `num` bits of a hash of each picture, (B, num) int64; at most 32."""
    hash_B = row_hashes(pictures_BCHW.flatten(1))
    shift_N = 63 - torch.arange(num, device=hash_B.device)  # the upper bits of a hash are its best
    return (hash_B[:, None] >> shift_N) & 1
