"""Decode a picture file of any size to square RGB tensors: the whole picture, or some crops of it.

Reads the formats of `data_pipeline.sources.picture_file`, known by their content and not by their name. Pictures stand
upright as EXIF says and become RGB of 8 bits by the rules of that module.

Guarantees:
- The number of pixels in the header is compared with Pillow's `MAX_IMAGE_PIXELS` before a pixel is decoded.
- A truncated file is refused, even if most of its pixels could be shown.
- A file that cannot be decoded raises `ValueError` with one reason, whatever is wrong with it.

Shapes: H rows, W columns, K crops.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from data_pipeline.core.random_crop import Crop
from data_pipeline.sources.picture_file import FORMATS, open_picture, to_rgb

_ORIENTATION: Final = 0x0112  # the number of the EXIF tag
_TURNED: Final = frozenset({5, 6, 7, 8})  # orientations in which the stored rows are columns of the upright picture


def picture_size(file: memoryview) -> tuple[int, int]:
    """Return height and width of the upright picture, (H, W), from the header alone.

    Raises `ValueError` with the reason if the file is not a picture or has too many pixels.
    """
    with _reasons(), open_picture(io.BytesIO(file)) as picture:
        width, height = picture.size
        return (width, height) if picture.getexif().get(_ORIENTATION) in _TURNED else (height, width)


def decode_square(file: memoryview, *, size: int) -> Tensor:
    """Return the square in the middle of a picture, as long as its shorter side: (3, size, size) uint8.

    Resizes as `decode_crops` does, and raises the same errors.
    """
    height, width = picture_size(file)
    side = min(height, width)
    return decode_crops(file, [Crop((height - side) // 2, (width - side) // 2, side, side)], size=size)[0]


def decode_crops(file: memoryview, crops: Sequence[Crop], *, size: int) -> Tensor:
    """Return regions of the upright picture, each resized to (size, size): (K, 3, size, size) uint8.

    The resize is bilinear with antialiasing. The crops must lie inside the picture, whose size `picture_size` tells.
    They share one decode, which is most of the cost.

    Raises `ValueError` with the reason if the file cannot be decoded.
    """
    with _reasons(), open_picture(io.BytesIO(file)) as picture:
        picture.load()
        ImageOps.exif_transpose(picture, in_place=True)
        pixels_HWC = torch.from_numpy(np.array(to_rgb(picture)))
    pixels_CHW = pixels_HWC.permute(2, 0, 1)
    crops_KCHW = torch.empty(len(crops), 3, size, size, dtype=torch.uint8)
    for crop, resized_CHW in zip(crops, crops_KCHW, strict=True):
        region_CHW = pixels_CHW[:, crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
        resized_CHW.copy_(F.interpolate(region_CHW[None], (size, size), mode="bilinear", antialias=True)[0])
    return crops_KCHW


@contextmanager
def _reasons() -> Iterator[None]:
    """Turn every error of reading a picture into `ValueError` with the reason."""
    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(f"it has more than {Image.MAX_IMAGE_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        raise ValueError(f"it is not a picture of a known format ({', '.join(FORMATS)})") from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises nearly every kind for a damaged file
        raise ValueError(f"it does not decode ({' '.join(str(error).split()) or type(error).__name__})") from None
