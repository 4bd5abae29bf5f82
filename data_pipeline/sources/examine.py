"""Say what one file is by its content: a picture, a sound or something else, and whether all of it is there.

Reads the header and the end of a file. Decodes it if the caller asks for that, if it looks cut short, or if its format
has no mark at its end. A missing mark is no fault if everything decodes.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import IO, Any, Final, Literal

import numpy as np
from PIL import ImageFile

from data_pipeline.audio.sound_file import LEAST_SECONDS, SILENT, CutOffError, sound_facts
from data_pipeline.core.sample import Medium
from data_pipeline.sources.files import ending_of
from data_pipeline.sources.picture_file import decode_rgb, opened
from data_pipeline.storage.locations import PICTURE_ENDINGS

Fault = Literal["empty", "not one", "damaged", "truncated"]
Finding = Literal["other name", "tiny", "constant", "silent", "short"]

MIN_PIXELS: Final = 8  # of the shorter side of a picture
_HEAD, _TAIL = 4096, 1 << 16  # bytes by which a format is known, and in which an end mark is searched first
_DRAFT: Final = (64, 64)  # pixels of a JPEG that is decoded only to see whether it can be
_UNKNOWN: Final = "of no known format"

# What a file is by the bytes at a position, and its medium. The first that fits counts.
_MAGIC: Final[tuple[tuple[int, bytes, str, Medium | None], ...]] = (
    (0, b"\xff\xd8\xff", "JPEG", "picture"),
    (0, b"\x89PNG\r\n\x1a\n", "PNG", "picture"),
    (0, b"GIF8", "GIF", "picture"),
    (0, b"II*\0", "TIFF", "picture"),
    (0, b"MM\0*", "TIFF", "picture"),
    (0, b"BM", "BMP", "picture"),
    (0, b"\0\0\0\x0cjP  ", "JPEG2000", "picture"),
    (0, b"\xff\x4f\xff\x51", "JPEG2000", "picture"),
    (8, b"WEBP", "WEBP", "picture"),
    (8, b"WAVE", "WAV", "sound"),
    (4, b"ftypavi", "AVIF", "picture"),
    (4, b"ftyphei", "HEIF", "picture"),
    (4, b"ftypmif1", "HEIF", "picture"),
    (4, b"ftyp", "a video", None),
    (0, b"fLaC", "FLAC", "sound"),
    (0, b"OggS", "OGG", "sound"),
    (0, b"ID3", "MP3", "sound"),
    (0, b"FORM", "AIFF", "sound"),
    (0, b"\x93NUMPY", "NPY", "picture"),
    (0, b"version https://git-lfs", "a pointer of Git LFS", None),
    (0, b"PK\x03\x04", "a zip", None),
    (0, b"PAR1", "Parquet", None),
    (0, b"\x1f\x8b", "gzip", None),
    (257, b"ustar", "a tar", None),
    (0, b"%PDF", "a PDF", None),
    (0, b"\x1aE\xdf\xa3", "a video", None),
    (0, b"SQLite format 3", "SQLite", None),
    (0, b"\x89HDF", "HDF5", None),
    (0, b"<!doctype html", "a web page", None),
    (0, b"<!DOCTYPE html", "a web page", None),
    (0, b"<html", "a web page", None),
)
# The format that the ending of a name says.
_ENDINGS: Final[dict[Medium, dict[str, str]]] = {
    "picture": {f".{ending}": form for ending, form in PICTURE_ENDINGS.items()},
    "sound": {
        **dict.fromkeys((".ogg", ".oga", ".opus"), "OGG"),
        **dict.fromkeys((".aif", ".aiff"), "AIFF"),
        **dict.fromkeys((".wav", ".wave"), "WAV"),
        ".flac": "FLAC",
        ".mp3": "MP3",
    },
}
# The last bytes of a whole file. In the data of a JPEG no such bytes can stand.
_END_MARKS: Final = {"JPEG": b"\xff\xd9", "JPEG2000": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
_TIFF_DATA: Final = ((273, 279), (324, 325))  # the tags of where strips or tiles lie, and of their sizes


@dataclass(frozen=True, slots=True)
class Examined:
    """What a file is.

    Attributes:
        medium: by content; by name if the content is empty, damaged or something else; None if neither says one.
        format: of pictures Pillow's name, such as "JPEG"; of sounds "WAV", "FLAC", "OGG", "MP3" or "AIFF"; of others
            words such as "a zip" or "text".
        mode: Pillow's mode of a picture, such as "RGB"; the coding of a sound, such as "PCM_16".
        size: width and height of a picture in pixels, as they are stored.
        rate: points a second of a sound.
        channels: of a sound.
        seconds: the length of a sound.
        fault: why it cannot be used: "empty", "not one" (of the medium that its name says), "damaged" or "truncated".
        findings: what is odd about a file that can be used: its name says another format, a side of less than
            `MIN_PIXELS`, one colour, silence, less than `LEAST_SECONDS`.
        reason: more about the fault, in words.
        is_decoded: whether its content was decoded. One colour and silence are found only then.
    """

    medium: Medium | None
    format: str
    mode: str = ""
    size: tuple[int, int] | None = None
    rate: int | None = None
    channels: int | None = None
    seconds: float | None = None
    fault: Fault | None = None
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    is_decoded: bool = False


def medium_of(name: str) -> Medium | None:
    """Return which medium the ending of a file's name says.

    Examples:
        >>> medium_of("a/IMG_1.JPG"), medium_of("a.flac"), medium_of("labels.csv")
        ('picture', 'sound', None)
    """
    ending = ending_of(name)
    return next((medium for medium, endings in _ENDINGS.items() if ending in endings), None)


def examine(name: str, file: IO[bytes], *, full: bool) -> Examined:
    """Say what a file is. `file` must be able to seek. With `full`, its content is decoded, too."""
    head, named = file.read(_HEAD), medium_of(name)
    num_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    found, medium = _format(head)
    if medium == "sound":
        examined = _sound(found, file, full=full)
    elif medium == "picture" or (named == "picture" and found == _UNKNOWN):  # Pillow knows more formats than `_MAGIC`
        examined = _picture(found, file, num_bytes, full=full)
    elif named is not None:
        fault: Fault = "not one" if head else "empty"
        return Examined(named, found, fault=fault, reason=f"it is {found}" if head else "it is empty")
    else:
        return Examined(None, found)
    if examined.fault is None and named is not None:
        due = _ENDINGS[named][ending_of(name)]
        if due != examined.format:
            return replace(examined, findings=("other name", *examined.findings))
    return examined


def _format(head: bytes) -> tuple[str, Medium | None]:
    """Return what a file is by its first bytes, and its medium."""
    for position, magic, found, medium in _MAGIC:
        if head[position : position + len(magic)] == magic:
            return found, medium
    if re.match(rb"P[1-7fF]\s", head):
        return "PPM", "picture"
    if re.match(rb"\xff[\xe0-\xff]", head):
        return "MP3", "sound"
    return (_UNKNOWN if b"\0" in head else "text"), None


def _picture(found: str, file: IO[bytes], num_bytes: int, *, full: bool) -> Examined:
    examined, is_whole = Examined("picture", found), True
    try:
        with opened(file) as picture:
            if isinstance(picture, np.ndarray):
                height, width, _ = picture.shape
                tiny: tuple[Finding, ...] = ("tiny",) if min(height, width) < MIN_PIXELS else ()
                return Examined("picture", "NPY", str(picture.dtype), (width, height), findings=tiny, is_decoded=True)
            kind = "JPEG" if picture.format in ("JPEG", "MPO") else picture.format or found
            findings: tuple[Finding, ...] = ("tiny",) if min(picture.size) < MIN_PIXELS else ()
            examined = Examined("picture", kind, picture.mode, picture.size, findings=findings)
            start = file.tell()
            is_whole = _is_whole(kind, picture, file, num_bytes)
            if full or not is_whole:
                file.seek(start)
                examined = replace(examined, is_decoded=True)
                picture.draft(None, _DRAFT)
                if decode_rgb(picture).getcolors(1) is not None:
                    examined = replace(examined, findings=(*findings, "constant"))
    except ValueError as error:
        if examined.size is None:
            is_whole = found == _UNKNOWN or _is_whole(found, None, file, num_bytes)
        fault: Fault = "truncated" if not is_whole else "not one" if found == _UNKNOWN else "damaged"
        return replace(examined, fault=fault, reason=str(error))
    return examined


def _is_whole(kind: str, picture: ImageFile.ImageFile | None, file: IO[bytes], num_bytes: int) -> bool:
    """Return whether the file ends as a whole one does; False if its format has no end by which that can be told.

    `picture` is the opened picture, None if it cannot be opened.
    """
    # Behind the header, which may hold a thumbnail with an end mark of its own.
    start = file.tell() if picture is not None else 0
    if kind in _END_MARKS:
        file.seek(max(start, num_bytes - _TAIL))
        if _END_MARKS[kind] in file.read():
            return True
        file.seek(start)
        return _END_MARKS[kind] in file.read()
    if kind == "GIF":
        file.seek(max(0, num_bytes - _TAIL))
        return file.read().rstrip(b"\0").endswith(b";")
    if kind == "TIFF":
        tags: Mapping[int, Any] = getattr(picture, "tag_v2", {})
        pairs = [(tags[at], tags[size]) for at, size in _TIFF_DATA if at in tags and size in tags]
        return bool(pairs) and all(
            at + size <= num_bytes for offsets, sizes in pairs for at, size in zip(offsets, sizes, strict=False)
        )
    if kind == "WEBP":
        file.seek(4)
        return int.from_bytes(file.read(4), "little") + 8 <= num_bytes
    return kind in ("AVIF", "HEIF") and _boxes_are_whole(file, num_bytes)


def _boxes_are_whole(file: IO[bytes], num_bytes: int) -> bool:
    """Return whether the boxes of an AVIF or HEIF end in the file."""
    position = 0
    while position + 8 <= num_bytes:
        file.seek(position)
        size, _, large = struct.unpack(">I4sQ", file.read(16).ljust(16, b"\0"))
        if size == 0:  # to the end of the file
            return True
        position += large if size == 1 else max(size, 8)
    return position == num_bytes


def _sound(found: str, file: IO[bytes], *, full: bool) -> Examined:
    try:
        facts = sound_facts(file, full=full)
    except ValueError as error:
        fault: Fault = "truncated" if isinstance(error, CutOffError) else "damaged"
        return Examined("sound", found, fault=fault, reason=str(error))
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
