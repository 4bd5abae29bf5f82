"""List the tars that a location names, and compare them with the tars of an index."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from braceexpand import braceexpand

from data_pipeline.core.errors import UserError
from data_pipeline.storage.files import read_regular

TARS_NAME: Final = "tars.txt"  # of an index: the path or URL of each tar, a line each
MAX_TARS_BYTES: Final = 1 << 30


def listed_tars(location: str | Path) -> list[str]:
    """Return the paths of the tars that a local location names, in the order in which they are read.

    A location is a directory, a tar, a pattern with braces such as `train-{000000..001281}.tar`, or a text file that
    names a tar in each line. No tar is opened. Raises `UserError` if a directory or a text file names none.
    """
    path = Path(location).expanduser()
    if path.is_dir():
        paths = sorted(map(str, path.absolute().glob("*.tar")))
        if not paths:
            raise UserError(f"{location} holds no file that ends in .tar; name a directory that does, or a pattern")
    elif path.is_file() and ".tar" not in path.suffixes:
        lines = [line.strip() for line in path.read_text().splitlines()]
        paths = [str((path.parent / line).absolute()) for line in lines if line and not line.startswith("#")]
        if not paths:
            raise UserError(f"{location} names no tars; write the path of one in each line")
    else:
        try:
            paths = [str(Path(each).expanduser().absolute()) for each in braceexpand(str(path))]
        except ValueError as error:
            raise UserError(
                f"{location} is not a pattern ({error}); write braces as in train-{{0000..0099}}.tar"
            ) from None
    return paths


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
        lines = read_regular(index / TARS_NAME, max_bytes=MAX_TARS_BYTES).decode().splitlines()
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
