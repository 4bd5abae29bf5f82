from __future__ import annotations

import io
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageFile
from sklearn.datasets import load_sample_image
from torchvision.transforms import v2

from data_pipeline.core.random_crop import Crop
from data_pipeline.loading.picture_decode import decode_crops
from data_pipeline.sources.picture_file import FORMATS, read_pixels
from tests.old_versions import needs_ycbcr
from tests.pillow_pixels import pillow_pixels

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
    ("orientation", "suffix"),
    [(each, kind) for each in UPRIGHT for kind in ("png", "avif")] + [(6, "tiff"), (6, "webp"), (6, "jpg")],
)
def test_a_picture_stands_upright_as_its_camera_noted(orientation: int, suffix: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.kron(CORNERS, np.ones((16, 16, 1), dtype=np.uint8))
    path = tmp_path / f"x.{suffix}"
    options = {"webp": {"lossless": True}}.get(suffix, {"quality": 100, "subsampling": "4:4:4"})
    Image.fromarray(stored).save(path, exif=exif, **options)
    seen = read_pixels(path.read_bytes()).astype(int)
    expected = UPRIGHT[orientation](stored)
    assert seen.shape == expected.shape
    assert np.abs(seen - expected).max() <= (8 if suffix in ("jpg", "avif") else 0)


PHOTO = Image.fromarray(load_sample_image("china.jpg")).resize((50, 40), Image.Resampling.LANCZOS)
LEVELS = np.linspace(0, 65_535, 2_000).astype(np.uint16).reshape(40, 50)


def in_mode(mode: str) -> Image.Image:
    """Return a picture of a mode of Pillow, of which half is transparent if the mode, or a colour, can be."""
    name, _, has_colour = mode.partition("+")
    if name == "I;16":
        return Image.fromarray(LEVELS)
    picture = PHOTO.convert(name)
    if name in ("LA", "RGBA"):
        picture.putalpha(PHOTO.convert("L").rotate(180))
    if has_colour:
        picture.info["transparency"] = picture.getpixel((3, 3))
    return picture


def encoded(picture: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


MODES_OF = {
    "JPEG": ["L", "RGB", "CMYK"],
    "PNG": ["1", "L", "L+", "LA", "P", "P+", "RGB", "RGB+", "RGBA", "I;16"],
    "WEBP": ["L", "RGB", "RGBA"],
    "GIF": ["1", "L", "P", "P+", "RGBA"],
    "TIFF": ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"],
    "BMP": ["1", "L", "P", "RGB", "RGBA"],
    "PPM": ["1", "L", "RGB", "I;16"],
    "JPEG2000": ["L", "LA", "RGB", "RGBA", "CMYK", "I;16"],
    "AVIF": ["L", "RGB", "RGBA"],
    "ICO": ["L", "RGBA"],
    "QOI": ["RGB", "RGBA"],
    "DDS": ["L", "RGB", "RGBA"],
    "TGA": ["L", "P", "RGB", "RGBA"],
}


def test_every_format_is_tried() -> None:
    assert tuple(MODES_OF) == FORMATS


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        pytest.param(form, mode, marks=needs_ycbcr if mode == "YCbCr" else ())
        for form, modes in MODES_OF.items()
        for mode in modes
    ],
)
def test_pixels_are_those_of_pillow_in_every_format_and_mode(form: str, mode: str) -> None:
    file = encoded(in_mode(mode), form, **({"sizes": [PHOTO.size]} if form == "ICO" else {}))
    expected = pillow_pixels(file)
    np.testing.assert_array_equal(read_pixels(file), expected)
    (crop,) = decode_crops(memoryview(file), [Crop(0, 0, 32, 32)], size=32)
    if form != "JPEG":  # simplejpeg has another libjpeg
        np.testing.assert_array_equal(crop.permute(1, 2, 0), expected[:32, :32])


@pytest.mark.parametrize("form", ["GIF", "WEBP", "TIFF", "AVIF", "MPO", "PNG"])
def test_the_first_of_several_pictures_is_read(form: str) -> None:
    others = [PHOTO.rotate(180), PHOTO.rotate(90)]
    file = encoded(PHOTO, form, save_all=True, append_images=others)
    np.testing.assert_array_equal(read_pixels(file), pillow_pixels(file))
    assert np.abs(read_pixels(file).astype(int) - np.asarray(PHOTO)).mean() < 12


