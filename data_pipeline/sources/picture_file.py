"""Read picture files of the formats in `FORMATS` as upright RGB pixels of 8 bits a channel.

- Knows a format by its content, not by the file's name. Other formats that Pillow reads are refused: some start other
  programs, are drawings without pixels, or are known by their name alone.
- Reads only files of at most twice Pillow's `MAX_IMAGE_PIXELS`, which is checked before any pixel is decoded.
- Applies the orientation that a camera wrote into EXIF.
- Lays transparent pixels over white, as far as Pillow knows them: no transparent grey of 2, 4 or 16 bits.
- Brings grey values of 12 or 16 bits to 8 bits, rounded. Colours of 16 bits lose their lower 8, as in Pillow. Refuses
  32-bit numbers and floats, whose range is not known.
- Reads the first picture of a file with several, such as an animation. Ignores colour profiles.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps, TiffImagePlugin, UnidentifiedImageError

warnings.filterwarnings("ignore", module=r"PIL\.")  # of damaged EXIF, for example, which many pictures have

PictureData = bytes | memoryview | IO[bytes]  # of one file; a stream is at its begin, which can seek

# Pillow's names, tried in this order; TGA is last, because any file could begin as one. Pillow reads MPO as JPEG.
FORMATS: Final = (
    *("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "JPEG2000", "AVIF"),
    *("ICO", "QOI", "DDS", "TGA"),
)
JPEG_FORMATS: Final = frozenset({"JPEG", "MPO"})  # Pillow calls a JPEG with several pictures MPO

_ORIENTATION: Final = 0x0112  # the number of the EXIF tag
_SAMPLES_PER_PIXEL: Final = 277  # the number of the tag of TIFF
_ORIENTATIONS: Final = range(1, 9)  # 1 is upright
_TURNED_BY_90_DEGREES: Final = range(5, 9)
_BACKGROUND: Final = (255, 255, 255)
_SCALED_BY_PILLOW: Final = frozenset({"PPM", "JPEG2000"})  # to 16 bits, because a file names the range of its values
_HEIF_BRANDS: Final = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
_LONGEST_START: Final = 12  # bytes by which formats are known here


def read_pixels(file: PictureData, *, image_size: int | None = None) -> NDArray[np.uint8]:
    """Return the pixels of an upright picture, (H, W, 3) uint8; with `image_size`, its middle square in that size.

    The square is that of torchvision's `Resize` and `CenterCrop`, of a large JPEG to three levels. Raises `ValueError`
    with the reason if the file cannot be read.
    """
    with opened(file) as picture:
        if image_size is not None and picture.width % 8 == picture.height % 8 == 0:  # so its shape is kept
            picture.draft(None, (2 * image_size, 2 * image_size))  # a JPEG at 1/8, 1/4 or 1/2, in a quarter of the time
        return np.asarray(_middle(turned(decode_rgb(picture), exif_orientation(picture)), image_size))


def _middle(picture: Image.Image, image_size: int | None) -> Image.Image:
    if image_size is None:
        return picture
    height, width, top, left = middle_square(picture.height, picture.width, image_size)
    resized = picture.resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, top, left + image_size, top + image_size))


def decode_rgb(picture: ImageFile.ImageFile) -> Image.Image:
    """Decode an opened picture to mode "RGB" by the rules in the module's docstring. Does not turn it upright.

    Raises `ValueError` for values of an unknown range, and Pillow's errors.
    """
    if isinstance(picture, TiffImagePlugin.TiffImageFile):
        num_channels, num_read = picture.tag_v2.get(_SAMPLES_PER_PIXEL, 1), len(picture.getbands())
        if num_channels > num_read:
            raise ValueError(f"Pillow reads {num_read} of its {num_channels} channels; save those you need")
    has_12_bits = "I;12" in str(picture.tile)  # Pillow's name of how the pixels lie in the file
    picture.load()
    if picture.mode[0] in "IF":
        if not picture.mode.startswith("I;16") and (picture.format not in _SCALED_BY_PILLOW or picture.mode == "F"):
            raise ValueError(f"its values of mode {picture.mode} have an unknown range; save it in 8 bits")
        grey_HW = np.rint(np.asarray(picture) * (255 / (4_095 if has_12_bits else 65_535)))
        return Image.fromarray(grey_HW.astype(np.uint8)).convert("RGB")
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
def opened(file: PictureData) -> Iterator[ImageFile.ImageFile]:
    """Yield a picture of one of `FORMATS`, of which the header has been read.

    Every error of opening it, and of decoding it in the block, becomes `ValueError` with the reason.
    """
    stream = io.BytesIO(file) if isinstance(file, bytes | memoryview) else file
    start = stream.read(_LONGEST_START)
    stream.seek(0)
    try:
        with _open(stream, start) as picture:
            yield picture
    except Image.DecompressionBombError:
        raise ValueError(f"it has more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels") from None
    except UnidentifiedImageError:
        raise ValueError(f"it is not a picture of a known format ({', '.join(FORMATS)})") from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises nearly every kind for a damaged file
        raise ValueError(f"it does not decode ({' '.join(str(error).split()) or type(error).__name__})") from None


def _open(stream: IO[bytes], start: bytes) -> ImageFile.ImageFile:
    try:
        return Image.open(stream, formats=FORMATS)
    except UnidentifiedImageError:
        if start[4:8] != b"ftyp" or start[8:12] not in _HEIF_BRANDS:
            raise
    try:
        import_module("pillow_heif").register_heif_opener()
    except ImportError:
        raise ValueError("a HEIC needs the package pillow-heif; install it with pip install -e '.[heif]'") from None
    return Image.open(stream, formats=("HEIF",))


def upright_size(picture: ImageFile.ImageFile) -> tuple[int, int]:
    """Return height and width of an opened picture after it is turned upright, (H, W)."""
    is_turned = exif_orientation(picture) in _TURNED_BY_90_DEGREES
    return picture.size if is_turned else (picture.height, picture.width)


def exif_orientation(picture: Image.Image) -> int:
    """Return the EXIF orientation by which a picture still has to be turned; 1 if its metadata are damaged."""
    if picture.format == "TIFF":
        return 1  # Pillow turns the pixels itself
    try:
        # PNG's own method decodes all pixels to find what comes after them.
        found: Any = Image.Image.getexif(picture).get(_ORIENTATION)
    except Exception:  # Pillow raises many kinds
        return 1
    return found if found in _ORIENTATIONS else 1


def turned(picture: Image.Image, orientation: int) -> Image.Image:
    """Return a stored picture upright, by its EXIF orientation."""
    picture.getexif()[_ORIENTATION] = orientation
    return ImageOps.exif_transpose(picture)
