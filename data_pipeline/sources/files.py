"""Find files and read them, wherever they lie: in a folder or in a zip.

Hidden files and folders, and what operating systems leave behind (`__MACOSX`, `Thumbs.db`, `desktop.ini`), count as not
there. Links to files and folders are followed.
"""

from __future__ import annotations

import io
import os
import threading
import zipfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Final, overload

from data_pipeline.core.errors import UserError

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


class Names(Sequence[str]):
    """Many names in little memory: their bytes end to end, and 8 bytes for each."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        joined, stops = bytearray(), array("q", [0])
        for name in names:
            joined += os.fsencode(name)
            stops.append(len(joined))
        self._joined, self._stops = bytes(joined), stops

    def __len__(self) -> int:
        return len(self._stops) - 1

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        return os.fsdecode(self._joined[self._stops[number] : self._stops[number + 1]])


class Files(ABC):
    """The files below `root`, a folder or an archive.

    Pickled, it is the path of `root` alone; a copy looks for the names again when it is asked for them.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def __reduce__(self) -> tuple[Callable[[Path], Files], tuple[Path]]:
        return type(self), (self.root,)

    @property
    def names(self) -> Names:
        """Return the path of each visible file below `root`, with "/" between its parts and sorted by them."""
        return self._found[0]

    @property
    def others(self) -> dict[str, str]:
        """Return what is visible and cannot be read or holds nothing, such as a broken link: the reason by name."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[Names, dict[str, str]]:
        others: dict[str, str] = {}
        return Names(self.find(others)), others

    @abstractmethod
    def find(self, others: dict[str, str]) -> Iterator[str]:
        """Yield `names`, and add to `others`."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises `OSError`, or `ValueError` with the reason if it is damaged."""

    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading at any place. Raises as `read` does."""
        return io.BytesIO(self.read(name))


class Directory(Files):
    """The files of a folder, and of the folders in it at any depth."""

    def find(self, others: dict[str, str]) -> Iterator[str]:
        yield from self._walk("", (os.path.realpath(self.root),), others)

    def _walk(self, below: str, above: tuple[str, ...], others: dict[str, str]) -> Iterator[str]:
        """Yield the files of the folder `below`, "" or "a/b/"; `above` are the real paths of it and those above it."""
        try:
            with os.scandir(self.root / below) as found:
                entries = sorted((entry for entry in found if is_visible(entry.name)), key=lambda entry: entry.name)
        except OSError as error:
            if not below:
                raise
            others[below] = f"cannot be entered ({error.strerror})"
            return
        if not entries and below:
            others[below] = "an empty folder"
        for entry in entries:
            name = below + entry.name
            if entry.is_file():
                yield name
            elif not entry.is_dir():
                others[name] = "a broken link" if entry.is_symlink() else "no regular file"
            elif not entry.is_symlink():
                yield from self._walk(f"{name}/", (*above, f"{above[-1]}/{entry.name}"), others)
            elif any(f"{path}/".startswith(f"{os.path.realpath(entry.path)}/") for path in above):
                others[name] = "a link to a folder above it"
            else:
                yield from self._walk(f"{name}/", (*above, os.path.realpath(entry.path)), others)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def open(self, name: str) -> IO[bytes]:
        return (self.root / name).open("rb")


class Zip(Files):
    """The files of a zip, which is not unpacked. Threads may read at the same time, each process by its own handle."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._lock, self._process = threading.Lock(), 0
        self._opened()

    def _opened(self) -> zipfile.ZipFile:
        with self._lock:
            if self._process != os.getpid():
                try:
                    self._zip = zipfile.ZipFile(self.root)
                except zipfile.BadZipFile as error:
                    raise UserError(f"{self.root} is not a whole zip ({error}); copy it again") from None
                self._process = os.getpid()
            return self._zip

    def find(self, others: dict[str, str]) -> Iterator[str]:
        members = {info.filename: info for info in self._opened().infolist() if not info.is_dir()}
        for name in sorted(members, key=lambda name: name.split("/")):
            if not all(map(is_visible, name.split("/"))):
                continue
            if members[name].flag_bits & 1:
                others[name] = "encrypted"
            else:
                yield name

    def read(self, name: str) -> bytes:
        archive = self._opened()
        try:
            with self._lock:  # ZipFile counts its open members without one
                member = archive.open(name)
            try:
                return member.read()
            finally:
                with self._lock:
                    member.close()
        except Exception as error:  # the module raises nearly every kind for a damaged member
            raise ValueError(f"it cannot be unpacked ({error})") from None


def open_files(root: Path) -> Files:
    """Open a folder or a zip. Raises `UserError` if it is neither."""
    if root.is_dir():
        return Directory(root)
    if root.is_file() and zipfile.is_zipfile(root):
        return Zip(root)
    raise UserError(
        f"{root} is not a folder{', nor a zip' if root.is_file() else ''}; give --root the folder or the zip that "
        "holds your files"
    )
