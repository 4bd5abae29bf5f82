"""Encode and decode PNG files of many small pictures.

PNG stores each row of a picture with one of five filters. `encode_png` always uses the filter "up", the difference to
the row above. Files are about a tenth larger than with the best filters, but one addition for each row decodes a whole
batch. Any program can open them. `decode_pngs` reads these files alone.

Guarantees: nothing is decompressed before the header was compared with the expected one, and never more bytes than a
picture of that size holds. A file may come from a stranger.

Shapes: B pictures, C channels (3: RGB, 1: grey), H height, W width.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_UP: Final = 2  # the filter type of PNG
_COLOUR_TYPES: Final = {1: 0, 3: 2}
_LEVEL: Final = 3  # pictures of 32x32 are at most 1 % larger than with level 9
_END: Final = struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Return a PNG of a picture (H, W, 3) or a mask (H, W), uint8; the same pixels give the same bytes."""
    assert pixels.dtype == np.uint8
    height = pixels.shape[0]
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    filtered = np.empty((height, 1 + rows.shape[1]), dtype=np.uint8)
    filtered[:, 0] = _UP
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    num_channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    head = _head(num_channels, height, pixels.shape[1])
    return head + _chunk(b"IDAT", zlib.compress(filtered.tobytes(), _LEVEL)) + _END


@cache
def _head(num_channels: int, height: int, width: int) -> bytes:
    """Return the bytes before the image data of a PNG with eight bits a channel, not interlaced."""
    ihdr = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[num_channels], 0, 0, 0)
    return _SIGNATURE + _chunk(b"IHDR", ihdr)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(content, zlib.crc32(name)))


def decode_pngs(files: Sequence[memoryview], shape: tuple[int, int, int]) -> tuple[Tensor, dict[int, str]]:
    """Decode PNG files of `encode_png` that should all have `shape`, (C, H, W).

    Returns (B, C, H, W) uint8, and by row the reason why a picture did not decode; such a picture is black.
    """
    num_channels, height, width = shape
    blank = bytes(height * (1 + width * num_channels))
    points = [_points_by_up(file, shape) for file in files]
    filtered = np.frombuffer(b"".join([found or blank for found in points]), dtype=np.uint8)
    rows_BHX = filtered.reshape(len(files), height, 1 + width * num_channels)
    rows_HBCW = rows_BHX[:, :, 1:].reshape(len(files), height, width, num_channels).transpose(1, 0, 3, 2)
    pictures_BCHW = np.empty((len(files), *shape), dtype=np.uint8)
    above_BCW: NDArray[np.uint8] | np.uint8 = np.uint8(0)
    for y, row_BCW in enumerate(rows_HBCW):
        above_BCW = np.add(above_BCW, row_BCW, out=pictures_BCHW[:, :, y])
    reason = f"it is not a whole PNG of a build with {num_channels} channels of {width}x{height} pixels"
    return torch.from_numpy(pictures_BCHW), {row: reason for row, found in enumerate(points) if found is None}


def _points_by_up(file: memoryview, shape: tuple[int, int, int]) -> bytes | None:
    """Return the filtered rows of a picture, each after its filter type; None if `encode_png` did not write it.

    The adler32 of the compressed data shows damage.
    """
    head = _head(*shape)
    first = len(head) + 8  # after the length and name of the chunk that holds the image data
    if bytes(file[: len(head)]) != head or bytes(file[first - 4 : first]) != b"IDAT":
        return None
    num_channels, height, width = shape
    row_size = 1 + width * num_channels
    num_bytes = height * row_size
    stream = zlib.decompressobj()
    try:
        # Asks for one byte more, because otherwise the end of the stream with its adler32 is not read.
        points = stream.decompress(file[first : -4 - len(_END)], num_bytes + 1)
    except zlib.error:
        return None
    is_whole = stream.eof and len(points) == num_bytes
    return points if is_whole and points[::row_size] == bytes([_UP]) * height else None
