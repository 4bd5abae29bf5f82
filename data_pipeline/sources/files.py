"""Files that are read by one interface, wherever they lie: see `data_pipeline.sources.places`."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Final, TypeVar

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import Medium
from data_pipeline.storage.locations import PICTURE_ENDINGS, SOUND_ENDINGS

T = TypeVar("T")

_LEFT_BEHIND: Final = frozenset({"__macosx", "thumbs.db", "desktop.ini"})


def is_visible(name: str) -> bool:
    """Return whether a file or folder of this name, without the folders above it, counts as there."""
    return not name.startswith(".") and name.casefold() not in _LEFT_BEHIND


def ending_of(name: str) -> str:
    """Return the ending of the name of a file, in small letters and with its dot; "" if it has none.

    Examples:
        >>> ending_of("a.b/IMG.2021.JPG"), ending_of("a.b/IMG")
        ('.jpg', '')
    """
    stem, _, ending = name.rpartition("/")[2].rpartition(".")
    return f".{ending.lower()}" if stem else ""


def medium_of(name: str) -> Medium | None:
    """Return which medium the ending of a file's name says.

    Examples:
        >>> medium_of("a/IMG_1.JPG"), medium_of("a.flac"), medium_of("labels.csv")
        ('picture', 'sound', None)
    """
    ending = ending_of(name)[1:]
    return "picture" if ending in PICTURE_ENDINGS else "sound" if ending in SOUND_ENDINGS else None


class Files(ABC):
    """The files below `root`, a folder, an archive or a table.

    Pickled, it is the path of `root` alone; a copy looks for the names again when it is asked for them.
    `classes` holds the class names, in order, of each label for which a table names them.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.classes: dict[str, tuple[str, ...]] = {}

    def __reduce__(self) -> tuple[Callable[..., Files], tuple[Path | None, ...]]:
        return type(self), (self.root,)

    @property
    def names(self) -> list[str]:
        """Return the path of each visible file below `root`, with "/" between its parts and sorted by them."""
        return self._found[0]

    @property
    def others(self) -> dict[str, str]:
        """Return what is visible and cannot be read, such as a link in a tar: the reason by name."""
        return self._found[1]

    @cached_property
    def columns(self) -> dict[str, list[str]]:
        """Return the labels that a table has: the word of each of `names`, "" without one, by the name of the label."""
        return {}

    @cached_property
    def _found(self) -> tuple[list[str], dict[str, str]]:
        others: dict[str, str] = {}
        return list(self.find(others)), others

    @abstractmethod
    def find(self, others: dict[str, str]) -> Iterator[str]:
        """Yield `names`, and add to `others`."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises `OSError`, or `ValueError` with the reason if it is damaged."""

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading at any place. Raises as `read` does."""
        return io.BytesIO(self.read(name))

    def decoded(self, name: str, decode: Callable[[bytes], T]) -> T:
        """Return what `decode` makes of a file. Raises `UserError` with its name in place of the errors of both."""
        try:
            return decode(self.read(name))
        except (OSError, ValueError) as error:
            why = f"it is not there ({error.strerror})" if isinstance(error, OSError) else str(error)
            raise UserError(f"{self.root / name} cannot be read, because {why}; mend or remove it") from None
