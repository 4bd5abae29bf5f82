"""Crops of decoded files against Pillow's full decode and a resize in float64."""

from __future__ import annotations

import contextlib
import io
import random
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageFile
from sklearn.datasets import load_sample_image
from torch import Tensor
from torchvision.transforms import v2

from data_pipeline.core.random_crop import Crop
from data_pipeline.loading import picture_decode
from data_pipeline.loading.picture_decode import decode_crops, decode_square, picture_size
from data_pipeline.sources.picture_file import read_pixels
from tests.pillow_pixels import pillow_pixels

# A resize in uint8 rounds the sums of the rows and of the columns, each by half a level and by the precision of its
# weights.
ROUNDING = 2
TURNS = range(1, 9)


@cache
def whole_photo(name: str) -> Image.Image:
    return Image.fromarray(load_sample_image(name))


@cache
def photo(height: int, width: int, name: str = "china.jpg") -> Image.Image:
    """Return a real picture, stretched."""
    return whole_photo(name).resize((width, height), Image.Resampling.LANCZOS)


def encode(picture: Image.Image, kind: str = "JPEG", **options: Any) -> memoryview:
    file = io.BytesIO()
    if kind == "JPEG":
        options = {"quality": 90, **options}
    picture.save(file, kind, **options)
    return memoryview(file.getvalue())


def exif(orientation: int) -> Image.Exif:
    written = Image.Exif()
    written[0x0112] = orientation
    return written


@lru_cache(maxsize=1)
def upright(file: memoryview) -> NDArray[np.float64]:
    """Return all pixels as Pillow decodes them, (H, W, 3)."""
    return pillow_pixels(file).astype(np.float64)


def triangle_weights(num_in: int, num_out: int) -> NDArray[np.float64]:
    """Return the (num_out, num_in) weights of an antialiased bilinear resize along one axis."""
    ratio = num_in / num_out
    reach = max(ratio, 1.0)
    centre_Q = (np.arange(num_out) + 0.5) * ratio
    distance_QP = np.abs(np.arange(num_in) + 0.5 - centre_Q[:, None])
    weight_QP = np.maximum(0, 1 - distance_QP / reach)
    weight_QP /= weight_QP.sum(axis=1, keepdims=True)
    return weight_QP


def reference(file: memoryview, crop: Crop, size: int) -> NDArray[np.float64]:
    """Return the crop of the whole decoded picture, resized in float64: (3, size, size)."""
    region_HWC = upright(file)[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    rows, columns = triangle_weights(crop.height, size), triangle_weights(crop.width, size)
    resized: NDArray[np.float64] = np.einsum("yh,xw,hwc->cyx", rows, columns, region_HWC, optimize=True)
    return resized


def difference(ours: Tensor, expected: NDArray[np.float64]) -> NDArray[np.float64]:
    assert ours.shape == expected.shape
    assert ours.dtype == torch.uint8
    return np.abs(ours.numpy() - expected)


@st.composite
def crops(draw: st.DrawFn, height: int, width: int) -> Crop:
    crop_height, crop_width = draw(st.integers(1, height)), draw(st.integers(1, width))
    top, left = draw(st.integers(0, height - crop_height)), draw(st.integers(0, width - crop_width))
    return Crop(top, left, crop_height, crop_width)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    height=st.integers(1, 150),
    width=st.integers(1, 150),
    kind=st.sampled_from(["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"]),
    mode=st.sampled_from(["RGB", "L"]),
    size=st.integers(1, 60),
)
def test_crops_of_any_size_equal_the_reference(
    data: st.DataObject, height: int, width: int, kind: str, mode: str, size: int
) -> None:
    file = encode(photo(height, width).convert(mode), kind)
    assert picture_size(file) == (height, width)
    boxes = data.draw(st.lists(crops(height, width), min_size=1, max_size=3))
    views = decode_crops(file, boxes, size=size)
    assert views.shape == (len(boxes), 3, size, size)
    is_scaled = kind == "JPEG" and all(min(box.height, box.width) >= 2 * size for box in boxes)
    if not is_scaled:
        for box, view in zip(boxes, views, strict=True):
            assert difference(view, reference(file, box, size)).max() <= ROUNDING


