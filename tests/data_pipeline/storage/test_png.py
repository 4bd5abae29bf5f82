from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data_pipeline.storage.png import decode_pngs, encode_png


def picture(height: int, width: int, num_channels: int, seed: int) -> np.ndarray:
    shape = (height, width) if num_channels == 1 else (height, width, num_channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def by_pillow(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def decode(files: Sequence[bytes], shape: tuple[int, int, int]) -> tuple[np.ndarray, dict[int, str]]:
    pictures_BCHW, errors = decode_pngs([memoryview(bytearray(file)) for file in files], shape)
    return pictures_BCHW.permute(0, 2, 3, 1).numpy(), errors


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    num_channels=st.sampled_from([1, 3]),
    seed=st.integers(0, 9),
    num=st.integers(0, 6),
)
def test_pictures_come_back(height: int, width: int, num_channels: int, seed: int, num: int) -> None:
    pictures = [picture(height, width, num_channels, seed + place) for place in range(num)]
    decoded, errors = decode(list(map(encode_png, pictures)), (num_channels, height, width))
    assert errors == {}
    assert decoded.shape == (num, height, width, num_channels)
    for found, pixels in zip(decoded, pictures, strict=True):
        np.testing.assert_array_equal(found.reshape(pixels.shape), pixels)


@pytest.mark.parametrize("num_channels", [1, 3])
def test_pillow_reads_our_files(num_channels: int) -> None:
    pixels = picture(17, 9, num_channels, seed=0)
    with Image.open(io.BytesIO(encode_png(pixels))) as image:
        image.load()  # also checks the sums of all chunks
        assert image.mode == {1: "L", 3: "RGB"}[num_channels]
        np.testing.assert_array_equal(np.asarray(image), pixels)
    assert encode_png(pixels) == encode_png(np.asfortranarray(pixels))


@pytest.mark.parametrize("first", [True, False])
def test_a_file_that_is_damaged_anywhere_never_gives_other_points(first: bool) -> None:
    """A flipped byte is told or changes nothing; the other pictures of the batch are untouched."""
    pictures = [picture(8, 8, 3, seed) for seed in range(3)]
    files = [encode_png(pixels) for pixels in pictures]
    place = 0 if first else 1
    num_told = 0
    for position in range(len(files[place])):
        damaged = bytearray(files[place])
        damaged[position] ^= 0x10
        decoded, errors = decode([*files[:place], bytes(damaged), *files[place + 1 :]], (3, 8, 8))
        assert set(errors) <= {place}
        num_told += len(errors)
        for number, pixels in enumerate(pictures):
            np.testing.assert_array_equal(decoded[number], 0 * pixels if number in errors else pixels)
    assert num_told > 0.8 * len(files[place])  # not told: the check sums of chunks, the end


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"\x89PNG\r\n\x1a\n" + bytes(40),
        encode_png(picture(8, 8, 3, 0))[:-40],
        encode_png(picture(8, 7, 3, 0)),
        encode_png(picture(8, 8, 1, 0)),
        by_pillow(picture(8, 8, 3, 0)),
    ],
)
def test_what_does_not_decode_is_told(file: bytes) -> None:
    good = picture(8, 8, 3, 1)
    for files, place in (([file, encode_png(good)], 0), ([encode_png(good), file], 1)):
        decoded, errors = decode(files, (3, 8, 8))
        assert list(errors) == [place]
        assert "not a whole PNG of a build with 3 channels of 8x8 pixels" in errors[place]
        assert not decoded[place].any()
        np.testing.assert_array_equal(decoded[1 - place], good)
