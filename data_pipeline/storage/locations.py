"""Find datasets and tars: what a location names, and where its index lies."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from braceexpand import braceexpand

from data_pipeline.core.errors import UserError, without_secrets

MANIFEST_NAME: Final = "manifest.json"
INDEX_NAME: Final = ".tar_index"  # the directory of an index of somebody else's tars, beside them
TARS_NAME: Final = "tars.txt"  # of an index: the path or URL of each tar, a line each
# The endings of picture files without a dot.
PICTURE_ENDINGS: Final = (
    *("jpg", "jpeg", "jpe", "jfif", "mpo", "png", "webp", "bmp", "gif", "avif", "ico", "qoi", "dds", "tga"),
    *("tif", "tiff", "ppm", "pgm", "pbm", "pnm", "pfm", "jp2", "j2k", "jpx", "heic", "heif"),
)
SOUND_ENDINGS: Final = frozenset({"aif", "aiff", "flac", "mp3", "oga", "ogg", "opus", "wav", "wave"})
PICTURE_FIELDS: Final = (*PICTURE_ENDINGS, "image.png", "image.jpg")  # of members of tars
_MAX_WORDS: Final = 100  # letters of a location's name in that of its index


def dataset_directory(location: str | Path) -> Path:
    """Return the directory that holds the manifest of a local dataset.

    That is `location` itself, or the index of the tars that `location` names (see `index_directory`) if there is one.
    """
    path = Path(location).expanduser()
    if not (path / MANIFEST_NAME).is_file() and ((index := index_directory(path)) / MANIFEST_NAME).is_file():
        return index
    return path


def index_directory(location: str | Path) -> Path:
    """Return the directory of the index of a location of tars, unless another is named: beside the tars.

    Unless the location is a directory, the name of its index ends in a hash of the location's name.
    """
    path = Path(location).expanduser().absolute()
    if path.is_dir():
        return path / INDEX_NAME
    words = re.sub(r"[^A-Za-z0-9]+", "-", path.name).strip("-")
    digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]
    return path.parent / f"{INDEX_NAME}-{words[:_MAX_WORDS]}-{digest}"


def absolute(location: str) -> str:
    """Return a local location as an absolute path, and a remote one as it is."""
    return location if is_remote(location) else str(Path(location).expanduser().absolute())


def refuse_secrets(location: str | Path) -> None:
    """Raise `UserError` if a remote location holds a password or a query, because logs, configs and reports show it."""
    if is_remote(location) and (shown := without_secrets(str(location))) != location:
        raise UserError(
            f"{shown} holds a password or a query, which logs and reports would show; leave it out, and put "
            "credentials where docs/data.md (Remote data) says"
        )


def names_tars(location: str | Path) -> bool:
    """Return whether a location seems to name tars and no dataset: by their ending, or a directory that holds some."""
    path = Path(location).expanduser()
    if path.is_dir():
        return not (path / MANIFEST_NAME).exists() and any(tars_in(path))
    return is_tars(path.name)


def is_remote(location: str | Path) -> bool:
    """Return whether `location` is remote; a `Path` is always a local directory.

    Examples:
        >>> is_remote("https://host/cifar"), is_remote("s3://bucket/cifar"), is_remote("data/cifar")
        (True, True, False)
    """
    return isinstance(location, str) and re.match(r"[a-z][a-z0-9+.-]*://", location) is not None


def listed_tars(location: str) -> list[str]:
    """Return the paths or URLs of the tars that a location names, in the order in which they are read.

    A location is a directory, a tar, or a pattern with braces such as `train-{000000..001281}.tar`; a tar or a pattern
    may be remote. No tar is opened. Raises `UserError` if it names none, one twice, or one that does not exist, or like
    `refuse_secrets`.
    """
    refuse_secrets(location)
    if is_remote(location):
        names = files = list(braceexpand(location))
        if location.endswith("/"):
            raise UserError(
                f"{location} is a directory, which is not listed if it is remote; name its tars, as in "
                f"{location}train-{{0000..0099}}.tar"
            )
    else:
        path = Path(location).expanduser().absolute()
        if path.is_dir():
            names = sorted(map(str, tars_in(path)))
        else:  # a file is not a pattern, even if a folder has braces in its name
            names = [str(path)] if path.is_file() else list(braceexpand(str(path)))
        files = [str(Path(name).resolve()) for name in names]
    if not names:
        raise UserError(f"{location} holds no file that ends in .tar; name a directory that does, or a pattern")
    for file, num in Counter(files).items():
        if num > 1:
            raise UserError(f"{location} names {file} {num} times; name each tar once")
    for name in names:
        if not is_remote(name) and not Path(name).is_file():
            raise UserError(f"{name}, which {location} names, does not exist; mend the location")
    return names


def is_tars(name: str) -> bool:
    """Return whether a file name is that of a tar, or a pattern of tars.

    Examples:
        >>> is_tars("train-{0000..0009}.tar"), is_tars("X.TAR"), is_tars("photos"), is_tars(".tar_index")
        (True, True, False, False)
    """
    return ".tar" in Path(name.lower()).suffixes


def tars_in(directory: Path) -> Iterator[Path]:
    """Yield the paths in a directory that end in .tar, in capitals or not. Skips hidden files.

    macOS lays a hidden `._x.tar` beside each `x.tar` that it copies to another file system.
    """
    return (path for path in directory.iterdir() if path.suffix.lower() == ".tar" and not path.name.startswith("."))
