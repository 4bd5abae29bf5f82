"""Draw the first samples of a dataset as a grid: pictures enlarged, the object's mask outlined, both labels below."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from data_pipeline.errors import UserError
from data_pipeline.manifest import Manifest
from data_pipeline.overlays.letters import FONT_PATH
from data_pipeline.sample import MASK_OUTSIDE, NO_LABEL, Sample
from data_pipeline.shards import SampleStore

NUM_COLUMNS: Final = 10
_CELL = 96  # a picture's side is enlarged to about this, in pixels
_MARGIN, _CAPTION = 8, 34
_PAPER, _INK, _OUTLINE = (255, 255, 255), (40, 40, 40), (255, 0, 200)


def draw_grid(store: SampleStore, *, num_samples: int) -> Image.Image:
    """The first `num_samples` samples in rows of ten. A build orders samples so that these are of all classes."""
    cells = [draw_cell(store[index], store.manifest) for index in range(min(num_samples, len(store)))]
    width, height = cells[0].size
    num_columns = min(NUM_COLUMNS, len(cells))
    num_rows = -(-len(cells) // num_columns)
    grid = Image.new("RGB", (num_columns * width + _MARGIN, num_rows * height + _MARGIN), _PAPER)
    for number, cell in enumerate(cells):
        row, column = divmod(number, num_columns)
        grid.paste(cell, (_MARGIN + column * width, _MARGIN + row * height))
    return grid


def draw_cell(sample: Sample, manifest: Manifest) -> Image.Image:
    """One sample, enlarged by a whole factor, with captions and a margin to the right and below."""
    height, width = sample.mask.shape
    zoom = max(1, _CELL // max(height, width))
    cell = Image.new("RGB", (zoom * width + _MARGIN, zoom * height + _CAPTION + _MARGIN), _PAPER)
    enlarged = np.repeat(np.repeat(sample.image, zoom, axis=0), zoom, axis=1)
    inside = np.repeat(np.repeat(sample.mask != MASK_OUTSIDE, zoom, axis=0), zoom, axis=1)
    enlarged[_outline(inside)] = _OUTLINE
    cell.paste(Image.fromarray(enlarged))
    draw = ImageDraw.Draw(cell)
    font = ImageFont.truetype(FONT_PATH, 13, layout_engine=ImageFont.Layout.BASIC)
    names = manifest.label_names
    draw.text((0, zoom * height + 2), names.base[sample.label_base], fill=_INK, font=font)
    if sample.label_overlay != NO_LABEL:
        draw.text((0, zoom * height + 17), names.overlay[sample.label_overlay], fill=_OUTLINE, font=font)
    return cell


def _outline(inside: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The points just inside the border of a region."""
    padded = np.pad(inside, 1)
    surrounded = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return inside & ~surrounded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="a built dataset")
    parser.add_argument("--out", metavar="PNG", type=Path, required=True, help="the picture to write")
    parser.add_argument("--samples", metavar="N", type=int, default=60, help="how many (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    if args.samples < 1:
        raise UserError(f"--samples must be at least 1, got {args.samples}")
    if args.out.suffix.lower() != ".png":
        raise UserError(f"--out {args.out} does not end in .png; a preview is written as PNG")
    grid = draw_grid(SampleStore(args.directory), num_samples=args.samples)
    try:
        grid.save(args.out)
    except (FileNotFoundError, PermissionError) as error:
        raise UserError(f"cannot write {args.out} ({error.strerror}); choose another --out") from None
    print(args.out)
