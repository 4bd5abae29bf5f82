"""Say what one file is by its content: a picture, a sound or something else, and whether all of it is there.

Reads the header and the end of a file. Decodes it if the caller asks for that, if it looks cut short, or if its format
has no mark at its end. A missing mark is no fault if everything decodes.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import IO, Final, Literal

import numpy as np

from data_pipeline.audio.sound_file import LEAST_SECONDS, SILENT, CutOffError, sound_facts
from data_pipeline.core.sample import Medium
from data_pipeline.sources.files import ending_of, medium_of
from data_pipeline.sources.picture_file import (
    JPEG_FORMATS,
    UnreadableError,
    decode_rgb,
    opened,
)
from data_pipeline.storage.locations import PICTURE_ENDINGS

Fault = Literal["empty", "not one", "damaged", "truncated", "unreadable"]
Finding = Literal["other name", "archive", "constant", "silent", "short"]

_HEAD, _TAIL = 4096, 1 << 16  # bytes by which a format is known, and in which an end mark is searched first
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
# The last bytes of a whole file. In the data of a JPEG no such bytes can stand.
_END_MARKS: Final = {"JPEG": b"\xff\xd9", "JPEG2000": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}


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
        fault: why it cannot be used: "empty", "not one" (of the medium that its name says), "damaged", "truncated", or
            "unreadable", which is whole.
        findings: what is odd about a file that can be used: its name says another format, it is an archive, one colour,
            silence, less than `LEAST_SECONDS`.
        reason: more about the fault, in words.
        is_decoded: whether its content was decoded. One colour and silence are found only then.
    """

    medium: Medium | None
    format: str = ""
    mode: str = ""
    size: tuple[int, int] | None = None
    rate: int | None = None
    channels: int | None = None
    seconds: float | None = None
    fault: Fault | None = None
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    is_decoded: bool = False


def examine(name: str, file: IO[bytes], *, full: bool) -> Examined:
    """Say what a file is. `file` must be able to seek. With `full`, its content is decoded, too."""
    head, named = file.read(_HEAD), medium_of(name)
    file.seek(0)
    other = next((words for words, pattern in _OTHERS.items() if pattern.match(head)), None)
    if not head and named is not None:
        return Examined(named, fault="empty")
    if other is not None and named is not None:
        return Examined(named, fault="not one", reason=f"it is {other}")
    if other is not None:
        return Examined(None, findings=("archive",) if other == _ARCHIVE else ())
    if named == "sound" or _SOUND.match(head):
        return _sound(file, full=full)
    if named is None and b"\0" not in head:  # text
        return Examined(None)
    examined = _picture(file, full=full)
    if named is None:
        return Examined(None) if examined.size is None else examined
    if examined.fault is None and examined.format != PICTURE_ENDINGS[ending_of(name)[1:]]:
        return replace(examined, findings=("other name", *examined.findings))
    return examined


def _picture(file: IO[bytes], *, full: bool) -> Examined:
    examined, values, is_whole = Examined("picture"), None, True
    try:
        with opened(file) as picture:
            kind, size = "JPEG" if picture.format in JPEG_FORMATS else picture.format or "", picture.size
            examined = Examined("picture", kind, picture.mode, size)
            start = file.tell()
            is_whole = _is_whole(kind, file)
            file.seek(start)
            if full or not is_whole or picture.mode in ("I", "F"):  # which may be refused
                picture.draft(None, _DRAFT)
                values = np.asarray(decode_rgb(picture))
    except ValueError as error:
        fault: Fault = "unreadable" if isinstance(error, UnreadableError) else "damaged" if is_whole else "truncated"
        return replace(examined, fault=fault, reason=str(error))
    if values is None:
        return examined
    findings: tuple[Finding, ...] = ("constant",) if (values == values[0, 0]).all() else ()
    return replace(examined, findings=findings, is_decoded=True)


def _is_whole(kind: str, file: IO[bytes]) -> bool:
    """Return whether the file ends as a whole one does; False if its format has no mark at its end."""
    if kind not in _END_MARKS:
        return False
    start = file.tell()  # behind the header, which may hold a thumbnail with an end mark of its own
    num_bytes = file.seek(0, os.SEEK_END)
    file.seek(max(start, num_bytes - _TAIL))
    if _END_MARKS[kind] in file.read():
        return True
    file.seek(start)
    return _END_MARKS[kind] in file.read()


def _sound(file: IO[bytes], *, full: bool) -> Examined:
    try:
        facts = sound_facts(file, full=full)
    except ValueError as error:
        fault: Fault = "truncated" if isinstance(error, CutOffError) else "damaged"
        return Examined("sound", fault=fault, reason=str(error))
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
