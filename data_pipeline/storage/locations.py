"""Find datasets and tars: what a location names, and where its index lies."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from braceexpand import braceexpand

from data_pipeline.core.environment import with_home
from data_pipeline.core.errors import UserError

MANIFEST_NAME: Final = "manifest.json"
INDEX_NAME: Final = ".tar_index"  # the directory of an index of somebody else's tars, beside them
PARTS_NAME: Final = ".parts"  # in a directory that is not finished: a file for each finished tar
TARS_NAME: Final = "tars.txt"  # of an index: the path or URL of each tar, a line each
PICTURE_FIELDS: Final = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "image.png", "image.jpg")
_LISTS: Final = (".txt", ".list")  # endings of a file that names tars
_MAX_WORDS: Final = 100  # letters of a location's name in that of its index
_ENDINGS: Final = frozenset({".tar", ".tgz", ".tbz2", ".txz"})
_COMPRESSED: Final = re.compile(r"(.+)(\.tar\.(gz|bz2|xz|zst)|\.tgz|\.tbz2|\.txz)", flags=re.IGNORECASE)
_COMPRESSIONS: Final = {  # patterns of the first bytes
    rb"\x1f\x8b": ("gzip", "gunzip"),
    rb"BZh[1-9]1AY&SY": ("bzip2", "bunzip2"),
    rb"\xfd7zXZ\x00": ("xz", "unxz"),
    rb"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}
HEAD_BYTES: Final = 16  # that show how a file is compressed


def dataset_directory(location: str | Path) -> Path:
    """Return the directory that holds the manifest of a local dataset.

    That is `location` itself, or the index of the tars that `location` names (see `index_directory`) if there is one.
    """
    path = with_home(location)
    if not (path / MANIFEST_NAME).is_file() and ((index := index_directory(path)) / MANIFEST_NAME).is_file():
        return index
    return path


def index_directory(location: str | Path) -> Path:
    """Return the directory of the index of a location of tars, unless another is named: beside the tars.

    Unless the location is a directory, the name of its index ends in a hash of the location's name.
    """
    path = with_home(location).absolute()
    if path.is_dir():
        return path / INDEX_NAME
    words = re.sub(r"[^A-Za-z0-9]+", "-", path.name).strip("-")
    digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]
    return path.parent / f"{INDEX_NAME}-{words[:_MAX_WORDS]}-{digest}"


def names_tars(location: str | Path) -> bool:
    """Return whether a location seems to name tars and no dataset: by their ending, or a directory that holds some."""
    path = with_home(location)
    if path.is_dir():
        is_built = (path / MANIFEST_NAME).exists() or (path / PARTS_NAME).exists()
        return not is_built and any(tars_in(path))
    return is_tars(path.name) or (path.suffix in _LISTS and path.is_file())


def listed_tars(location: str | Path) -> list[str]:
    """Return the paths of the tars that a local location names, in the order in which they are read.

    A location is a directory, a tar, a pattern with braces such as `train-{000000..001281}.tar`, or a text file that
    names a tar in each line. No tar is opened. Raises `UserError` if a directory or a text file names none, or if a
    file is neither a tar by its name nor a text file.
    """
    path = with_home(location)
    if path.is_dir():
        paths = sorted(map(str, tars_in(path.absolute())))
        if not paths:
            raise UserError(f"{location} holds no file that ends in .tar; name a directory that does, or a pattern")
    elif path.is_file() and is_tars(path.name):
        paths = [str(path.absolute())]  # not a pattern, even if a folder has braces in its name
    elif path.is_file():
        lines = [line.strip() for line in _text(path).splitlines()]
        paths = [str((path.parent / line).absolute()) for line in lines if line and not line.startswith("#")]
        if not paths:
            raise UserError(f"{location} names no tars; write the path of one in each line")
    else:
        try:
            paths = [str(with_home(each).absolute()) for each in braceexpand(str(path))]
        except ValueError as error:
            raise UserError(
                f"{location} is not a pattern ({error}); write braces as in train-{{0000..0099}}.tar"
            ) from None
    return paths


def is_tars(name: str) -> bool:
    """Return whether a file name is that of a tar, compressed or not, or a pattern of tars.

    Examples:
        >>> is_tars("train-{0000..0009}.tar"), is_tars("X.TAR"), is_tars("photos"), is_tars(".tar_index")
        (True, True, False, False)
        >>> is_tars("photos.tgz")  # reading it says how to unpack it
        True
    """
    return not _ENDINGS.isdisjoint(Path(name.lower()).suffixes)


def tars_in(directory: Path) -> Iterator[Path]:
    """Yield the paths in a directory that end in .tar, in capitals or not. Skips hidden files.

    macOS lays a hidden `._x.tar` beside each `x.tar` that it copies to another file system.
    """
    return (path for path in directory.iterdir() if path.suffix.lower() == ".tar" and not path.name.startswith("."))


def compressed_tars_in(directory: Path) -> list[Path]:
    """Return the compressed tars in a directory, sorted. Skips those that were unpacked there, and hidden files."""
    unpacked = {path.name.lower() for path in tars_in(directory)}
    found = ((path, _COMPRESSED.fullmatch(path.name)) for path in sorted(directory.iterdir()))
    return [
        path
        for path, match in found
        if match is not None and not path.name.startswith(".") and f"{match[1].lower()}.tar" not in unpacked
    ]


def compression(head: bytes) -> tuple[str, str] | None:
    """Return how a file that begins with `head` is compressed, and the command that unpacks it; None if it is not.

    Examples:
        >>> compression(bytes.fromhex("1f8b0800")), compression(b"a/0.png")
        (('gzip', 'gunzip'), None)
    """
    return next((names for start, names in _COMPRESSIONS.items() if re.match(start, head, flags=re.DOTALL)), None)


def compression_error(path: str | Path, head: bytes) -> UserError | None:
    """Return the error of a file that begins with `head` if it is compressed; None if it is not."""
    if (found := compression(head)) is None:
        return None
    kind, command = found
    return UserError(
        f"{path} is compressed by {kind}; unpack it first, `{command} < {shlex.quote(str(path))} > NEW.tar`"
    )


def _text(path: Path) -> str:
    """Return the content of a text file. Raises `UserError` if it is compressed, or is no text."""
    content = path.read_bytes()
    if (wrong := compression_error(path, content[:HEAD_BYTES])) is not None:
        raise wrong
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(
            f"{path} is neither a tar, whose name ends in .tar, nor a text file in UTF-8 that names tars; name one of "
            "these"
        ) from None


@dataclass(frozen=True)
class ListDifference:
    """A difference between the tars of a location and of its index, and whether the location only has more of them."""

    words: str
    has_only_new: bool


def list_difference(index: Path, location: str | Path) -> ListDifference | None:
    """Compare the tars of a local location with the tars of an index. Return None if both are the same.

    None if the index has no list: reading the index then says what is wrong with it. Raises the errors of
    `listed_tars`.
    """
    try:
        lines = (index / TARS_NAME).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    listed, indexed = listed_tars(location), [str(index.absolute() / line) for line in lines]
    if listed == indexed:
        return None
    now, before = dict(zip(_keys(listed), listed, strict=True)), dict(zip(_keys(indexed), indexed, strict=True))
    if list(now) == list(before):
        return None
    new, gone = [key for key in now if key not in before], [key for key in before if key not in now]
    first = [f"{now[key]} is new" for key in new[:1]] + [f"{before[key]} is gone" for key in gone[:1]]
    said = " and ".join(first) or "they are in another order"
    words = f"{location} names {len(listed)} tars, and its index has {len(indexed)} ({said})"
    return ListDifference(words, has_only_new=bool(new) and not gone)


def _keys(paths: Sequence[str]) -> Iterator[tuple[object, str]]:
    """Yield the directory and the name of each path. A directory has one key, even if links lead to it."""
    known: dict[str, object] = {}
    for path in paths:
        directory, name = os.path.split(path)
        if directory not in known:
            try:
                status = Path(directory).stat()
                known[directory] = (status.st_dev, status.st_ino)
            except OSError:
                known[directory] = directory
        yield known[directory], name