def test_a_heic_picture_is_read_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    pillow_heif.from_pillow(PHOTO).save(file, quality=95)
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "pillow_heif", None)
        with pytest.raises(ValueError, match=r"a HEIC needs the package pillow-heif; .*'.\[heif\]'"):
            read_pixels(file.getvalue())
    pixels = read_pixels(file.getvalue())
    np.testing.assert_array_equal(pixels, np.asarray(pillow_heif.read_heif(file)))
    (crop,) = decode_crops(memoryview(file.getvalue()), [Crop(0, 0, 32, 32)], size=32)
    np.testing.assert_array_equal(crop.permute(1, 2, 0), pixels[:32, :32])


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize(
    ("size", "image_size", "scale"), [((1600, 1200), 32, 8), ((1600, 1200), 224, 2), ((999, 777), 32, 1)]
)
def test_a_large_jpeg_is_decoded_small_with_the_same_middle_square(
    size: tuple[int, int], image_size: int, scale: int, orientation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = encoded(PHOTO.resize(size, Image.Resampling.LANCZOS), "JPEG", quality=95, exif=exif)
    peer = v2.Compose([v2.Resize(image_size), v2.CenterCrop(image_size)])
    expected = np.asarray(peer(Image.fromarray(pillow_pixels(file)))).astype(int)
    decoded, load = [], ImageFile.ImageFile.load

    def recorded(picture: ImageFile.ImageFile) -> Any:
        decoded.append(picture.size)
        return load(picture)

    monkeypatch.setattr(ImageFile.ImageFile, "load", recorded)
    difference = np.abs(read_pixels(file, image_size=image_size) - expected)
    assert decoded[0] == (size[0] // scale, size[1] // scale)
    assert difference.max() <= 3 * (scale > 1)
    assert difference.mean() < 0.5


def of_12_bits(values_HW: np.ndarray) -> bytes:
    """Return a TIFF of two pixels in three bytes, whose header says that they have 12 bits."""
    pairs = values_HW.reshape(-1, 2).astype(int)
    packed = np.stack([pairs[:, 0] >> 4, (pairs[:, 0] & 15) << 4 | pairs[:, 1] >> 8, pairs[:, 1] & 255], axis=1)
    data = packed.astype(np.uint8).tobytes()
    (height, width), start = values_HW.shape, 8 + 2 + 8 * 12 + 4
    tags = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 273: start, 278: height, 279: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


def test_grey_of_twelve_bits_becomes_eight() -> None:
    """Those files name their range; others of 16 bits are scaled from all 16 (see `MODES_OF`)."""
    twelve = LEVELS >> 4
    pixels = read_pixels(of_12_bits(twelve))
    np.testing.assert_array_equal(pixels[..., 0], np.rint(twelve * (255 / 4_095)))


@pytest.mark.parametrize(("dtype", "form"), [(np.int32, "TIFF"), (np.float32, "TIFF"), (np.float32, "PPM")])
def test_numbers_of_an_unknown_range_are_refused(dtype: type, form: str) -> None:
    with pytest.raises(ValueError, match=r"its values of mode [IF] have an unknown range; save it in 8 bits"):
        read_pixels(encoded(Image.fromarray(LEVELS.astype(dtype)), form))


def test_a_tiff_of_more_channels_than_pillow_reads_is_refused() -> None:
    picture = Image.merge("RGBA", [*PHOTO.split(), PHOTO.convert("L")])
    alpha, other = (struct.pack("<HHIHH", 338, 3, 1, kind, 0) for kind in (2, 0))
    file = encoded(picture, "TIFF")
    assert alpha in file
    with pytest.raises(ValueError, match=r"Pillow reads 3 of its 4 channels; save those you need"):
        read_pixels(file.replace(alpha, other))


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
    np.testing.assert_array_equal(read_pixels((tmp_path / "x.png").read_bytes())[1, 1], seen)
