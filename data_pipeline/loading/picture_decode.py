"""Decode a picture file of any size to square RGB tensors: the whole picture, or some crops of it.

Reads the formats of `data_pipeline.sources.picture_file`, known by their content and not by their name. Pictures become
RGB of 8 bits by the rules of that module, and stand upright as their metadata say; metadata behind the pixels of a PNG
do not count.

An upright JPEG is decoded by simplejpeg at the smallest scale of 1, 1/2, 1/4 and 1/8 that still gives every crop its
resolution. What simplejpeg refuses and all other files are decoded by Pillow at full size. Crops are of whole pixels,
so at a smaller scale each edge moves by at most half a pixel of the scaled picture.

A middle square is at its place at every scale. Decoded at full size it is that of `data_pipeline.sources.folder` to one
level. At a smaller scale, whose pixels are means of 4, 16 or 64, photos differ from it by about two levels on average.

Guarantees:
- The number of pixels in the header is compared with twice Pillow's `MAX_IMAGE_PIXELS` before a pixel is decoded.
- A truncated file is refused, even if most of its pixels could be shown.
- Bytes that are damaged in the middle of a file may become wrong pixels, if Pillow decodes it.
- A file that cannot be decoded raises `ValueError` with one reason, whatever is wrong with it.

Shapes: C channels, which are 3, H rows, W columns, K crops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import numpy as np
import simplejpeg
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageFile
from torch import Tensor

from data_pipeline.core.random_crop import Crop
from data_pipeline.sources.picture_file import (
    JPEG_FORMATS,
    decode_rgb,
    exif_orientation,
    middle_square,
    opened,
    turned,
    upright_size,
)

_EIGHTHS: Final = (1, 2, 4, 8)  # of the full size, in which libjpeg decodes fast; the others take longer than 8


def picture_size(file: memoryview) -> tuple[int, int]:
    """Return height and width of the upright picture, (H, W), without decoding its pixels.

    Raises `ValueError` with the reason if the file is not a picture or has too many pixels.
    """
    with opened(file) as picture:
        return upright_size(picture)


def decode_square(file: memoryview, *, size: int) -> Tensor:
    """Return the middle square of the upright picture: (C, size, size) uint8.

    The picture is resized until its shorter side has `size` pixels, and then cut, as a build does. Raises the errors of
    `decode_crops`.
    """
    with opened(file) as picture:
        height, width = upright_size(picture)
        new_height, new_width, top, left = middle_square(height, width, size)
        if new_height * new_width > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise ValueError(f"it is {width}x{height} pixels, too long for its shorter side")
        pixels_1CHW, eighths = _decode(file, picture, _enough_eighths(min(height, width), size))
    # Scales in place of sizes, because the last pixel of a scaled picture may lie half outside of it. They are larger
    # by a trifle, so that rounding never loses a pixel of the result.
    scales = [(8 * new + 1e-6) / (eighths * old) for new, old in ((new_height, height), (new_width, width))]
    resized_1CHW = F.interpolate(pixels_1CHW, scale_factor=scales, mode="bilinear", antialias=True)
    return resized_1CHW[0, :, top : top + size, left : left + size]


def decode_crops(file: memoryview, crops: Sequence[Crop], *, size: int) -> Tensor:
    """Return one or more regions of the upright picture, each resized to (size, size): (K, C, size, size) uint8.

    The resize is bilinear with antialiasing. The crops must lie inside the picture, whose size `picture_size` tells.
    They share one decode, which is most of the cost. The memory format of the result is channels-last.

    Raises `ValueError` with the reason if the file cannot be decoded.
    """
    shortest = min(side for crop in crops for side in (crop.height, crop.width))
    with opened(file) as picture:
        pixels_1CHW, eighths = _decode(file, picture, _enough_eighths(shortest, size))
    views = []
    for crop in crops:
        top, left, bottom, right = _scaled_edges(crop, eighths)
        region_1CHW = pixels_1CHW[:, :, top:bottom, left:right]
        views.append(F.interpolate(region_1CHW, (size, size), mode="bilinear", antialias=True))
    return torch.cat(views)


def _enough_eighths(shortest: int, size: int) -> int:
    """Return the smallest scale, in eighths, at which `shortest` pixels are no less than `size`; else 8."""
    return next((eighths for eighths in _EIGHTHS if shortest * eighths >= 8 * size), 8)


def _scaled_edges(crop: Crop, eighths: int) -> tuple[int, int, int, int]:
    """Return top, left, bottom and right of a crop in the scaled picture, rounded to whole pixels."""
    edges = (crop.top, crop.left, crop.top + crop.height, crop.left + crop.width)
    top, left, bottom, right = ((edge * eighths + 4) // 8 for edge in edges)
    return top, left, bottom, right


def _decode(file: memoryview, picture: ImageFile.ImageFile, eighths: int) -> tuple[Tensor, int]:
    """Return the upright pixels, (1, C, H, W) uint8, and the eighths of the full size at which they were decoded.

    In their memory format, channels-last, torch resizes uint8 with AVX2 and no repacking, in half of the time.
    Pillow decides about every file that simplejpeg refuses; it ignores wrong bytes between the parts of a JPEG.
    """
    orientation, size = exif_orientation(picture), picture.size
    # simplejpeg has other rules for four colours.
    if picture.format in JPEG_FORMATS and picture.mode in {"L", "RGB"} and orientation == 1:
        width, height = (-(-side * eighths // 8) for side in size)
        with suppress(ValueError):
            # simplejpeg takes the smallest scale at which the picture is no smaller than this, so the one asked for.
            pixels_HWC = simplejpeg.decode_jpeg(file, min_height=height, min_width=width)
            return _as_batch(pixels_HWC), eighths
    rgb = decode_rgb(picture)
    if rgb.size != size:
        raise ValueError("its pixels do not have the size in its header")
    return _as_batch(np.array(turned(rgb, orientation))), 8


def _as_batch(pixels_HWC: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(pixels_HWC)[None].permute(0, 3, 1, 2)