@pytest.mark.parametrize(("turn", "kind"), [*((turn, "JPEG") for turn in TURNS), (3, "PNG"), (6, "WEBP"), (8, "TIFF")])
def test_crops_are_of_the_upright_picture(turn: int, kind: str) -> None:
    file = encode(photo(60, 90), kind, exif=exif(turn))
    height, width = upright(file).shape[:2]
    assert picture_size(file) == (height, width) == ((60, 90) if turn < 5 else (90, 60))
    for box in (Crop(0, 0, height, width), Crop(7, 3, 31, 40), Crop(height - 20, width - 25, 20, 25)):
        (view,) = decode_crops(file, [box], size=31)
        assert difference(view, reference(file, box, 31)).max() <= ROUNDING
    assert decode_crops(file, [box, box], size=31).is_contiguous(memory_format=torch.channels_last)


def of_other_filters(file: memoryview, crop: Crop, size: int) -> float:
    """Return how far the results of Pillow's other antialiasing filters are from the reference, at most."""
    top, left, height, width = crop
    picture = Image.fromarray(upright(file).astype(np.uint8))
    expected = reference(file, crop, size)
    distances = []
    for other in (Image.Resampling.BOX, Image.Resampling.LANCZOS):
        resized = picture.resize((size, size), other, box=(left, top, left + width, top + height))
        distances.append(np.abs(np.asarray(resized).transpose(2, 0, 1) - expected).mean())
    return float(max(distances))


@pytest.mark.parametrize(
    ("name", "subsampling", "shape"), [("china.jpg", 0, (427, 640)), ("flower.jpg", 2, (1000, 1300))]
)
@settings(max_examples=6, deadline=None)
@given(data=st.data(), size=st.integers(16, 130))
def test_a_scaled_decode_is_as_near_as_other_filters(
    data: st.DataObject, size: int, shape: tuple[int, int], subsampling: int, name: str
) -> None:
    """libjpeg's scaling is a box filter, so a crop cannot be nearer to the reference than that at the exact scale.

    The reference sees the crop with its edges moved to whole pixels of the scaled picture.
    """
    file = photo_file(*shape, name, subsampling)
    height, width = picture_size(file)
    boxes = data.draw(st.lists(crops(height, width), min_size=1, max_size=3))
    shortest = min(min(box.height, box.width) for box in boxes)
    step = max(step for step in (1, 2, 4, 8) if step == 1 or shortest >= step * size)
    for box, view in zip(boxes, decode_crops(file, boxes, size=size), strict=True):
        moved = moved_to_whole_pixels(box, step, height, width)
        assert difference(view, reference(file, moved, size)).mean() <= 1.25 * of_other_filters(file, moved, size) + 0.5


@cache
def photo_file(height: int, width: int, name: str, subsampling: int) -> memoryview:
    return encode(photo(height, width, name), subsampling=subsampling)


def moved_to_whole_pixels(box: Crop, step: int, height: int, width: int) -> Crop:
    """Return the box with its edges at multiples of `step`."""

    def moved(edge: int) -> int:
        return int(edge / step + 0.5) * step

    top, bottom = moved(box.top), min(height, moved(box.top + box.height))
    left, right = moved(box.left), min(width, moved(box.left + box.width))
    assert max(abs(top - box.top), abs(left - box.left)) <= step / 2
    return Crop(top, left, bottom - top, right - left)


