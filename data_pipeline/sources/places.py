"""Open the files of a folder, of a zip, of tars, or of tables.

Hidden files and folders, and what operating systems leave behind (`__MACOSX`, `Thumbs.db`, `desktop.ini`), count as not
there. Links to files and folders are followed.
"""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from data_pipeline.core.errors import UserError
from data_pipeline.sources.arrow_files import ArrowFiles, NoContentError, tables_in
from data_pipeline.sources.files import Files, ending_of, is_visible, medium_of
from data_pipeline.sources.tar_files import TAR, TarFiles
from data_pipeline.storage.locations import is_tars


class Directory(Files):
    """The files of a folder, and of the folders in it at any depth. Raises `OSError` if one cannot be entered."""

    def find(self, others: dict[str, str]) -> Iterator[str]:
        names = list[str]()
        for above, folders, files in os.walk(self.root, onerror=_raise, followlinks=True):
            folder = Path(above)
            folders[:] = [name for name in folders if is_visible(name) and not _leads_back(folder / name)]
            below = "".join(f"{part}/" for part in folder.relative_to(self.root).parts)
            names += [below + name for name in files if is_visible(name)]
        yield from sorted(names, key=lambda name: name.split("/"))

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def open(self, name: str) -> IO[bytes]:
        return (self.root / name).open("rb")


def _raise(error: OSError) -> None:
    raise error


def _leads_back(folder: Path) -> bool:
    """Return whether a folder is a link to one above it, which would be followed for ever."""
    return folder.is_symlink() and folder.resolve() in map(Path.resolve, folder.absolute().parents)


class Zip(Files):
    """The files of a zip, which is not unpacked. Threads may read at the same time, and a pickled copy elsewhere."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._lock = threading.Lock()
        self._zip = zipfile.ZipFile(root)

    def find(self, others: dict[str, str]) -> Iterator[str]:
        names = {tuple(info.filename.split("/")) for info in self._zip.infolist() if not info.is_dir()}
        yield from ("/".join(name) for name in sorted(names) if all(map(is_visible, name)))

    def read(self, name: str) -> bytes:
        try:
            with self._lock:
                return self._zip.read(name)
        except Exception as error:  # the module raises nearly every kind for a damaged member
            raise ValueError(f"it cannot be unpacked ({error})") from None


def open_files(root: Path) -> Files:
    """Open a folder, a zip, tars, or tables of files. Raises `UserError` if it is none of them."""
    if root.is_dir():
        try:
            if tables_in(root):
                return ArrowFiles(root)
        except NoContentError:  # tables that lie beside the files
            pass
        directory = Directory(root)
        has_tars = any(ending_of(name) == TAR for name in directory.names)
        return TarFiles(root) if has_tars and not any(map(medium_of, directory.names)) else directory
    if is_tars(root.name):
        return TarFiles(root)
    if root.is_file() and zipfile.is_zipfile(root):
        return Zip(root)
    if tables_in(root):
        return ArrowFiles(root)
    is_what = "is no folder, zip, tar or table of files" if root.exists() else "does not exist"
    raise UserError(f"{root} {is_what}; name the folder or the zip that holds your files")
