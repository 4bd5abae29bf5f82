"""Read picture files of the formats in `FORMATS` as upright RGB pixels of 8 bits a channel.

- Knows a format by its content, not by the file's name. Other formats that Pillow reads are refused, because some of
  them start other programs.
- Reads only regular files of at most Pillow's `MAX_IMAGE_PIXELS`, which is checked before any pixel is decoded.
- Applies the orientation that a camera wrote into EXIF.
- Lays transparent pixels over white, in every mode that has transparency. Refuses a transparent colour of 16-bit RGB.
- Rounds grey values of 16 bits to 8 bits. Refuses 32-bit values, because their range is not known.
- Reads the first picture of a file with several, such as an animation. Ignores colour profiles.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from data_pipeline.core.errors import UserError

FORMATS: Final = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")

_ORIENTATION: Final = 0x0112  # the number of the EXIF tag
# How to turn a stored picture upright, by its EXIF orientation. Orientation 1 is upright already.
_UPRIGHT: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_WARNINGS: Final = threading.Lock()  # all threads share the filters of warnings
_BACKGROUND: Final = (255, 255, 255)
_16_BITS_IN_INT32: Final = frozenset({"PNG", "PPM"})  # older versions of Pillow read 16 bits of grey as 32 in these
# Pillow's names of the layouts of PNGs whose transparent colour it does not bring to 8 bits with the pixels.
_GREY_STEPS: Final = {"L;2": 85, "L;4": 17}  # the step of 8 bits between two levels of grey
_RGB_OF_16_BITS: Final = "RGB;16B"


def read_rgb(path: Path) -> Image.Image:
    """Read a picture in mode "RGB", upright.

    Raises `UserError` with the file's name if it is not a regular file, or with the reason of `opened`.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file, so it is not read; remove it")
    try:
        with opened(path) as picture:
            return turned(decode_rgb(picture), exif_orientation(picture))
    except ValueError as error:
        raise UserError(f"{path} cannot be read, because {error}; mend or remove it") from None


def decode_rgb(picture: ImageFile.ImageFile) -> Image.Image:
    """Decode an opened picture to mode "RGB" by the rules in the module's docstring. Does not turn it upright.

    Raises `ValueError` for values of an unknown range, and Pillow's errors.
    """
    colour = picture.info.get("transparency")
    if picture.format == "PNG" and picture.tile:
        layout = picture.tile[0][3]
        if layout == _RGB_OF_16_BITS and colour is not None:  # Pillow keeps 8 bits, which colours may share
            raise ValueError("one colour of its 16 bits is transparent; save it with an alpha channel")
        # A Pillow that scales the colour itself would give one that is too large to be scaled again, or 0.
        if layout in _GREY_STEPS and isinstance(colour, int) and colour * _GREY_STEPS[layout] <= 255:
            picture.info["transparency"] = colour * _GREY_STEPS[layout]
    picture.load()
    return to_rgb(picture)


def to_rgb(picture: Image.Image) -> Image.Image:
    """Convert a decoded picture of any mode to mode "RGB" by the rules in the module's docstring.

    Raises `ValueError` for values of an unknown range.
    """
    mode = picture.mode
    if mode.startswith("I;16") or (mode == "I" and picture.format in _16_BITS_IN_INT32):
        values_HW = np.asarray(picture)
        grey_HW = np.rint(values_HW.astype(np.float64) / 257).astype(np.uint8)  # 65,535 becomes 255
        if "transparency" in picture.info:
            grey_HW[values_HW == picture.info["transparency"]] = 255
        return Image.fromarray(grey_HW).convert("RGB")
    if mode in ("I", "F"):
        raise ValueError(f"its values have Pillow's mode {mode}, whose range is not known; save it with 8 bits")
    if picture.has_transparency_data:
        rgba = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, (*_BACKGROUND, 255)), rgba).convert("RGB")
    return picture.convert("RGB")


def middle_square(height: int, width: int, size: int) -> tuple[int, int, int, int]:
    """Return the size (H, W) of a picture whose shorter side has `size` pixels, and top and left of its middle square.

    Rounds like torchvision's `Resize(size)` and `CenterCrop(size)`.
    """
    shorter = min(height, width)
    new_height, new_width = int(size * height / shorter), int(size * width / shorter)
    return new_height, new_width, round((new_height - size) / 2), round((new_width - size) / 2)


@contextmanager
def opened(file: Path | IO[bytes]) -> Iterator[ImageFile.ImageFile]:
    """Yield a picture of one of `FORMATS`, of which the header has been read.

    Every error of opening it, and of decoding it in the block, becomes `ValueError` with the reason.
    """
    try:
        with without_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(file, formats=FORMATS)
        with picture:
            yield picture
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(f"it has more than {Image.MAX_IMAGE_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        raise ValueError(f"it is not a picture of a known format ({', '.join(FORMATS)})") from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises nearly every kind for a damaged file
        raise ValueError(f"it does not decode ({' '.join(str(error).split()) or type(error).__name__})") from None


def exif_orientation(picture: Image.Image) -> int:
    """Return the EXIF orientation by which a picture still has to be turned; 1 if its metadata are damaged."""
    if picture.format == "TIFF":
        return 1  # Pillow turns the pixels itself
    try:
        with without_warnings():
            # PNG's own method decodes all pixels to find what comes after them.
            found = Image.Image.getexif(picture).get(_ORIENTATION)
    except Exception:  # Pillow raises many kinds
        return 1
    return found if found in _UPRIGHT else 1


def turned(picture: Image.Image, orientation: int) -> Image.Image:
    """Return a stored picture upright, by its EXIF orientation."""
    return picture if orientation == 1 else picture.transpose(_UPRIGHT[orientation])


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence Pillow's warnings, such as those of damaged EXIF, which it gives for many pictures of large datasets."""
    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
