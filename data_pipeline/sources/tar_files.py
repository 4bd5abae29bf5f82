"""Read the files of tars, and of tars in them, as if they were unpacked."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from data_pipeline.sources.files import Files, ending_of, is_visible
from data_pipeline.storage.index import map_file
from data_pipeline.storage.locations import MANIFEST_NAME, listed_tars
from data_pipeline.storage.tar_headers import LINKS, are_numbered, name_of_tar, plain_contents, tars_in

TAR = ".tar"


class TarFiles(Files):
    """The files of a tar, of the tars of a pattern, or of all tars below a folder, but for those that a build wrote.

    A tar among others counts as a folder, as `_folders_of` says; so one tar for each class is a class folder.
    """

    def find(self, others: dict[str, str]) -> Iterator[str]:
        is_folder = self.root.is_dir()
        named = [] if is_folder else listed_tars(str(self.root))
        self.tars = sorted(filter(_is_tar, self.root.rglob("*"))) if is_folder else [*map(Path, named)]
        self._places: dict[str, tuple[Path, int, int]] = {}
        beside: defaultdict[Path, list[str]] = defaultdict(list)
        for path in self.tars:
            beside[path.parent].append(path.name)
        folders = {parent: _folders_of(names) for parent, names in beside.items()}
        for path in self.tars:
            data = map_file(path)
            folder = path.parent.relative_to(self.root) if is_folder else Path()
            contents = list(tars_in(data, plain_contents(data, str(path))))
            within = _folders_of([name for name, _ in contents[1:]])
            for name, found in contents:
                below = folder / folders[path.parent][path.name]
                if name:
                    below = below / Path(name).parent / within[name]
                if found.problem is not None:
                    others[f"{below / name}"] = f"the end of a tar, which {found.problem}"
                others |= {str(below / link): LINKS for link in found.links}
                for member, offset, size in found.members:
                    file = below / member
                    if not all(map(is_visible, file.parts)):
                        continue
                    if str(file) in self._places:
                        others[str(file)] = "another file of the same name"
                    self._places.setdefault(str(file), (path, offset, size))
        yield from sorted(self._places, key=lambda name: name.split("/"))

    def read(self, name: str) -> bytes:
        assert self.names  # which finds the places, too
        path, start, size = self._places[name]
        with path.open("rb") as file:
            file.seek(start)
            return file.read(size)


def _is_tar(path: Path) -> bool:
    """Return whether a file is a tar to read: not one of a dataset that this program has built, or is building."""
    is_built = (path.parent / MANIFEST_NAME).is_file() or path.parent.name.endswith(".partial")
    return ending_of(path.name) == TAR and is_visible(path.name) and not is_built


def _folders_of(tars: Collection[str]) -> dict[str, str]:
    """Return the folder that each of some tars counts as: that of `rows_of`, or "" if there is one alone."""
    rows = rows_of(tars)
    return {tar: word if len(rows) > 1 else "" for word, row in rows.items() for tar in row}


def rows_of(tars: Collection[str]) -> dict[str, list[str]]:
    """Return tars in rows of those that are numbered one after another; any other tar is a row of its own.

    Examples:
        >>> rows_of(["train-00.tar", "train-01.tar", "owl.tar"])
        {'train': ['train-00.tar', 'train-01.tar'], 'owl': ['owl.tar']}
    """
    rows: defaultdict[str, list[str]] = defaultdict(list)
    for tar in tars:
        rows[re.sub(r"[-_.]?\d+$", "", name_of_tar(tar))].append(tar)
    found: dict[str, list[str]] = {}
    for word, row in rows.items():
        found |= {word: row} if are_numbered(list(map(name_of_tar, row))) else {name_of_tar(tar): [tar] for tar in row}
    return found
