"""Decode a picture file of any size to square RGB tensors: the whole picture, or some crops of it.

Reads the formats of `data_pipeline.sources.picture_file`, known by their content and not by their name. Pictures become
RGB of 8 bits by the rules of that module, and stand upright as their metadata say. The metadata of a PNG may come after
the pixels; they are found without decoding these.

A JPEG is decoded by simplejpeg at the smallest scale of 1, 1/2, 1/4 and 1/8 that still gives every crop its resolution.
Each edge of a crop then moves by at most half a pixel of the scaled picture. What simplejpeg refuses and all other
formats are decoded by Pillow at full size.

Guarantees:
- The number of pixels in the header is compared with Pillow's `MAX_IMAGE_PIXELS` before a pixel is decoded.
- A truncated file is refused, even if most of its pixels could be shown. A JPEG that lacks only its end mark is not.
- Bytes that are damaged in the middle of a file may become wrong pixels, if Pillow decodes it.
- A file that cannot be decoded raises `ValueError` with one reason, whatever is wrong with it.

Shapes: H rows, W columns, K crops. "Stored" means before the picture is turned upright.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
import simplejpeg
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from data_pipeline.core.random_crop import Crop
from data_pipeline.sources.picture_file import FORMATS, decode_rgb, exif_orientation, open_picture

# For each EXIF orientation: whether the rows, then the columns of the stored picture are reversed, and whether they are
# exchanged after that, to make it upright.
_TURNS: Final = {
    1: (False, False, False),
    2: (False, True, False),
    3: (True, True, False),
    4: (True, False, False),
    5: (False, False, True),
    6: (True, False, True),
    7: (True, True, True),
    8: (False, True, True),
}

# The parts of a JPEG file (ITU-T T.81, table B.1)
_START: Final = b"\xff\xd8"
_FRAMES: Final = frozenset({0xC0, 0xC1, 0xC2})  # of the kinds that simplejpeg decodes: with Huffman codes, lossy
_SCAN: Final = 0xDA  # the pixels begin
_METADATA: Final = 0xE1  # EXIF or XMP
# The entry of EXIF for the orientation 1, in either order of bytes
_ORIENTATION_OF_1: Final = re.compile(rb"\x01\x12\0\x03\0\0\0\x01\0\x01|\x12\x01\x03\0\x01\0\0\0\x01\0")
_FRAME: Final = Struct(">BHHB")  # bits, height, width, channels
_EIGHTHS: Final = (1, 2, 4, 8)  # of the full size, in which libjpeg decodes fast; the others take longer than 8

# The parts of a PNG file (ISO/IEC 15948): each has a length, a name, data and a checksum of name and data.
_PNG_START: Final = b"\x89PNG\r\n\x1a\n"
_CHUNK: Final = Struct(">I4s")  # length of the data, name
_CHECKSUM: Final = Struct(">I")
_PIXELS: Final = b"IDAT"
_CHUNKS_THAT_TURN: Final = frozenset({b"eXIf", b"tEXt", b"zTXt", b"iTXt"})  # EXIF, also as text, and XMP
_LAST_CHUNKS: Final = frozenset({b"IEND", b"fcTL"})  # the end of the file, and the next picture of an animation


class _Frame(NamedTuple):
    """Size of a stored JPEG in pixels, and whether its metadata may turn it."""

    height: int
    width: int
    may_be_turned: bool


@dataclass(frozen=True)
class _Header:
    """Size of a stored picture in pixels, its EXIF orientation, and whether simplejpeg may decode it."""

    height: int
    width: int
    orientation: int
    is_plain_jpeg: bool


def picture_size(file: memoryview) -> tuple[int, int]:
    """Return height and width of the upright picture, (H, W), without decoding its pixels.

    Raises `ValueError` with the reason if the file is not a picture or has too many pixels.
    """
    header = _read_header(file)
    _, _, are_exchanged = _TURNS[header.orientation]
    return (header.width, header.height) if are_exchanged else (header.height, header.width)


def decode_square(file: memoryview, *, size: int) -> Tensor:
    """Return the square in the middle of a picture, as long as its shorter side: (3, size, size) uint8.

    Resizes as `decode_crops` does, and raises the same errors.
    """
    height, width = picture_size(file)
    side = min(height, width)
    return decode_crops(file, [Crop((height - side) // 2, (width - side) // 2, side, side)], size=size)[0]


def decode_crops(file: memoryview, crops: Sequence[Crop], *, size: int) -> Tensor:
    """Return one or more regions of the upright picture, each resized to (size, size): (K, 3, size, size) uint8.

    The resize is bilinear with antialiasing. The crops must lie inside the picture, whose size `picture_size` tells.
    They share one decode, which is most of the cost. The memory format of the result is channels-last.

    Raises `ValueError` with the reason if the file cannot be decoded.
    """
    header = _read_header(file)
    stored_crops = [_stored_crop(crop, header) for crop in crops]
    pixels_HWC, eighths = _decode(file, header, _enough_eighths(stored_crops, size))
    # In this layout torch resizes uint8 with AVX2 and no repacking, in half of the time.
    stored_1CHW = pixels_HWC[None].permute(0, 3, 1, 2)
    views = []
    for crop in stored_crops:
        top, left, bottom, right = _scaled_edges(crop, eighths)
        region_1CHW = stored_1CHW[:, :, top:bottom, left:right]
        view_1CHW = F.interpolate(region_1CHW, (size, size), mode="bilinear", antialias=True)
        views.append(view_1CHW if header.orientation == 1 else _turned(view_1CHW, header.orientation))
    return torch.cat(views)


def _turned(view_1CHW: Tensor, orientation: int) -> Tensor:
    """Return a square view of the stored picture as a view of the upright one, in channels-last."""
    reverses_rows, reverses_columns, exchanges = _TURNS[orientation]
    reversed_dims = [dim for dim, is_reversed in ((2, reverses_rows), (3, reverses_columns)) if is_reversed]
    view_1CHW = view_1CHW.flip(reversed_dims)
    return (view_1CHW.mT if exchanges else view_1CHW).contiguous(memory_format=torch.channels_last)


def _stored_crop(crop: Crop, header: _Header) -> Crop:
    """Return the same region of the stored picture."""
    reverses_rows, reverses_columns, exchanges = _TURNS[header.orientation]
    top, left, height, width = crop
    if exchanges:
        top, left, height, width = left, top, width, height
    assert 0 <= top < top + height <= header.height, (crop, header)
    assert 0 <= left < left + width <= header.width, (crop, header)
    if reverses_rows:
        top = header.height - top - height
    if reverses_columns:
        left = header.width - left - width
    return Crop(top, left, height, width)


def _enough_eighths(crops: Sequence[Crop], size: int) -> int:
    """Return the smallest scale, in eighths, at which no crop is smaller than `size`; 8 if one is smaller already."""
    shortest = min(side for crop in crops for side in (crop.height, crop.width))
    return next((eighths for eighths in _EIGHTHS if shortest * eighths >= 8 * size), 8)


def _scaled_edges(crop: Crop, eighths: int) -> tuple[int, int, int, int]:
    """Return top, left, bottom and right of a crop in the scaled picture, rounded to whole pixels."""
    edges = (crop.top, crop.left, crop.top + crop.height, crop.left + crop.width)
    top, left, bottom, right = ((edge * eighths + 4) // 8 for edge in edges)
    return top, left, bottom, right


def _decode(file: memoryview, header: _Header, eighths: int) -> tuple[Tensor, int]:
    """Return the stored pixels, (H, W, 3) uint8, at a scale in eighths of the full size, and that scale.

    Pillow decides about every file that simplejpeg refuses; it ignores wrong bytes between the parts of a JPEG.
    """
    if header.is_plain_jpeg:
        height, width = (-(-side * eighths // 8) for side in (header.height, header.width))
        with suppress(ValueError):
            # simplejpeg takes the smallest scale at which the picture is no smaller than this, so the one asked for.
            pixels_HWC = simplejpeg.decode_jpeg(file, min_height=height, min_width=width)
            return torch.from_numpy(pixels_HWC), eighths
    with _reasons(), open_picture(io.BytesIO(file)) as picture:
        rgb = decode_rgb(picture)
        if rgb.size != (header.width, header.height):
            raise ValueError("its pixels do not have the size in its header")
        return torch.from_numpy(np.array(rgb)), 8


def _read_header(file: memoryview) -> _Header:
    """Return what a file says about its picture before the pixels.

    Raises `ValueError` with the reason if the file is not a picture or has too many pixels.
    """
    frame = _plain_jpeg_frame(file)
    if (
        frame is not None
        and not frame.may_be_turned
        and 0 < frame.height * frame.width <= (Image.MAX_IMAGE_PIXELS or 0)
    ):
        return _Header(frame.height, frame.width, orientation=1, is_plain_jpeg=True)
    with _reasons(), open_picture(io.BytesIO(_with_metadata_first(file))) as picture:
        return _Header(picture.height, picture.width, exif_orientation(picture), is_plain_jpeg=frame is not None)


def _with_metadata_first(file: memoryview) -> memoryview | bytes:
    """Return a PNG with metadata after its pixels as a PNG without pixels; return every other file as it is.

    Pillow would find these metadata only by decoding the pixels. Those that come last count, so the order is kept.
    """
    if bytes(file[: len(_PNG_START)]) != _PNG_START:
        return file
    at = len(_PNG_START)
    pixels_at: int | None = None
    late: list[bytes] = []
    while at + _CHUNK.size <= len(file):
        length, name = _CHUNK.unpack_from(file, at)
        if name == _PIXELS and pixels_at is None:
            pixels_at = at
        elif pixels_at is not None and name in _LAST_CHUNKS:
            break
        elif pixels_at is not None and name in _CHUNKS_THAT_TURN:
            chunk = bytes(file[at : at + _CHUNK.size + length])
            # Pillow compares the checksums of chunks before the pixels, and not of those after them.
            late += [chunk, _CHECKSUM.pack(zlib.crc32(chunk[4:]))]
        at += _CHUNK.size + length + _CHECKSUM.size
    return b"".join([file[:pixels_at], *late, _CHUNK.pack(0, _PIXELS)]) if late else file


def _plain_jpeg_frame(file: memoryview) -> _Frame | None:
    """Return the frame of a JPEG that simplejpeg decodes: grey or three colours, of 8 bits, with Huffman codes.

    Returns None for other files, and if the parts before the pixels do not follow each other without a gap.
    """
    if bytes(file[:2]) != _START:
        return None
    at, frame, may_be_turned = 2, None, False
    while at + 4 + _FRAME.size <= len(file) and file[at] == 0xFF:
        part, length = file[at + 1], file[at + 2] << 8 | file[at + 3]
        if part in _FRAMES:
            frame = _FRAME.unpack_from(file, at + 4)
        elif part == _METADATA:
            may_be_turned |= _may_turn(bytes(file[at + 4 : at + 2 + length]))
        elif part == _SCAN:
            if frame is None:
                return None
            bits, height, width, num_channels = frame
            return _Frame(height, width, may_be_turned) if bits == 8 and num_channels in (1, 3) else None
        at += 2 + length
    return None


def _may_turn(metadata: bytes) -> bool:
    """Return whether metadata may hold an orientation other than 1; only then does Pillow have to parse them.

    The bytes of the tag may also be there by chance.
    """
    others = _ORIENTATION_OF_1.sub(b"", metadata)
    return any(mark in others for mark in (b"\x01\x12", b"\x12\x01", b"tiff:Orientation"))


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
