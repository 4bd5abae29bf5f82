"""Draw the first samples of a dataset as a grid, as training reads them, with their labels below.

A small picture is enlarged, a large one is made smaller, and the object on it is outlined by its mask. Channels that an
overlay adds to a picture are tiles below it, eight in a row, dark for 0 and bright for 255. A sound is drawn
as the log-mel spectrogram that the encoder gets: time to the right, frequency upwards, the quietest cell dark and the
loudest bright. An online overlay has the first draw of an evaluation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final, TypeVar

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from data_pipeline.audio.log_mel import log_mel, mel_config, power_mel
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import MASK_OUTSIDE, NO_LABEL, Batch
from data_pipeline.loading.whole import read_all
from data_pipeline.overlays.letters import FONT_PATH
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore

NUM_COLUMNS: Final = 10  # of pictures up to 128 pixels; there are fewer of larger ones
_CELL = 128  # pixels of the longer side of an enlarged picture, at most
_MAX_CELL = 256  # pixels of the longer side of any picture, at most
_MAX_GRID = 1_400  # pixels
_MARGIN, _LINE, _FONT_SIZE = 8, 15, 13
_TILES, _BETWEEN = 8, 128  # tiles in a row, and the grey level around them
_PAPER, _INK, _OUTLINE = (255, 255, 255), (40, 40, 40), (255, 0, 200)

Point = TypeVar("Point", np.uint8, np.bool_)
Caption = tuple[str, tuple[int, int, int]]  # a line of text and its colour


def draw_grid(location: str, *, num_samples: int) -> Image.Image:
    """Draw the first `num_samples` samples, up to ten in a row. Samples of all classes come first in a build."""
    store = SampleStore(location)
    manifest = store.manifest
    batch = next(read_all(store, batch_size=min(num_samples, manifest.num_samples)))
    pictures = pictures_of(batch, manifest)
    masks = [None] * len(batch) if batch.masks_BHW is None else list(_as_high(batch.masks_BHW.numpy(), pictures))
    captions = captions_of(batch, manifest)
    cells = [draw_cell(*content) for content in zip(pictures, masks, captions, strict=True)]
    width, height = cells[0].size
    num_columns = min(NUM_COLUMNS, len(cells), max(1, (_MAX_GRID - _MARGIN) // width))
    num_rows = -(-len(cells) // num_columns)
    grid = Image.new("RGB", (num_columns * width + _MARGIN, num_rows * height + _MARGIN), _PAPER)
    for number, cell in enumerate(cells):
        row, column = divmod(number, num_columns)
        grid.paste(cell, (_MARGIN + column * width, _MARGIN + row * height))
    return grid


def pictures_of(batch: Batch, manifest: Manifest) -> NDArray[np.uint8]:
    """Return the pictures of a batch in colour, or its sounds as spectrograms; (B, H, W, 3).

    Pictures with channels beyond those of the stored pictures are higher, by the tiles of these channels.
    """
    if manifest.sample_rate is None:
        inputs_BHWC: NDArray[np.uint8] = batch.inputs_a.permute(0, 2, 3, 1).contiguous().numpy()
        num_channels = inputs_BHWC.shape[3]
        num_shown = 3 if num_channels == 3 else min(manifest.input_shape[0], num_channels)
        pictures_BHWC = np.repeat(inputs_BHWC[..., :1], 3, axis=3) if num_shown == 1 else inputs_BHWC[..., :3]
        return add_tiles(pictures_BHWC, inputs_BHWC[..., num_shown:])
    config = mel_config(manifest.sample_rate)
    return colour_spectrograms(log_mel(power_mel(batch.inputs_a, config), config))


def add_tiles(pictures_BHWC: NDArray[np.uint8], channels_BHWE: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return pictures with their E further channels below them, as small grey tiles in rows of eight."""
    _, height, width, num_extra = channels_BHWE.shape
    if not num_extra:
        return pictures_BHWC
    side = max(1, width // _TILES)
    place = np.arange(side) * width // side  # the pixels that a tile shows
    tiles_BhwE = channels_BHWE[:, place * height // width][:, :, place]
    rows = []
    for first in range(0, num_extra, _TILES):
        row_BhWC = np.full((len(pictures_BHWC), side, width, 3), _BETWEEN, dtype=np.uint8)
        for number in range(first, min(first + _TILES, num_extra)):
            left = (number - first) * side
            row_BhWC[:, :, left : left + side] = tiles_BhwE[..., number, None][:, :, : width - left]
        gap_B1WC = np.full((len(pictures_BHWC), 1, width, 3), _BETWEEN, dtype=np.uint8)
        rows += [gap_B1WC, row_BhWC]
    return np.concatenate([pictures_BHWC, *rows], axis=1)


def _as_high(masks_BHW: NDArray[np.uint8], pictures_BHWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return masks as high as the pictures, with nothing drawn on the tiles below."""
    missing = pictures_BHWC.shape[1] - masks_BHW.shape[1]
    return np.pad(masks_BHW, ((0, 0), (0, missing), (0, 0)), constant_values=MASK_OUTSIDE)


def colour_spectrograms(log_mel_BMT: Tensor) -> NDArray[np.uint8]:
    """Colour spectrograms (B, M bands, T frames) as pictures (B, M, T, 3).

    Low bands are at the bottom. The loudest cell of each spectrogram is brightest, and the quietest is dark.
    """
    values_BMT = log_mel_BMT.flip(1)
    lowest_B11 = values_BMT.amin(dim=(1, 2), keepdim=True)
    range_B11 = values_BMT.amax(dim=(1, 2), keepdim=True) - lowest_B11
    share_BMT = (values_BMT - lowest_B11) / range_B11.clamp(min=1e-6)
    colours: NDArray[np.uint8] = matplotlib.colormaps["magma"](share_BMT.double().numpy(), bytes=True)
    return np.ascontiguousarray(colours[..., :3])


def captions_of(batch: Batch, manifest: Manifest) -> list[list[Caption]]:
    """Return the class names of every sample, one line for each label of the dataset, in the order of the manifest.

    Those of an overlay have the colour of its outline.
    """
    lines = [
        [
            ("" if number == NO_LABEL else label.classes[number], _OUTLINE if label.given_by == "overlay" else _INK)
            for number in batch.labels[name].tolist()
        ]
        for name, label in manifest.labels.items()
    ]
    return [list(captions) for captions in zip(*lines, strict=True)]


def draw_cell(
    picture_HWC: NDArray[np.uint8], mask_HW: NDArray[np.uint8] | None, captions: Sequence[Caption]
) -> Image.Image:
    """Draw one sample, with captions below, and a margin to the right and below.

    Sides change by a whole factor. A caption that is too long ends in three dots.
    """
    shrink = -(-max(picture_HWC.shape[:2]) // _MAX_CELL)
    if shrink > 1:
        picture_HWC = np.asarray(Image.fromarray(picture_HWC).reduce(shrink))
        mask_HW = None if mask_HW is None else mask_HW[::shrink, ::shrink]
    height, width, _ = picture_HWC.shape
    zoom = max(1, _CELL // max(height, width))
    size = (zoom * width + _MARGIN, zoom * height + _LINE * len(captions) + 4 + _MARGIN)
    cell = Image.new("RGB", size, _PAPER)
    enlarged = _enlarge(picture_HWC, zoom)
    if mask_HW is not None:
        enlarged[_outline(_enlarge(mask_HW != MASK_OUTSIDE, zoom))] = _OUTLINE
    cell.paste(Image.fromarray(enlarged))
    draw = ImageDraw.Draw(cell)
    font = ImageFont.truetype(FONT_PATH, _FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)
    for line, (text, colour) in enumerate(captions):
        while text.removesuffix("...") and font.getlength(text) > zoom * width:
            text = f"{text.removesuffix('...')[:-1]}..."
        draw.text((0, zoom * height + 2 + line * _LINE), text, fill=colour, font=font)
    return cell


def _enlarge(points: NDArray[Point], zoom: int) -> NDArray[Point]:
    return np.repeat(np.repeat(points, zoom, axis=0), zoom, axis=1)


def _outline(inside: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the points just inside the border of a region."""
    padded = np.pad(inside, 1)
    surrounded = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return inside & ~surrounded


def run(args: argparse.Namespace) -> None:
    if args.samples < 1:
        raise UserError(f"--samples must be at least 1, got {args.samples}")
    if args.out.suffix.lower() != ".png":
        raise UserError(f"--out {args.out} does not end in .png; a preview is written as PNG")
    grid = draw_grid(args.location, num_samples=args.samples)
    try:
        grid.save(args.out)
    except (FileNotFoundError, PermissionError) as error:
        raise UserError(f"cannot write {args.out} ({error.strerror}); choose another --out") from None
    print(args.out)
