"""The pixels of a picture file as Pillow alone shows them, to compare with."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps


def pillow_pixels(file: bytes | memoryview) -> NDArray[np.uint8]:
    """Return the upright first picture of a file over white, (H, W, 3) uint8; 16 bits of grey as in a viewer."""
    with Image.open(io.BytesIO(file)) as picture:
        picture.load()
        ImageOps.exif_transpose(picture, in_place=True)
        if picture.mode in ("I;16", "I;16B", "I"):
            grey_HW = np.rint(np.asarray(picture) / 257).astype(np.uint8)
            return np.stack([grey_HW] * 3, axis=-1)
        if picture.has_transparency_data:
            rgba = picture.convert("RGBA")
            return np.asarray(Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB"))
        return np.asarray(picture.convert("RGB"))
