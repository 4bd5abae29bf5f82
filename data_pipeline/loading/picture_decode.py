"""Decode a picture file of any size to square RGB tensors: the whole picture, or some crops of it.

Reads the formats of `data_pipeline.sources.picture_file`, known by their content and not by their name. Pictures become
RGB of 8 bits by the rules of that module, and stand upright as their metadata say; metadata behind the pixels of a PNG
do not count.

An upright JPEG is decoded by simplejpeg at the smallest scale of 1, 1/2, 1/4 and 1/8 that still gives every crop its
resolution. Each edge of a crop then moves by at most half a pixel of the scaled picture. What simplejpeg refuses and
all other files are decoded by Pillow at full size.

Guarantees:
- The number of pixels in the header is compared with Pillow's `MAX_IMAGE_PIXELS` before a pixel is decoded.
- A truncated file is refused, even if most of its pixels could be shown. A JPEG that lacks only its end mark is not.
- Bytes that are damaged in the middle of a file may become wrong pixels, if Pillow decodes it.
- A file that cannot be decoded raises `ValueError` with one reason, whatever is wrong with it.

Shapes: H rows, W columns, K crops.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
import simplejpeg
import torch
import torch.nn.functional as F
from PIL import Image, ImageFile, UnidentifiedImageError
from torch import Tensor

from data_pipeline.core.random_crop import Crop
from data_pipeline.sources.picture_file import FORMATS, decode_rgb, exif_orientation, open_picture, turned

_EIGHTHS: Final = (1, 2, 4, 8)  # of the full size, in which libjpeg decodes fast; the others take longer than 8
_TURNED_BY_90_DEGREES: Final = range(5, 9)  # EXIF orientations that exchange height and width


def picture_size(file: memoryview) -> tuple[int, int]:
    """Return height and width of the upright picture, (H, W), without decoding its pixels.

    Raises `ValueError` with the reason if the file is not a picture or has too many pixels.
    """
    with _opened(file) as picture:
        is_turned = exif_orientation(picture) in _TURNED_BY_90_DEGREES
        return picture.size if is_turned else (picture.height, picture.width)


def decode_square(file: memoryview, *, size: int) -> Tensor:
    """Return the square in the middle of a picture, as long as its shorter side: (3, size, size) uint8.

    Resizes as `decode_crops` does, and raises the same errors.
    """
    return decode_crops(file, [middle_square(*picture_size(file))], size=size)[0]


def middle_square(height: int, width: int) -> Crop:
    """Return the square in the middle of a picture, as long as its shorter side."""
    side = min(height, width)
    return Crop((height - side) // 2, (width - side) // 2, side, side)


def decode_crops(file: memoryview, crops: Sequence[Crop], *, size: int) -> Tensor:
    """Return one or more regions of the upright picture, each resized to (size, size): (K, 3, size, size) uint8.

    The resize is bilinear with antialiasing. The crops must lie inside the picture, whose size `picture_size` tells.
    They share one decode, which is most of the cost. The memory format of the result is channels-last.

    Raises `ValueError` with the reason if the file cannot be decoded.
    """
    with _opened(file) as picture:
        pixels_HWC, eighths = _decode(file, picture, _enough_eighths(crops, size))
    # In this layout torch resizes uint8 with AVX2 and no repacking, in half of the time.
    pixels_1CHW = pixels_HWC[None].permute(0, 3, 1, 2)
    views = []
    for crop in crops:
        top, left, bottom, right = _scaled_edges(crop, eighths)
        region_1CHW = pixels_1CHW[:, :, top:bottom, left:right]
        views.append(F.interpolate(region_1CHW, (size, size), mode="bilinear", antialias=True))
    return torch.cat(views)


def _enough_eighths(crops: Sequence[Crop], size: int) -> int:
    """Return the smallest scale, in eighths, at which no crop is smaller than `size`; 8 if one is smaller already."""
    shortest = min(side for crop in crops for side in (crop.height, crop.width))
    return next((eighths for eighths in _EIGHTHS if shortest * eighths >= 8 * size), 8)


def _scaled_edges(crop: Crop, eighths: int) -> tuple[int, int, int, int]:
    """Return top, left, bottom and right of a crop in the scaled picture, rounded to whole pixels."""
    edges = (crop.top, crop.left, crop.top + crop.height, crop.left + crop.width)
    top, left, bottom, right = ((edge * eighths + 4) // 8 for edge in edges)
    return top, left, bottom, right


def _decode(file: memoryview, picture: ImageFile.ImageFile, eighths: int) -> tuple[Tensor, int]:
    """Return the upright pixels, (H, W, 3) uint8, and the eighths of the full size at which they were decoded.

    Pillow decides about every file that simplejpeg refuses; it ignores wrong bytes between the parts of a JPEG.
    """
    orientation, size = exif_orientation(picture), picture.size
    # Pillow calls a JPEG with several pictures MPO. simplejpeg has other rules for four colours.
    if picture.format in {"JPEG", "MPO"} and picture.mode in {"L", "RGB"} and orientation == 1:
        width, height = (-(-side * eighths // 8) for side in size)
        with suppress(ValueError):
            # simplejpeg takes the smallest scale at which the picture is no smaller than this, so the one asked for.
            pixels_HWC = simplejpeg.decode_jpeg(file, min_height=height, min_width=width)
            return torch.from_numpy(pixels_HWC), eighths
    rgb = decode_rgb(picture)
    if rgb.size != size:
        raise ValueError("its pixels do not have the size in its header")
    return torch.from_numpy(np.array(turned(rgb, orientation))), 8


@contextmanager
def _opened(file: memoryview) -> Iterator[ImageFile.ImageFile]:
    """Yield a picture of which the header has been read, and turn every error into `ValueError` with the reason."""
    try:
        with open_picture(io.BytesIO(file)) as picture:
            yield picture
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(f"it has more than {Image.MAX_IMAGE_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        raise ValueError(f"it is not a picture of a known format ({', '.join(FORMATS)})") from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises nearly every kind for a damaged file
        raise ValueError(f"it does not decode ({' '.join(str(error).split()) or type(error).__name__})") from None
