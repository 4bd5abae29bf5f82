"""One file is known by its content, and a part of it is told from the whole."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from data_pipeline.sources.examine import Examined, examine

PIXELS = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "a.jpg": ("RGB", {}),
    "progressive.jpeg": ("RGB", {"progressive": True}),
    "cmyk.jfif": ("CMYK", {"format": "JPEG"}),
    "a.png": ("RGBA", {}),
    "deep.png": ("I;16", {}),
    "a.gif": ("P", {}),
    "a.tiff": ("RGB", {}),
    "packed.tif": ("L", {"compression": "tiff_lzw"}),
    "a.webp": ("RGB", {}),
    "a.bmp": ("RGB", {}),
    "a.ppm": ("RGB", {}),
    "a.jp2": ("RGB", {}),
    "a.avif": ("RGB", {}),
}
SOUNDS = {
    "a.wav": "PCM_16",
    "24.wav": "PCM_24",
    "float.wav": "FLOAT",
    "a.flac": "PCM_16",
    "a.ogg": "VORBIS",
    "a.aiff": "PCM_16",
}


def picture(name: str) -> bytes:
    mode, options = PICTURES[name]
    file = io.BytesIO()
    deep = Image.fromarray(PIXELS[:, :, 0].astype(np.uint16) * 257)
    made = deep if mode == "I;16" else Image.fromarray(PIXELS).convert(mode)
    made.save(file, **{"format": Image.registered_extensions()[f".{name.rpartition('.')[2]}"], **options})
    return file.getvalue()


def sound(name: str, points: Any = None) -> bytes:
    file = io.BytesIO()
    points = np.random.default_rng(0).normal(scale=0.1, size=(16_000, 2)) if points is None else points
    kind = name.rpartition(".")[2].upper()
    soundfile.write(file, points, 16_000, format=kind, subtype=SOUNDS.get(name, "PCM_16"))
    return file.getvalue()


def examined(name: str, content: bytes, *, full: bool = False) -> Examined:
    return examine(name, io.BytesIO(content), full=full)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_pillow_says_and_its_part_is_damaged(name: str, full: bool) -> None:
    content = picture(name)
    with Image.open(io.BytesIO(content)) as theirs:
        due = ("picture", theirs.format, theirs.mode, theirs.size, False, ())
    found = examined(name, content, full=full)
    assert (found.medium, found.format, found.mode, found.size, found.is_bad, found.findings) == due
    assert found.is_decoded == full
    part = examined(name, content[: len(content) * 9 // 10], full=True)
    assert (part.medium, part.is_bad) == ("picture", True)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", SOUNDS)
def test_a_sound_is_what_soundfile_says_and_its_part_is_damaged(name: str, full: bool) -> None:
    content = sound(name)
    info = soundfile.info(io.BytesIO(content))
    found = examined(name, content, full=full)
    assert (found.medium, found.mode, found.rate, found.channels) == ("sound", info.subtype, 16_000, 2)
    assert found.seconds == pytest.approx(info.duration)
    assert (found.is_bad, found.findings) == (False, ())
    part = examined(name, content[: len(content) // 2], full=full)
    assert part.is_bad or name.endswith((".ogg", ".aiff"))  # of which what is there is read


@pytest.mark.parametrize(
    ("name", "content", "due"),
    [
        ("a.png", picture("a.jpg"), ("picture", "JPEG", False, ())),
        ("a.jpg", b"<!DOCTYPE html><p>404", ("picture", "", True, ())),
        ("a.jpg", b"version https://git-lfs.github.com/spec/v1\n", ("picture", "", True, ())),
        ("a.wav", picture("a.png"), ("sound", "", True, ())),
        ("a.flac", b"", ("sound", "", True, ())),
        ("no_ending", picture("a.gif"), ("picture", "GIF", False, ())),
        ("labels.csv", b"file,label\n", (None, "", False, ())),
        ("a.jpg", picture("a.jpg") + bytes(100_000), ("picture", "JPEG", False, ())),
        ("a.wav", sound("a.wav", np.zeros(1_000)), ("sound", "WAV", False, ("short", "silent"))),
    ],
)
def test_names_and_contents_that_do_not_fit(name: str, content: bytes, due: tuple[object, ...]) -> None:
    found = examined(name, content, full=True)
    assert (found.medium, found.format, found.is_bad, found.findings) == due


def test_one_colour_is_found() -> None:
    file = io.BytesIO()
    Image.new("RGB", (7, 90), "red").save(file, "PNG")
    assert examined("a.png", file.getvalue(), full=True).findings == ("constant",)
