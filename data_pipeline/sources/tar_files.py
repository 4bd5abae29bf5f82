"""Read the files of tars, and of tars in them, as if they were unpacked."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from data_pipeline.sources.files import Files, ending_of, is_visible
from data_pipeline.storage.index import map_file
from data_pipeline.storage.locations import MANIFEST_NAME, listed_tars
from data_pipeline.storage.tar_headers import TarContents, plain_contents, read_contents

TAR = ".tar"


class TarFiles(Files):
    """The files of a tar, of the tars of a pattern, or of all tars below a folder, but for those that a build wrote.

    Tars that lie in one place and are not numbered count as folders, so that one tar for each class is a class folder.
    """

    def find(self, others: dict[str, str]) -> Iterator[str]:
        is_folder = self.root.is_dir()
        paths = sorted(self.root.rglob(f"*{TAR}")) if is_folder else map(Path, listed_tars(str(self.root)))
        self.tars = [path for path in paths if is_visible(path.name) and not _is_built(path.parent)]
        self._places: dict[str, tuple[Path, int, int]] = {}
        for path in self.tars:
            data = map_file(path)
            contents = plain_contents(data, str(path))
            parent = path.parent.relative_to(self.root) if is_folder else Path()
            beside = [other.stem for other in self.tars if other.parent == path.parent]
            below = parent if are_numbered(beside) else parent / path.stem
            yield from self._members(path, data, 0, contents, below, others)

    def _members(
        self, path: Path, data: memoryview, start: int, contents: TarContents, below: Path, others: dict[str, str]
    ) -> Iterator[str]:
        """Yield the names of the files of a tar that begins at `start` of a file, and those of the tars in it."""
        if contents.problem is not None:
            others[str(below)] = f"the end of a tar, which {contents.problem}"
        others |= dict.fromkeys(contents.sparse, "a sparse file of a tar; pack it without `--sparse`")
        inner = {member: Path(member.name).stem for member in contents.members if ending_of(member.name) == TAR}
        for member in contents.members:
            name = below / member.name
            if not all(map(is_visible, name.parts)):
                continue
            if member in inner:
                part = data[member.offset : member.offset + member.size]
                within = name.parent if are_numbered(inner.values()) else name.with_suffix("")
                yield from self._members(path, part, start + member.offset, read_contents(part), within, others)
            elif str(name) in self._places:
                others[str(name)] = "another file of the same name"
            else:
                self._places[str(name)] = path, start + member.offset, member.size
                yield str(name)

    def read(self, name: str) -> bytes:
        assert self.names  # which finds the places, too
        path, start, size = self._places[name]
        with path.open("rb") as file:
            file.seek(start)
            return file.read(size)


def _is_built(folder: Path) -> bool:
    """Return whether a folder holds a dataset that this program has built, or is building."""
    return (folder / MANIFEST_NAME).is_file() or folder.name.endswith(".partial")


def are_numbered(names: Collection[str]) -> bool:
    """Return whether names differ by a number alone, which counts them all."""
    numbers = sorted({int(match[1]) for name in names if (match := re.search(r"(\d+)\D*$", name))})
    return len(numbers) == len(names) == numbers[-1] - numbers[0] + 1 if numbers else False