def test_one_decode_at_the_smallest_scale_serves_all_crops(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def recorded(*args: Any, **kwargs: Any) -> NDArray[np.uint8]:
        pixels = simplejpeg.decode_jpeg(*args, **kwargs)
        shapes.append(pixels.shape)
        return pixels  # type: ignore[no-any-return]

    monkeypatch.setattr(picture_decode, "simplejpeg", type("Recorded", (), {"decode_jpeg": staticmethod(recorded)}))
    file = encode(photo(805, 1003))
    whole = Crop(0, 0, 805, 1003)
    for others, size, expected in (
        ([], 100, (101, 126, 3)),
        ([], 101, (202, 251, 3)),
        ([Crop(5, 5, 400, 400)], 100, (202, 251, 3)),
        ([Crop(5, 5, 399, 400)], 100, (403, 502, 3)),
        ([Crop(5, 5, 400, 199)], 100, (805, 1003, 3)),
        ([Crop(5, 5, 50, 50)], 100, (805, 1003, 3)),
    ):
        shapes.clear()
        decode_crops(file, [whole, *others, whole], size=size)
        assert shapes == [expected]


def squares(file: memoryview, size: int) -> tuple[Tensor, NDArray[np.float64]]:
    """The middle square of a file, and the one that torchvision shows of the whole decoded picture."""
    peer = v2.Compose([v2.Resize(size), v2.CenterCrop(size)])
    expected = np.asarray(peer(Image.fromarray(upright(file).astype(np.uint8)))).transpose(2, 0, 1)
    return decode_square(file, size=size), expected.astype(np.float64)


@settings(max_examples=40, deadline=None)
@given(height=st.integers(1, 200), width=st.integers(1, 200), size=st.integers(1, 60), turn=st.sampled_from(TURNS))
def test_a_square_of_any_size_is_that_of_torchvision(height: int, width: int, size: int, turn: int) -> None:
    file = encode(photo(height, width), "PNG", exif=exif(turn))
    assert difference(*squares(file, size)).max() <= ROUNDING


@pytest.mark.parametrize(("height", "width", "size"), [(150, 200, 64), (201, 333, 64)])
def test_a_square_is_at_its_place_at_a_smaller_scale_too(height: int, width: int, size: int) -> None:
    """A square that is moved by one pixel of the picture differs from its place by three to eight levels on average."""
    assert difference(*squares(encode(photo(height, width)), size)).mean() < 2.5


def test_a_picture_whose_square_would_not_fit_into_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="too long for its shorter side"):
        decode_square(encode(Image.new("RGB", (60_000, 1)), "PNG"), size=64)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"restart_marker_rows": 1}, {"quality": 20}, {"keep_rgb": True}]
)
def test_every_kind_of_jpeg_becomes_rgb_as_in_a_build(mode: str, options: dict[str, Any]) -> None:
    file, box = encode(photo(40, 50).convert(mode), **options), Crop(3, 5, 30, 32)
    (view,) = decode_crops(file, [box], size=20)
    assert difference(view, reference(file, box, 20)).max() <= ROUNDING


def test_a_jpeg_with_wrong_bytes_between_its_parts_is_a_picture() -> None:
    """simplejpeg and torchvision's strict readers refuse some pictures of ImageNet for this."""
    file = bytes(encode(photo(90, 120)))
    start = file.index(b"\xff\xdb")
    dirty = memoryview(file[:start] + b"\x00\x17" + file[start:])
    with pytest.raises(ValueError):
        simplejpeg.decode_jpeg(dirty)
    assert torch.equal(decode_square(dirty, size=50), decode_square(memoryview(file), size=50))


@pytest.mark.parametrize("options", [{}, {"restart_marker_rows": 1}, {"progressive": True}])
def test_a_jpeg_without_its_end_is_refused(options: dict[str, Any]) -> None:
    file = bytes(encode(photo(60, 90), **options))
    assert file[-2:] == b"\xff\xd9"
    for num_lost in (1, 2, 3, 20, 200):
        for read in (read_pixels, lambda cut: decode_square(memoryview(cut), size=31)):
            with pytest.raises(ValueError, match=r"it does not decode .*truncated"):
                read(file[:-num_lost])


@pytest.mark.parametrize("content", [b"", b"\xff", b"\xff\xd8", b"\xff\xd8\xff", b"hello", bytes(1000), b"<svg></svg>"])
def test_what_is_not_a_picture_is_refused(content: bytes) -> None:
    for read in (picture_size, lambda file: decode_square(file, size=8)):
        with pytest.raises(ValueError, match="it is not a picture of a known format") as caught:
            read(memoryview(content))
        assert "0x" not in str(caught.value)  # the reason is the same in every process


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_too_many_pixels_are_refused_by_the_header(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = encode(photo(50, 30), kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 700)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("decodes pixels"))
    for read in (picture_size, lambda file: decode_square(file, size=8)):
        with pytest.raises(ValueError, match="it has more than 1,400 pixels"):
            read(file)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "TIFF"]), seed=st.integers(0, 2**32))
def test_damaged_files_raise_nothing_but_value_errors(data: st.DataObject, kind: str, seed: int) -> None:
    options: dict[str, Any] = {} if kind == "GIF" else {"exif": exif(6)}
    file = bytearray(encode(photo(30, 40), kind, **options))
    random_bytes = random.Random(seed)
    for _ in range(data.draw(st.integers(1, 8))):
        at = random_bytes.randrange(min(len(file), data.draw(st.sampled_from([40, 300, 100_000]))))
        file[at] = random_bytes.randrange(256)
    with contextlib.suppress(ValueError):
        assert decode_square(memoryview(file), size=8).shape == (3, 8, 8)
