"""Say what one file is by its content: a picture, a sound or something else, and whether it can be used.

Reads the header of a picture, and header and end of a sound. Decodes a file if the caller asks for that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import IO, Final, Literal

import numpy as np

from data_pipeline.audio.sound_file import LEAST_SECONDS, SILENT, sound_facts
from data_pipeline.core.sample import Medium
from data_pipeline.sources.files import medium_of
from data_pipeline.sources.picture_file import JPEG_FORMATS, decode_rgb, opened

Finding = Literal["archive", "constant", "silent", "short"]

_HEAD: Final = 4096  # bytes by which a format is known
_DRAFT: Final = (64, 64)  # pixels of a JPEG that is decoded only to see whether it can be
_SOUND: Final = re.compile(rb"(RIFF|RIFX|RF64).{4}WAVE|fLaC|OggS|ID3|FORM.{4}AIF|\xff[\xe2-\xfb]", re.DOTALL)
_ARCHIVE: Final = "an archive"
# Files that are neither a picture nor a sound, known by their first bytes.
_OTHERS: Final = {
    "a pointer of Git LFS, which `git lfs pull` replaces": re.compile(rb"version https://git-lfs"),
    "a web page": re.compile(rb"\s*<(!doctype html|html)", re.IGNORECASE),
    "a video": re.compile(rb".{4}ftyp(?!avi|hei|hev|mif|msf)|\x1aE\xdf\xa3", re.DOTALL),
    _ARCHIVE: re.compile(rb"PK\x03\x04|\x1f\x8b|.{257}ustar|7z\xbc\xaf|Rar!", re.DOTALL),
}


@dataclass(frozen=True, slots=True)
class Examined:
    """The facts of one file.

    Attributes:
        medium: by content; by name if the content is empty, damaged or something else; None if neither says one.
        format: of pictures Pillow's name, such as "JPEG"; of sounds libsndfile's, such as "WAV".
        mode: Pillow's mode of a picture, such as "RGB"; the coding of a sound, such as "PCM_16".
        size: width and height of a picture in pixels, as they are stored.
        rate: points a second of a sound.
        channels: of a sound.
        seconds: the length of a sound.
        is_bad: whether it cannot be used, for `reason`: it is damaged, not what its name says, or not read.
        findings: what is odd about a file that can be used: it is an archive, one colour, silence, or less than
            `LEAST_SECONDS`.
        reason: why it cannot be used, in words.
        is_decoded: whether its content was decoded. One colour and silence are found only then.
    """

    medium: Medium | None
    format: str = ""
    mode: str = ""
    size: tuple[int, int] | None = None
    rate: int | None = None
    channels: int | None = None
    seconds: float | None = None
    is_bad: bool = False
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    is_decoded: bool = False


def examine(name: str, file: IO[bytes], *, full: bool) -> Examined:
    """Say what a file is. `file` must be able to seek. With `full`, its content is decoded, too."""
    head, named = file.read(_HEAD), medium_of(name)
    file.seek(0)
    other = next((words for words, pattern in _OTHERS.items() if pattern.match(head)), None)
    if other is not None and named is not None:
        return Examined(named, is_bad=True, reason=f"it is {other}")
    if other is not None:
        return Examined(None, findings=("archive",) if other == _ARCHIVE else ())
    if named == "sound" or _SOUND.match(head):
        return _sound(file, full=full)
    if named is None and b"\0" not in head:  # text
        return Examined(None)
    examined = _picture(file, full=full)
    if named is None:
        return Examined(None) if examined.size is None else examined
    return examined


def _picture(file: IO[bytes], *, full: bool) -> Examined:
    examined = Examined("picture")
    try:
        with opened(file) as picture:
            kind = "JPEG" if picture.format in JPEG_FORMATS else picture.format or ""
            examined = Examined("picture", kind, picture.mode, picture.size)
            if not full and picture.mode not in ("I", "F"):  # which may be refused
                return examined
            picture.draft(None, _DRAFT)
            values = np.asarray(decode_rgb(picture))
    except ValueError as error:
        return replace(examined, is_bad=True, reason=str(error))
    findings: tuple[Finding, ...] = ("constant",) if (values == values[0, 0]).all() else ()
    return replace(examined, findings=findings, is_decoded=True)


def _sound(file: IO[bytes], *, full: bool) -> Examined:
    try:
        facts = sound_facts(file, full=full)
    except ValueError as error:
        return Examined("sound", is_bad=True, reason=str(error))
    findings: list[Finding] = ["short"] if facts.seconds < LEAST_SECONDS else []
    findings += ["silent"] if SILENT in facts.remarks else []
    return Examined(
        "sound",
        facts.format,
        facts.coding,
        rate=facts.sample_rate,
        channels=facts.num_channels,
        seconds=facts.seconds,
        findings=tuple(findings),
        is_decoded=full,
    )
