"""Overlays: a second, labelled object drawn on a picture, or a second, labelled sound behind the first.

An overlay takes a batch of clean pictures or waveforms, on any device, and the keys of all draws. It returns the batch
with an object in each input, the class of the object, and for pictures a mask of it. The draw of the class does not
depend on the input, so the two labels of a sample are independent, unless the overlay asks for the labels of the source
(`PictureOverlay.draw_given`). An overlay may give more labels than one (`Overlay.more_labels`).

Guarantees: the same input and keys give the same output, in a build, in a stream and from data in memory, on CPU and
GPU. The input is not changed.

An overlay of pictures is a `PixelOverlay`, which may change the shape of a picture: `output_shape` says to which. Most
are a `PictureOverlay`, which paints on square pictures of 32 pixels or more to a side. 32 is the published size, and
there every layout is the published drawing, to the bit; letters are in another font. A `Layout` says what happens on
larger pictures.

To add an overlay that paints, write a `PictureOverlay` with `class_names` and `draw`, and a line in `OVERLAYS` (or,
in another package, an entry point of the group `overlay.overlays`). A build opens an overlay by `open`, which gets the
pictures' shape and the options of the user (`OverlayInputs`).

Shapes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, Self, TypeVar

import torch
from torch import Tensor, nn

from data_pipeline.core.counter_rng import DrawKeys, row_hashes
from data_pipeline.core.errors import UserError
from data_pipeline.core.options import OVERLAY_OPTION, Options, OptionValue
from data_pipeline.core.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE, OVERLAY, Layout
from data_pipeline.core.schema import Schema
from data_pipeline.storage.manifest import LabelEntry

__all__ = [
    "FIRST_PURPOSE",
    "IMAGE_SIZE",
    "Layer",
    "Overlaid",
    "Overlay",
    "OverlayInputs",
    "PictureOverlay",
    "PixelOverlay",
]

IMAGE_SIZE: Final = 32  # width and height in pixels of the published pictures; on smaller ones, glyphs are illegible
FIRST_PURPOSE: Final = 100  # overlays number their draws from here (`purpose` in `data_pipeline.core.counter_rng`)
_VALUES_AT_ONCE: Final = 1 << 24  # of the pictures that are painted at once, in int32: 64 MiB for each intermediate


NOTHING_GIVEN: Final[Mapping[str, Any]] = MappingProxyType({})

Shape = tuple[int, int, int]  # channels, height and width of a picture
T = TypeVar("T", bound=Schema)


@dataclass(frozen=True)
class Overlaid:
    """The result of an overlay: the inputs with an object in each, the classes, and the masks (None for sounds).

    `inputs` are pictures (B, 3, H, W) uint8 or waveforms (B, T) float32; `label_B` is int64; `masks_BHW` is uint8 in
    the levels `MASK_OUTSIDE`, `MASK_BOX`, `MASK_OBJECT`. `more_labels` are the other labels of the overlay, by name.
    """

    inputs: Tensor
    label_B: Tensor
    masks_BHW: Tensor | None
    more_labels: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, Tensor]:
        """Return every label of the overlay by name, (B,) int64."""
        return {OVERLAY: self.label_B, **self.more_labels}


@dataclass(frozen=True)
class OverlayInputs:
    """The choices of a build from which an overlay of pictures is opened. Most overlays read only some of them.

    Attributes:
        name: the name of the overlay, for messages.
        shape: channels, height and width of a stored picture.
        split: "train" or "test".
        base: the pictures of the dataset, such as "cifar10", "folder" or "procedural"; "tars" for an index.
        root: the folder of the source's files; None if it has none.
        seed: the seed of the build.
        class_counts: for each label of the source by name, the number of records of each class. Empty for tars, whose
            labels are not read yet.
        options: by name, as the user gave them. `read` checks them.
    """

    name: str
    shape: Shape
    split: str
    base: str = "tars"
    root: Path | None = None
    seed: int = 0
    class_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    options: Options = field(default_factory=dict)

    def read(self, schema: type[T]) -> T:
        """Return the options of the user. Raises `UserError` if one is unknown or wrong."""
        return schema.parse(dict(self.options), where=f"{OVERLAY_OPTION} of the overlay {self.name}")

    @property
    def pictures(self) -> str:
        """Return what the pictures are called in a message."""
        return "these pictures" if self.root is None else f"the pictures in {self.root}"


class Overlay(nn.Module, ABC):
    """The base class of all overlays.

    The assets of an overlay, such as its pictures of digits, are persistent buffers. An online dataset stores them
    beside its shards, so that a draw does not depend on the software that reads it.
    """

    class_names: tuple[str, ...]  # in the order of the labels
    title: str = "object"  # what the label `overlay` is about, such as "digit"
    more_labels: Mapping[str, LabelEntry] = NOTHING_GIVEN  # the labels beside `overlay`, by name
    options_schema: ClassVar[type[Schema]] = Schema  # with a field for each option of the user

    def options(self) -> dict[str, str | int | float]:
        """Return the other arguments of the constructor: `type(overlay)(**buffers, **options)` is the same overlay."""
        return {}

    @abstractmethod
    def forward(self, inputs: Tensor, keys: DrawKeys, labels: Mapping[str, Tensor] = NOTHING_GIVEN) -> Overlaid:
        """Put one object into each input, drawn from `keys`, and from `labels` if the overlay asks for them.

        `labels` are those of the source by name, (B,) int64, on the device of the inputs.
        """


@dataclass(frozen=True)
class Layer:
    """One object for each picture of a batch: its class, its colour and its opacity. H and W are `drawn_size`.

    Attributes:
        label_B: (B,) int64, the class of each object.
        colour_BCHW: uint8, broadcastable to (B, 3, H, W): (B, 3, 1, 1) is one colour for each picture.
        alpha_BHW: (B, H, W) uint8, the opacity of the paint: 0 is the photo, 255 the colour alone.
        mask_BHW: (B, H, W) uint8 in the three mask levels.
        more_labels: (B,) int64 for each of the overlay's `more_labels`.
    """

    label_B: Tensor
    colour_BCHW: Tensor
    alpha_BHW: Tensor
    mask_BHW: Tensor
    more_labels: Mapping[str, Tensor] = field(default_factory=dict)


class PixelOverlay(Overlay):
    """The base class of overlays of pictures, which may change the number of channels or the size of a picture.

    Attributes:
        chosen: the options of the user with their values, for the manifest: how difficult a dataset is.
        made_from: what `open` read, such as " + mnist train digits (1f5a...)", for `HowMade.source`.
        layout: "scaled" or "tiled", see `PictureOverlay`.
    """

    chosen: Mapping[str, OptionValue] = NOTHING_GIVEN
    made_from: str = ""
    layout: Layout = "scaled"

    @classmethod
    def open(cls, given: OverlayInputs) -> Self:
        """Return `cls(**options)` for pictures of `given.shape`. An overlay with assets overrides this.

        Raises `UserError` if it cannot be drawn on them, if an option is wrong, or if its digits are missing.
        """
        overlay = cls(**given.read(cls.options_schema).model_dump())
        overlay.output_shape(given.shape)
        return overlay

    def options(self) -> dict[str, OptionValue]:
        return dict(self.chosen)

    def output_shape(self, stored_shape: Shape) -> Shape:
        """Return the shape of a picture with the overlay, for a stored picture of `stored_shape`.

        Raises `UserError` if the overlay is not for such pictures.
        """
        return stored_shape


class LayoutOptions(Schema):
    """The options of an overlay that paints: its `layout`, see `PictureOverlay`."""

    layout: Layout = "scaled"


class PictureOverlay(PixelOverlay):
    """An overlay that paints what a subclass returns from `draw`.

    Args:
        image_size: height and width of the pictures in pixels, at least 32.
        layout: "scaled" draws the published positions and sizes times image_size / 32. "tiled" draws them in their
            published size, and repeats the drawing every 32 pixels, from the top left corner to the edges of the
            picture, as DigitOnImageNet repeats a digit over a photo (Chen, Luo and Li 2021).

    Attributes:
        image_size: as given.
        layout: as given; "scaled" at 32 pixels, where both layouts are the same.
        drawn_size: height and width of what `draw` returns: `image_size`, or 32 if it is tiled.
    """

    options_schema: ClassVar[type[Schema]] = LayoutOptions

    def __init__(self, *, image_size: int = IMAGE_SIZE, layout: Layout = "scaled") -> None:
        super().__init__()
        self.image_size = image_size
        self.layout: Layout = "scaled" if image_size == IMAGE_SIZE else layout
        self.drawn_size = IMAGE_SIZE if layout == "tiled" else image_size

    @classmethod
    def open(cls, given: OverlayInputs) -> Self:
        """Return `cls(image_size=..., **options)` for square pictures of 32 pixels or more.

        An overlay with assets overrides this, and calls `square_size`.
        """
        return cls(image_size=square_size(given), **given.read(cls.options_schema).model_dump())

    def options(self) -> dict[str, OptionValue]:
        # Empty at the published size: so an overlay of 32 pixels has the bytes that it had before there were others.
        size = {} if self.image_size == IMAGE_SIZE else {"image_size": self.image_size, "layout": self.layout}
        return {**size, **self.chosen}

    def output_shape(self, stored_shape: Shape) -> Shape:
        if stored_shape[1:] != (self.image_size, self.image_size):
            raise UserError(
                f"the overlay draws on pictures of {self.image_size}x{self.image_size} pixels, but these have "
                f"{stored_shape[2]}x{stored_shape[1]}; build the dataset again"
            )
        return stored_shape

    @abstractmethod
    def draw(self, keys: DrawKeys) -> Layer:
        """Draw one object for each key, `drawn_size` high and wide; the draw does not depend on the pictures."""

    def draw_given(self, keys: DrawKeys, labels: Mapping[str, Tensor]) -> Layer:
        """Draw one object for each key, given the labels of the source by name, (B,) int64.

        Calls `draw`, so that labels are independent. An overlay whose class depends on a label overrides this.
        """
        return self.draw(keys)

    def draw_over(self, pictures_BCHW: Tensor, keys: DrawKeys, labels: Mapping[str, Tensor]) -> tuple[Tensor, Layer]:
        """Draw one object on each picture, (B, 3, H, W) uint8. Return the new pictures, and what was drawn.

        Calls `draw_given`, tiles it and calls `paint`. An overlay that covers a picture in another way, or whose places
        depend on the picture, overrides this. Its labels are still those of `draw_given`.
        """
        layer = self.draw_given(keys, labels)
        if self.drawn_size < self.image_size:
            layer = tile(layer, self.image_size)
        return paint(pictures_BCHW, layer), layer

    def forward(self, inputs: Tensor, keys: DrawKeys, labels: Mapping[str, Tensor] = NOTHING_GIVEN) -> Overlaid:
        """Paint over pictures (B, C, H, W) uint8; each value is rounded to the nearest integer.

        Raises `UserError` if H or W is not `image_size`.
        """
        num_channels, height, width = inputs.shape[1:]
        self.output_shape((num_channels, height, width))
        parts = []
        num_rows = max(1, _VALUES_AT_ONCE // (num_channels * height * width))
        for first in range(0, max(1, len(inputs)), num_rows):  # which bounds the memory
            rows = slice(first, first + num_rows)
            of_rows = {name: label_B[rows] for name, label_B in labels.items()}
            painted_BCHW, layer = self.draw_over(inputs[rows], keys.rows(rows), of_rows)
            parts.append((painted_BCHW, layer.label_B, layer.mask_BHW, layer.more_labels))
        painted, found, masks, more = zip(*parts, strict=True)
        more_labels = {name: torch.cat([part[name] for part in more]) for name in self.more_labels}
        return Overlaid(torch.cat(painted), torch.cat(found), torch.cat(masks), more_labels)


def square_size(given: OverlayInputs) -> int:
    """Return the height and width of pictures on which a `PictureOverlay` can paint.

    Raises `UserError` if they are not square pictures of 32 pixels or more to a side, or not in RGB.
    """
    num_channels, height, width = given.shape
    if num_channels != 3:
        raise UserError(
            f"the overlay {given.name} is drawn on RGB pictures, but {given.pictures} have {num_channels} "
            f"channel{'s' * (num_channels > 1)}; choose another overlay, or other pictures"
        )
    if height != width or height < IMAGE_SIZE:
        raise UserError(
            f"overlays are drawn on square pictures of {IMAGE_SIZE}x{IMAGE_SIZE} pixels or more, but {given.pictures} "
            f"have {width}x{height}; give image_size={max(IMAGE_SIZE, min(height, width))} (--size for an index)"
        )
    return height


def scaled(length: int, *, drawn_size: int) -> int:
    """Return a published length or position, in pixels, for a drawing of another size: times drawn_size / 32, rounded.

    Examples:
        >>> scaled(10, drawn_size=32), scaled(10, drawn_size=96), scaled(21, drawn_size=40)
        (10, 30, 26)
    """
    return (2 * length * drawn_size + IMAGE_SIZE) // (2 * IMAGE_SIZE)


def tile(layer: Layer, size: int) -> Layer:
    """Return a layer of (size, size) pixels that repeats `layer`, from the top left corner, cut at the other edges."""

    def repeated(x: Tensor) -> Tensor:
        place = torch.arange(size, device=x.device) % x.shape[-1]
        return x[..., place[:, None], place]

    one_colour = layer.colour_BCHW.shape[-1] == 1
    colour_BCHW = layer.colour_BCHW if one_colour else repeated(layer.colour_BCHW)
    return dataclasses.replace(
        layer, colour_BCHW=colour_BCHW, alpha_BHW=repeated(layer.alpha_BHW), mask_BHW=repeated(layer.mask_BHW)
    )


def paint(pictures_BCHW: Tensor, layer: Layer) -> Tensor:
    """Return (photo * (255 - alpha) + colour * alpha) / 255, rounded, for pictures (B, 3, H, W) uint8."""
    alpha_B1HW = layer.alpha_BHW[:, None].to(torch.int32)
    total = (pictures_BCHW * (255 - alpha_B1HW)).add_(layer.colour_BCHW * alpha_B1HW)
    return divide_by_255(total).to(torch.uint8)


def divide_by_255(total: Tensor) -> Tensor:
    """Return `total` / 255 rounded, exact for int32 from 0 to 255 * 255; integer division is slow on CPU."""
    total = total + 128
    return total.add_(total >> 8).bitwise_right_shift_(8)


def no_mask(pictures_BCHW: Tensor) -> Tensor:
    """Return the mask of pictures on which nothing is drawn, (B, H, W) uint8."""
    return torch.full_like(pictures_BCHW[:, 0], MASK_OUTSIDE)


def object_mask(inside_BHW: Tensor) -> Tensor:
    """Return masks (B, H, W) uint8 of objects, given where they are: the object, and the smallest box around it."""
    rows_BH, columns_BW = inside_BHW.any(dim=2), inside_BHW.any(dim=1)
    box_BHW = _between_ends(rows_BH)[:, :, None] & _between_ends(columns_BW)[:, None, :]
    mask_BHW = torch.full_like(inside_BHW, MASK_OUTSIDE, dtype=torch.uint8)
    return mask_BHW.masked_fill_(box_BHW, MASK_BOX).masked_fill_(inside_BHW, MASK_OBJECT)


def _between_ends(marked_BX: Tensor) -> Tensor:
    """Return which places are at, or between, the first and the last that are marked."""
    from_first_BX = marked_BX.cumsum(dim=1) > 0
    to_last_BX = marked_BX.flip(1).cumsum(dim=1).flip(1) > 0
    return from_first_BX & to_last_BX


_EVALUATION, _BAKED = 1_000, {"train": 1_001, "test": 1_002}  # numbers of views that training never uses


def keys_of_pictures(pictures_BCHW: Tensor) -> DrawKeys:
    """Return keys that depend on the bytes of each picture alone, so a draw is the same in every view and epoch."""
    return DrawKeys(seed=0, epoch=0, index_B=row_hashes(pictures_BCHW.flatten(1)), view=0)


def evaluation_keys(index_B: Tensor, *, draw: int) -> DrawKeys:
    """Return the keys of an online overlay for evaluation, the same in every run.

    Pass several values of `draw` to measure how much a result varies with the overlays of the test set.
    """
    return DrawKeys(seed=0, epoch=draw, index_B=index_B, view=_EVALUATION)


def baked_keys(index_B: Tensor, *, seed: int, split: str) -> DrawKeys:
    """Return the keys of an overlay that a build draws into the shards."""
    return DrawKeys(seed=seed, epoch=0, index_B=index_B, view=_BAKED[split])
