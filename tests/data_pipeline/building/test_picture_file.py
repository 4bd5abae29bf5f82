from __future__ import annotations

import os
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image

from data_pipeline.core.errors import UserError
from data_pipeline.core.random_crop import Crop
from data_pipeline.loading.picture_decode import decode_crops
from data_pipeline.sources.picture_file import read_rgb, to_rgb

CORNERS = np.array([[[250, 0, 0], [0, 250, 0]], [[0, 0, 250], [250, 250, 0]], [[0, 0, 0], [9, 9, 9]]], dtype=np.uint8)

# What a viewer does to a picture with each EXIF orientation.
UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: np.rot90(pixels),
}


@pytest.mark.parametrize(
    ("orientation", "suffix"), [*((each, "png") for each in UPRIGHT), (6, "tiff"), (6, "webp"), (6, "jpg")]
)
def test_a_picture_stands_upright_as_its_camera_noted(orientation: int, suffix: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.kron(CORNERS, np.ones((16, 16, 1), dtype=np.uint8))
    path = tmp_path / f"x.{suffix}"
    options = {"webp": {"lossless": True}, "jpg": {"quality": 100, "subsampling": 0}}.get(suffix, {})
    Image.fromarray(stored).save(path, exif=exif, **options)  # type: ignore[arg-type]
    seen = np.asarray(read_rgb(path)).astype(int)
    expected = UPRIGHT[orientation](stored)
    assert seen.shape == expected.shape
    assert np.abs(seen - expected).max() <= (8 if suffix == "jpg" else 0)


OWN_YCBCR = pytest.mark.skipif(
    int(PIL.__version__.partition(".")[0]) < 12, reason="before version 12, Pillow cannot read the YCbCr that it writes"
)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "CMYK", pytest.param("YCbCr", marks=OWN_YCBCR)])
def test_every_mode_becomes_rgb(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "x.tif"
    Image.new("RGB", (3, 3), (255, 255, 255)).convert(mode).save(path)
    np.testing.assert_array_equal(np.asarray(read_rgb(path)), np.full((3, 3, 3), 255))


def test_grey_of_16_bits_is_rounded_to_8(tmp_path: Path) -> None:
    grey = np.array([[0, 128, 129, 257 * 100, 65_535]], dtype=np.uint16)
    for name, stored in (("x.png", grey), ("y.tif", grey), ("z.tif", grey.astype(">u2"))):
        Image.fromarray(stored).save(tmp_path / name)
        np.testing.assert_array_equal(np.asarray(read_rgb(tmp_path / name))[0, :, 1], (0, 0, 1, 100, 255))


def test_png_of_16_bits_that_an_older_pillow_reads_as_32_is_rounded_too() -> None:
    picture = Image.fromarray(np.array([[0, 65_535]], dtype=np.int32))
    picture.format = "PNG"
    assert np.asarray(to_rgb(picture)).max() == 255


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_numbers_of_an_unknown_range_are_refused(dtype: type, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((2, 2), dtype=dtype)).save(tmp_path / "x.tif")
    with pytest.raises(
        UserError, match=r"x\.tif cannot be read, .*mode [IF], whose range is not known; save it with 8"
    ):
        read_rgb(tmp_path / "x.tif")


@pytest.mark.parametrize(
    ("mode", "colour", "seen"),
    [
        ("RGBA", (255, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (255, 0, 0, 51), (255, 204, 204)),
        ("RGBA", (255, 0, 0, 255), (255, 0, 0)),
        ("LA", (0, 0), (255, 255, 255)),
        ("LA", (0, 102), (153, 153, 153)),
    ],
)
def test_what_is_transparent_is_laid_over_white(
    mode: str, colour: tuple[int, ...], seen: tuple[int, int, int], tmp_path: Path
) -> None:
    Image.new(mode, (2, 2), colour).save(tmp_path / "x.png")
    np.testing.assert_array_equal(np.asarray(read_rgb(tmp_path / "x.png"))[1, 1], seen)


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_a_transparent_colour_is_white_in_modes_without_an_alpha_channel(mode: str, tmp_path: Path) -> None:
    picture = Image.new(mode, (2, 1), 0)
    if mode == "P":
        picture.putpalette([10, 20, 30, 40, 50, 60])
    picture.putpixel((1, 0), (40, 50, 60) if mode == "RGB" else 1 if mode == "P" else 40)
    picture.save(tmp_path / "x.png", transparency=(0, 0, 0) if mode == "RGB" else 0)
    kept = (40, 40, 40) if mode == "L" else (40, 50, 60)
    np.testing.assert_array_equal(np.asarray(read_rgb(tmp_path / "x.png"))[0], [(255, 255, 255), kept])


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_with_transparent_colour(samples_HWC: np.ndarray, *, bits: int, colour: tuple[int, ...]) -> bytes:
    """Return a PNG of grey (C = 1) or RGB (C = 3) with one transparent colour. Pillow cannot write all of them."""
    height, width, num_channels = samples_HWC.shape
    bits_of_rows = (samples_HWC.reshape(height, -1, 1) >> np.arange(bits)[::-1]) & 1
    rows = np.packbits(bits_of_rows.reshape(height, -1).astype(np.uint8), axis=1)
    header = struct.pack(">IIBBBBB", width, height, bits, 2 if num_channels == 3 else 0, 0, 0, 0)
    parts = {
        b"IHDR": header,
        b"tRNS": struct.pack(f">{num_channels}H", *colour),
        b"IDAT": zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(name, data) for name, data in parts.items())


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_a_transparent_grey_is_white_at_every_number_of_bits(bits: int, tmp_path: Path) -> None:
    highest = 2**bits - 1
    levels = np.arange(highest + 1) if bits <= 8 else np.array([0, 232, 999, 1000, 1001, 5000, highest])
    for colour in levels.tolist() if bits <= 4 else [levels.tolist()[3]]:
        file = png_with_transparent_colour(levels[None, :, None], bits=bits, colour=(colour,))
        (tmp_path / "x.png").write_bytes(file)
        expected = np.where(levels == colour, 255, np.rint(levels * (255 / highest)))
        np.testing.assert_array_equal(np.asarray(read_rgb(tmp_path / "x.png"))[0], np.stack([expected] * 3, axis=1))
        (view,) = decode_crops(memoryview(file), [Crop(0, 0, 1, len(levels))], size=len(levels))
        np.testing.assert_array_equal(view[:, 0].numpy(), np.stack([expected] * 3))


def test_a_transparent_colour_of_16_bits_is_refused(tmp_path: Path) -> None:
    """Pillow would compare 8 of the bits, so that another colour could become white."""
    file = png_with_transparent_colour(np.array([[(1000, 2000, 3000)]]), bits=16, colour=(1000, 2000, 3000))
    (tmp_path / "x.png").write_bytes(file)
    with pytest.raises(UserError, match=r"x\.png .*one colour of its 16 bits is transparent; save it with an alpha"):
        read_rgb(tmp_path / "x.png")
    with pytest.raises(ValueError, match="one colour of its 16 bits is transparent"):
        decode_crops(memoryview(file), [Crop(0, 0, 1, 1)], size=1)


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"x\.png is not a regular file, so it is not read; remove it"):
        read_rgb(path)


def write_huge_png(path: Path, *, side: int) -> None:
    """Write the header of a picture of side x side pixels, and not its pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = png_chunk(b"IDAT", zlib.compress(bytes(1000)))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + pixels + png_chunk(b"IEND", b""))


@pytest.mark.parametrize("side", [10_000, 30_000])
def test_a_picture_that_unpacks_to_gigabytes_is_refused_before_it_is_decoded(side: int, tmp_path: Path) -> None:
    """Pillow only warns of the smaller one."""
    write_huge_png(tmp_path / "x.png", side=side)
    with (
        warnings.catch_warnings(record=True) as said,
        pytest.raises(UserError, match=r"x\.png cannot be read, because it has more than 89,478,485 pixels"),
    ):
        read_rgb(tmp_path / "x.png")
    assert said == []
